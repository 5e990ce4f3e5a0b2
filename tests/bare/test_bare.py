"""A test that starts a program without declaring it fails in `make bare`, wherever it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .recorder import HIDDEN, ROOT

pytestmark = pytest.mark.long

CONFTEST = """
from tests.bare.recorder import record

def pytest_configure(config):
    record(config)
"""
TESTS = """
import shutil
import subprocess

import pytest

NAME = "etcd-of-the-test"

@pytest.fixture(scope="session")
def server():
    program = shutil.which(NAME)
    assert program is not None, "no etcd"
    subprocess.run(["setpriv", "--pdeathsig=KILL", program], check=True)

def test_starts_nothing():
    pass

def test_starts_it_undeclared(server):
    pass

def test_asks_before():
    if shutil.which(NAME) is None:
        pytest.skip("LEFT OUT: NO etcd.")
    subprocess.run([NAME], check=True)

def test_skips_without_a_word():
    if shutil.which(NAME) is None:
        pytest.skip("no etcd")
    subprocess.run([NAME], check=True)
"""


def test_what_starts_programs_undeclared_fails(tmp_path: Path) -> None:
    programs, project = tmp_path / "programs", tmp_path / "project"
    _executable(programs / "etcd-of-the-test")
    for folder in (project / "tests/deep", tmp_path / "temporary"):
        folder.mkdir(parents=True)
    (project / "pytest.ini").write_text("[pytest]\n")
    (project / "conftest.py").write_text(CONFTEST)
    (project / "tests/deep/test_any.py").write_text(TESTS)
    # The project's own run is not hidden, even if this one is.
    visible = {name: value for name, value in os.environ.items() if name != HIDDEN}
    environment = visible | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        # What a test writes there is no program of the machine.
        "TMPDIR": str(tmp_path / "temporary"),
    }
    normal = _run(project, environment, "pytest", "-q")
    assert normal.returncode == 0, normal.stdout
    for _ in range(2):
        bare = _run(project, environment, "tests.bare", "-rA")
    assert bare.returncode == 1, bare.stdout
    assert "2 skipped, 1 deselected, 1 error" in bare.stdout
    assert "ERROR tests/deep/test_any.py::test_starts_it_undeclared" in bare.stdout
    (silent,) = [line for line in bare.stdout.splitlines() if "SKIPPED WITHOUT" in line]
    assert "test_skips_without_a_word: no etcd" in silent


def _executable(file: Path) -> Path:
    file.parent.mkdir(parents=True)
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def _run(
    folder: Path, environment: dict[str, str], module: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
