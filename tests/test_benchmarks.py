"""`make bench` on a machine that lacks the programs which some benchmarks start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.component
ROOT = Path(__file__).parent.parent


def _bench(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run every benchmark with an empty PATH and an empty cache of cluster programs."""
    environment = {
        **{k: v for k, v in os.environ.items() if k != "KUBEBUILDER_ASSETS"},
        "PATH": str(tmp_path),
        "TANDEM_ENVOY": str(tmp_path / "envoy"),
        "TANDEM_CLUSTER_CACHE": str(tmp_path),
    }
    return subprocess.run(
        [sys.executable, "-m", "benchmarks"],
        cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_missing_programs_are_named_before_anything_is_measured(tmp_path: Path) -> None:
    done = _bench(tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = [line.strip() for line in done.stderr.splitlines()]
    assert lines[0] == "Error: programs are missing, so nothing was measured:"
    assert any(
        line.startswith("router: h2load is not installed: apt-get install nghttp2-client")
        for line in lines
    )
    assert any(line.startswith("sidecar: TANDEM_ENVOY=") for line in lines)
    assert any(line.startswith("operator: kwok is missing: install Go") for line in lines)
    assert any(line == "operator: etcd is missing: apt-get install etcd-server" for line in lines)
    assert lines[-1].endswith("python -m benchmarks.NAME")
