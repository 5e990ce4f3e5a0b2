"""Runs a load generator against a server of its own and returns what it reported and used."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tandem_local.ports import free_port

from . import peers, process_tree
from .load_reports import Reported
from .load_tools import Load, Tool
from .process_tree import Usage

_HOST: Final = "127.0.0.1"
_LIMIT: Final = 600.0
"""Seconds after which a run is stopped: a tool that hangs must not stop the benchmark."""
_LOG_END: Final = 2000
"""Characters of a tool's output that an error shows."""


class ToolFailed(RuntimeError):
    """A tool wrote no report; the message has the end of its output."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a tool."""

    reported: Reported
    usage: Usage


@asynccontextmanager
async def server(module: str, *arguments: str) -> AsyncIterator[str]:
    """Start `python -m benchmarks.MODULE PORT ARGUMENTS`, yield its URL, and end it afterwards."""
    port = free_port(_HOST)
    command = (sys.executable, "-m", f"benchmarks.{module}", str(port), *arguments)
    process = await asyncio.create_subprocess_exec(*command)
    url = f"http://{_HOST}:{port}"
    try:
        await peers.healthy(url, process)
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def run(
    tool: Tool, load: Load, during: Callable[[int], Awaitable[None]] | None = None
) -> Run:
    """Send `load` with `tool`; `during` is called with the process whose descendants are the tool.

    Raises NotInstalled, and ToolFailed when it wrote no report that can be read.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # Some tools exit with an error when a request failed: only the report counts.
        await _execute(tool, load, directory, during)
        try:
            usage = msgspec.json.decode((directory / "usage.json").read_bytes(), type=Usage)
            return Run(tool.report(directory), usage)
        except (OSError, ValueError, LookupError, TypeError) as err:
            log = (directory / "log").read_text(errors="replace")
            raise ToolFailed(f"{tool.name}: no report ({err!r})\n{log[-_LOG_END:]}") from err


async def _execute(
    tool: Tool, load: Load, directory: Path, during: Callable[[int], Awaitable[None]] | None
) -> None:
    # -P keeps the folder of the wrapper out of its import path: `operator` is a module there.
    wrapper = (sys.executable, "-P", process_tree.__file__, str(directory / "usage.json"))
    command = (*wrapper, str(tool.find()), *tool.arguments(load, directory))
    # Files that tools write beside their reports land in the directory as well.
    with (directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=directory,
            env=os.environ | tool.environment,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(_LIMIT):
                if during is not None:
                    await during(process.pid)
                await process.wait()
        except TimeoutError as err:
            raise ToolFailed(f"{tool.name} did not end within {_LIMIT:g} s") from err
        finally:
            if process.returncode is None:
                process_tree.kill_below(process.pid)
                await process.wait()
