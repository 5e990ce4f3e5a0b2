"""Processes that stay when their starter ends, found again by a file each.

The file holds the process id and when the process began: an id that was given to another process
since is not ours to end.
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
    """Run `command` in a session of its own and write who it is to `record`; its id."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
    record.write_text(f"{process.pid} {_began(process.pid)}")
    # It is nobody's to wait for here; a running one would be reported as forgotten.
    process.returncode = 0
    return process.pid


def find(record: Path) -> int | None:
    """The id of the process of `record`; None when it ended."""
    if not record.exists():
        return None
    pid, began = record.read_text().split()
    return int(pid) if _began(int(pid)) == began else None


def kill(record: Path) -> None:
    """End the process of `record` at once, and wait until it is gone."""
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


def _began(pid: int) -> str | None:
    """Its start, in ticks since the machine's; None when it is gone or only waits to be reaped."""
    try:
        # The name in parentheses may hold anything; what follows is fixed.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
