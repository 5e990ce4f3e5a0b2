"""The command as a process."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from ..sidecar.processes import FREE, Sidecar, serving

COMMAND: Final = (sys.executable, "-m", "tandem_router.main")


@asynccontextmanager
async def router(
    file: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Sidecar]:
    """Start a router with the configuration `file`, and these variables beside the test's own."""
    pipe, command = asyncio.subprocess.PIPE, (*COMMAND, "--config", str(file), *FREE, *arguments)
    variables = {**os.environ, **(environment or {})}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=pipe, stderr=pipe, env=variables
    )
    async with serving(process) as server:
        yield server
