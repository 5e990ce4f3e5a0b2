"""`--workers N`: the results of one process; groups keep their fixtures; a worker's end is told."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFTEST = """
import os
import pytest
from tests import workers

def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=0)

def pytest_configure(config):
    config.addinivalue_line("markers", "group: as in pyproject.toml")

def pytest_runtestloop(session):
    return workers.run(session)

@pytest.fixture(scope="session")
def server(request):
    yield os.getpid()
    with open(request.config.rootpath / "ended", "a") as log:
        print(os.getpid(), file=log)
"""


def run(folder: Path, files: Mapping[str, str], *options: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "--workers", "2", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_reports_what_one_process_would_and_the_end_of_a_worker(tmp_path: Path) -> None:
    grouped = (
        "import os, pytest\npytestmark = pytest.mark.group('{}')\n"
        "def test_it(server): assert server == os.getpid()\n"
    )
    output = run(
        tmp_path,
        {
            "passes": "def test_a(tmp_path): assert tmp_path.parent.name.startswith('worker-')\n",
            "fails": "def test_b():\n    print('printed', 'by b')\n    assert [1] == [2]\n",
            "skips": "import pytest\n@pytest.mark.skip('no reason')\ndef test_c(): ...\n",
            "breaks": "import pytest\n@pytest.fixture\ndef f():\n    yield\n    1 / 0\n"
            "def test_d(f): ...\n",
            "ends": "import os\ndef test_e(): ...\ndef test_f(): os._exit(9)\ndef test_g(): ...\n",
            "z1": grouped.format("one"),
            "z2": grouped.format("two"),
            "z3": grouped.format("one"),
            "z4": grouped.format("two"),
        },
    )

    assert "2 failed, 8 passed, 1 skipped, 1 error" in output
    assert "assert [1] == [2]" in output
    assert "printed by b" in output
    assert "ZeroDivisionError" in output
    # Only the test that the worker ran; another runs the rest of the file.
    assert "FAILED test_ends.py::test_f - The worker that ran this test ended with 9." in output
    # No worker set up the fixture twice, or left it.
    ended = (tmp_path / "ended").read_text().split()
    assert len(ended) == len(set(ended)) <= 2


def test_stops_at_the_first_failure_when_asked(tmp_path: Path) -> None:
    output = run(tmp_path, {"fails": "def test_a(server): assert False\ndef test_b(): ...\n"}, "-x")

    assert "1 failed in" in output
    assert "stopping after 1 failures" in output
    assert (tmp_path / "ended").exists()
