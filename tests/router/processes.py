"""The command as a process."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from ..sidecar.processes import FREE, Sidecar, serving

COMMAND: Final = (sys.executable, "-m", "tandem_router.main")


@asynccontextmanager
async def router(file: Path, *arguments: str) -> AsyncIterator[Sidecar]:
    """Start a router with the configuration `file`."""
    pipe, command = asyncio.subprocess.PIPE, (*COMMAND, "--config", str(file), *FREE, *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    async with serving(process) as server:
        yield server
