"""A command in a process group of its own that cannot outlive this process."""

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
        read_end, write_end = os.pipe()
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", init.__file__, str(read_end), *command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(env),
                    cwd=cwd,
                    # Not a session: Linux shares CPUs out by session, too (autogroups), and beside
                    # two that poll without pause, as NIXL's do, the others wait for seconds.
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
        """Its first process, which is also the id of its process group."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code, once it and all it started are gone; 128 + the signal that ended it."""
        code = await self._process.wait()
        self.kill()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """SIGTERM to the command."""
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to all that it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def tail(log: Path, lines: int = 20) -> list[str]:
    """The last lines of a log; none when it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 256 * lines))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
