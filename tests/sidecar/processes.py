"""The command as a process."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tandem_contract.commandline import HostPort

COMMAND = (sys.executable, "-m", "tandem_sidecar.main")
FREE = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
READY = re.compile(r"serving on ([\d.]+):(\d+), admin on ([\d.]+):(\d+)")
_SECONDS = 60


@dataclass
class Sidecar:
    """One that serves."""

    process: asyncio.subprocess.Process
    listen: HostPort
    admin: HostPort
    log: str = ""
    """What was read of it."""

    def url(self, path: str = "/v1/completions") -> str:
        return f"http://{self.listen}{path}"

    def asked(self, path: str) -> str:
        """A URL of the admin port."""
        return f"http://{self.admin}{path}"

    async def says(self, words: str) -> str:
        """The next line of its log that holds `words`."""
        async with asyncio.timeout(_SECONDS):
            while words not in (line := await self._line()):
                assert line, f"ended without saying {words!r}: {self.log}"
            return line

    async def rest(self) -> str:
        """Its log to the end."""
        async with asyncio.timeout(_SECONDS):
            while await self._line():
                pass
        return self.log

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), _SECONDS)

    async def _line(self) -> str:
        assert self.process.stderr is not None
        line = (await self.process.stderr.readline()).decode()
        self.log += line
        return line


async def spawn(*arguments: str, under: tuple[str, ...] = ()) -> asyncio.subprocess.Process:
    pipe, command = asyncio.subprocess.PIPE, (*under, *COMMAND, *arguments)
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)


async def fails(*arguments: str) -> tuple[int, str]:
    """Exit status and log of one that does not start."""
    process = await spawn(*arguments)
    out, err = await asyncio.wait_for(process.communicate(), _SECONDS)
    assert out == b""
    assert process.returncode is not None
    return process.returncode, err.decode()


@asynccontextmanager
async def sidecar(*arguments: str, under: tuple[str, ...] = ()) -> AsyncIterator[Sidecar]:
    """`under`: a command that becomes it."""
    process = await spawn(*FREE, *arguments, under=under)
    it = Sidecar(process, HostPort("", 0), HostPort("", 0))
    try:
        line = await it.says("")
        match = READY.search(line)
        assert match is not None, line
        it.listen = HostPort(match[1], int(match[2]))
        it.admin = HostPort(match[3], int(match[4]))
        yield it
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
