"""Missing programs are reported and not built; only processes that we started are killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import detached, tools, versions

ROOT = Path(__file__).parents[2]


def test_missing_programs_are_reported_in_capitals_and_not_built(tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.write_text(f"#!/bin/sh\n: > {tmp_path}/go-was-called\n")
    go.chmod(0o755)
    environment = {
        "PATH": str(tmp_path),
        "HOME": str(tmp_path),
        "TANDEM_CLUSTER_CACHE": str(tmp_path / "cache"),
    }
    test_id = "tests/cluster/test_control_plane.py::test_knows_users_by_certificate"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test_id],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert "TESTS LEFT OUT" in ran.stdout
    assert "1 TESTS DID NOT RUN: NO etcd, kubectl, kube-apiserver" in ran.stdout
    assert "make cluster-tools" in ran.stdout
    assert not (tmp_path / "go-was-called").exists()
    assert not (tmp_path / "cache").exists()


def test_kubebuilder_assets_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "kube-apiserver"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    assert tools.path("kube-apiserver") == program


def test_a_program_of_another_version_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CLUSTER_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    old = tmp_path / "bin/helm"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho v3.0.0\n")
    old.chmod(0o755)
    with pytest.raises(tools.MissingTool, match="no Go"):
        tools.ensure(["helm"], lambda _line: None)


@pytest.mark.component
def test_ends_the_process_it_started(tmp_path: Path) -> None:
    record = tmp_path / "pid"
    pid = detached.start(record, ["sleep", "600"], log=tmp_path / "log")
    assert detached.find(record) == pid
    detached.kill(record)
    assert detached.find(record) is None
    os.waitpid(pid, 0)


@pytest.mark.component
def test_leaves_alone_a_process_that_has_the_number_since(tmp_path: Path) -> None:
    record = tmp_path / "pid"
    with subprocess.Popen(["sleep", "600"]) as process:
        record.write_text(f"{process.pid} 1")
        detached.kill(record)
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize(("version", "warns"), [("1.30.1", True), (versions.KUBERNETES, False)])
def test_a_kubectl_of_another_minor_version_is_told(
    version: str, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\necho Client Version: v{version}\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    warning = tools.kubectl_warning()
    assert (warning is not None) is warns
    assert warning is None or str(kubectl) in warning
