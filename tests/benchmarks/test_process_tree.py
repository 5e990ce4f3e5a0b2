"""CPU time of a program with children, some of which outlive their parents."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from benchmarks import process_tree

pytestmark = pytest.mark.component
BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
# The middle process exits at once, without waiting for the process that it has started.
ORPHAN = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BURN!r}])\n"
WAITED = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n"


@pytest.mark.parametrize("program", [BURN, WAITED, ORPHAN])
def test_the_cpu_time_of_every_process_counts(program: str, tmp_path: Path) -> None:
    file = tmp_path / "usage.json"
    command = [sys.executable, "-P", process_tree.__file__, str(file), sys.executable, "-c"]
    assert subprocess.run([*command, program], check=False).returncode == 0
    usage = msgspec.json.decode(file.read_bytes(), type=process_tree.Usage)
    assert usage.status == 0
    assert usage.cpu >= 0.3


def test_the_exit_status_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "usage.json"
    command = [sys.executable, "-P", process_tree.__file__, str(file), sys.executable, "-c"]
    assert subprocess.run([*command, "import sys; sys.exit(3)"], check=False).returncode == 1
    assert msgspec.json.decode(file.read_bytes(), type=process_tree.Usage).status == 3


def test_processes_below_another_are_found_and_killed() -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "sys.exit(child.wait())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert process_tree.descendants(parent.pid) == [child]
        start, end = process_tree.pause(parent.pid, 0.0)
        assert start <= end
        process_tree.kill_below(parent.pid)
        assert parent.wait() == 256 - signal.SIGKILL
    assert process_tree.descendants(parent.pid) == []
