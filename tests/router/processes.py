"""The command as a process."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tandem_contract.commandline import HostPort

from ..sidecar.processes import Sidecar

COMMAND: Final = (sys.executable, "-m", "tandem_router.main")
FREE: Final = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
READY: Final = re.compile(r"serving on ([\d.]+):(\d+), admin on ([\d.]+):(\d+)")


@asynccontextmanager
async def router(file: Path, *arguments: str) -> AsyncIterator[Sidecar]:
    """Start a router with the configuration `file`."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "--config", str(file), *FREE, *arguments), stdout=pipe, stderr=pipe
    )
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
