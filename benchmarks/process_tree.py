"""Runs a program and measures the CPU time of all its processes.

    python -m benchmarks.process_tree FILE PROGRAM [ARGUMENT …]

A load generator of several processes costs what all of them use. The kernel adds the CPU time of a
process to its parent's when the parent waits for it. This wrapper is the parent of last resort
(PR_SET_CHILD_SUBREAPER): a process whose parent ends first becomes a child of the wrapper, which
waits for all of them, so that no CPU time is missed. FILE gets a `Usage` as JSON. Linux only.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

_SET_CHILD_SUBREAPER: Final = 36
"""`PR_SET_CHILD_SUBREAPER` of prctl(2)."""
_GRACE: Final = 10.0
"""Seconds that other processes may go on after the program has ended; then they are killed."""


class Usage(msgspec.Struct, frozen=True):
    """What a program used."""

    status: int
    """Exit status; negative: the signal that ended it."""
    cpu: float
    """Seconds of user and system time of all its processes."""
    wall: float
    """Seconds from its start to its end."""


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            # It has ended since the directory was read.
            except (FileNotFoundError, ProcessLookupError):
                continue
            # Behind the program's name in parentheses: state, parent.
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    below = list(children.get(pid, ()))
    # The list grows while it is read: children of children follow.
    for process in below:
        below += children.get(process, ())
    return below


def pause(pid: int, seconds: float) -> tuple[float, float]:
    """Stop all processes below `pid` for `seconds`, as a machine without free CPU would.

    Returns when they stopped and went on, by the monotonic clock.
    """
    stopped = descendants(pid)
    _signal(stopped, signal.SIGSTOP)
    start = time.monotonic()
    time.sleep(seconds)
    _signal(stopped, signal.SIGCONT)
    return start, time.monotonic()


def kill_below(pid: int) -> None:
    """Kill all processes below `pid`."""
    _signal(descendants(pid), signal.SIGKILL)


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        # It may have ended by itself.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def measure(command: list[str]) -> Usage:
    """Run `command` to its end, and that of all its processes."""
    _adopt_orphans()
    started = time.monotonic()
    program = subprocess.Popen(command)
    status = program.wait()
    wall = time.monotonic() - started
    _reap(time.monotonic() + _GRACE)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Usage(status, used.ru_utime + used.ru_stime, wall)


def _adopt_orphans() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _reap(deadline: float) -> None:
    """Wait for all processes; kill those that are left at `deadline`."""
    while True:
        try:
            process, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not process:
            if time.monotonic() > deadline:
                kill_below(os.getpid())
            time.sleep(0.01)


def main() -> None:
    """Run the program of the command line; the exit status is its own."""
    file, *command = sys.argv[1:]
    usage = measure(command)
    Path(file).write_bytes(msgspec.json.encode(usage))
    sys.exit(usage.status != 0)


if __name__ == "__main__":
    main()
