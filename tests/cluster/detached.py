"""Processes that outlive their starter; a record file identifies each.

The file holds the process id and start time, so that a process which got the same id later is never
killed.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_GONE_SECONDS = 20


def start(
    record: Path, command: Sequence[object], *, log: Path, env: Mapping[str, str] | None = None
) -> int:
    """Start `command` in a new session, write its record file, and return its process id."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
    record.write_text(f"{process.pid} {_start_time(process.pid)}")
    # The process is meant to outlive this one; without a return code, Popen's finalizer would warn
    # that it still runs.
    process.returncode = 0
    return process.pid


def find(record: Path) -> int | None:
    """The process id in `record`; None when that process has ended."""
    if not record.exists():
        return None
    pid, started = record.read_text().split()
    return int(pid) if _start_time(int(pid)) == started else None


def kill(record: Path) -> None:
    """Kill the process of `record`, wait until it is gone, and delete the record."""
    pid = find(record)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _GONE_SECONDS
        while find(record) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
    record.unlink(missing_ok=True)


def child(pid: int) -> int | None:
    """The first child of `pid`."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def _start_time(pid: int) -> str | None:
    """Start time in clock ticks since boot; None when the process is gone or a zombie."""
    try:
        # Field 2, the name in parentheses, may contain spaces and parentheses; split after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
