"""The command as a process."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort

COMMAND = (sys.executable, "-m", "tandem_sidecar.main")
FREE = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
READY = re.compile(r"serving on ([\d.]+):(\d+), admin on ([\d.]+):(\d+)")
_SECONDS = 180


async def drain(admin: HostPort, *, wait: bool = False) -> object:
    """Ask the server with this admin port for a drain; returns the JSON of its answer."""
    name = endpoints.DRAIN_SOCKET.format(host=admin.host, port=admin.port)
    path = endpoints.DRAIN_AND_WAIT if wait else endpoints.DRAIN
    connector = aiohttp.UnixConnector(f"\0{name}")
    async with (
        aiohttp.ClientSession("http://sidecar", connector=connector) as http,
        http.post(path) as answer,
    ):
        return await answer.json()


@dataclass
class Sidecar:
    """A process that serves: of a sidecar, or of a router."""

    process: asyncio.subprocess.Process
    listen: HostPort
    admin: HostPort
    log: str = ""
    """The log lines read so far."""

    def url(self, path: str = "/v1/completions") -> str:
        return f"http://{self.listen}{path}"

    def admin_url(self, path: str) -> str:
        """A URL of the admin port."""
        return f"http://{self.admin}{path}"

    async def wait_for_log(self, words: str) -> str:
        """Wait for the next log line that contains `words`, and return it."""
        async with asyncio.timeout(_SECONDS):
            while words not in (line := await self._line()):
                assert line, f"ended without saying {words!r}: {self.log}"
            return line

    async def read_log_to_end(self) -> str:
        """Read until the process closes its log; returns the whole log."""
        async with asyncio.timeout(_SECONDS):
            while await self._line():
                pass
        return self.log

    async def exit_status(self) -> int:
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
    """Exit status and log of a sidecar that does not start."""
    process = await spawn(*arguments)
    out, err = await asyncio.wait_for(process.communicate(), _SECONDS)
    assert out == b""
    assert process.returncode is not None
    return process.returncode, err.decode()


@asynccontextmanager
async def serving(process: asyncio.subprocess.Process) -> AsyncIterator[Sidecar]:
    """Wait until `process`, a sidecar or a router, serves; it is killed at the end."""
    server = Sidecar(process, HostPort("", 0), HostPort("", 0))
    try:
        line = await server.wait_for_log("serving on")
        match = READY.search(line)
        assert match is not None, line
        server.listen = HostPort(match[1], int(match[2]))
        server.admin = HostPort(match[3], int(match[4]))
        yield server
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def sidecar(*arguments: str, under: tuple[str, ...] = ()) -> AsyncIterator[Sidecar]:
    """Start a sidecar; `under` is a command that execs it."""
    async with serving(await spawn(*FREE, *arguments, under=under)) as server:
        yield server
