"""A command in a process group of its own that cannot outlive this process.

`init` is the group's first process. It holds the read end of a pipe (the lifeline) of which this
process holds the only write end: when this process ends, the kernel closes the pipe and `init`
kills the group.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from . import init


class Process:
    """A running command; its output goes to a file. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int) -> None:
        self._process = process
        self._lifeline = lifeline

    @classmethod
    async def start(
        cls, command: Sequence[str], *, env: Mapping[str, str], cwd: str | None, log: Path
    ) -> Self:
        """Run `command`, appending its stdout and stderr to `log`. Raises OSError."""
        # Python's descriptors are not inherited (PEP 446): no other child keeps the write end open.
        read_end, write_end = os.pipe()
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    # -I -S: neither the environment nor site-packages delay or change the start of
                    # init.
                    *(sys.executable, "-I", "-S", init.__file__, str(read_end), *command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(env),
                    cwd=cwd,
                    # A process group, not a session: Linux also shares CPUs out by session
                    # (autogroups). NIXL polls without pause; with two such engines in sessions of
                    # their own, the other processes wait for seconds.
                    process_group=0,
                    pass_fds=(read_end,),
                )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return cls(process, write_end)

    @property
    def pid(self) -> int:
        """Id of the first process, which is also the id of the process group."""
        return self._process.pid

    async def wait(self) -> int:
        """The command's exit code, or 128 + the signal that ended it.

        Returns once the command has ended and everything that it started has been killed.
        """
        code = await self._process.wait()
        # The command may have left children behind; they are in the same group.
        self.kill()
        # Closed once only: the kernel may have given the number to another file since.
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """Send SIGTERM to the command."""
        # A process that has ended is reaped, and its id may belong to another process.
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the whole process group."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def tail(log: Path, lines: int = 20) -> list[str]:
    """The last lines of a log; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 256 * lines))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
