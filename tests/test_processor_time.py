"""`--cpu`: the time of a test's processes is that of its file, with workers and without."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .cluster.fixtures import LEFT_OUT

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests import workers
from tests.processor_time import ProcessorTime

def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=0)

def pytest_configure(config):
    config.pluginmanager.register(ProcessorTime())

def pytest_runtestloop(session):
    return workers.run(session)
"""
BURNS = """
import subprocess, sys
COMMAND = [sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"]
def test_a(): subprocess.run(COMMAND, check=True)
def test_b(): subprocess.run(COMMAND, check=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason=f"{LEFT_OUT}CONTROL GROUPS NEED ROOT")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_time_of_processes_is_that_of_the_file(tmp_path: Path, workers: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_burns.py").write_text(BURNS)
    (tmp_path / "test_idle.py").write_text("def test_c(): ...\n")
    command = [sys.executable, "-m", "pytest", "--workers", workers, "-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"([0-9.]+)  (test_\w+\.py|all) ", done.stdout)
    assert [name for _, name in lines] == ["test_burns.py", "test_idle.py", "all"]
    burnt, idle, total = (float(seconds) for seconds, _ in lines)
    assert burnt >= 1.0 > idle
    assert total == pytest.approx(burnt + idle, abs=0.11)
