"""Runs the commands of `--at` during a run and makes their events."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Final, Self

from ..figures.model import Event
from .options import TimedCommand

LINES: Final = 20
"""Last lines of output that an event keeps."""
LINE_LENGTH: Final = 500
"""Characters of each."""
LINGER: Final = 2.0
"""Seconds between SIGTERM and SIGKILL for a command that still runs at the end of the run."""


class Commands:
    """Runs each command at its time; each is a shell in a process group of its own.

    async with Commands(commands) as runner:
        runner.start(start)
        …
        events, warnings = await runner.stop()
    """

    def __init__(self, commands: Sequence[TimedCommand]) -> None:
        self._commands = sorted(commands, key=lambda command: command.at)
        self.tasks: list[asyncio.Task[Event | None]] = []
        """Of each command in the order of their times; it ends with the command."""
        self._ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self, at: float) -> None:
        """Begin; `at` is the start of the run on CLOCK_MONOTONIC."""
        self.tasks = [asyncio.create_task(self._run(command, at)) for command in self._commands]

    async def stop(self) -> tuple[list[Event], list[str]]:
        """Stop what still runs. Returns events, and warnings for commands that did not start."""
        self._ended.set()
        events = await asyncio.gather(*self.tasks)
        warnings = [
            f"--at {command.at:g}s {command.command!r} was not run: the run had ended before"
            for command, event in zip(self._commands, events, strict=False)
            if event is None
        ]
        return [event for event in events if event], warnings

    async def _run(self, command: TimedCommand, start: float) -> Event | None:
        if await self._ends_within(start + command.at - monotonic()):
            return None
        begun = monotonic()
        process = await asyncio.create_subprocess_shell(
            command.command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
        lines: deque[str] = deque(maxlen=LINES)
        output = asyncio.create_task(_keep_last(process, lines))
        ended = asyncio.create_task(process.wait())
        run_ended = asyncio.create_task(self._ended.wait())
        await asyncio.wait({ended, run_ended}, return_when=asyncio.FIRST_COMPLETED)
        is_complete, seconds = ended.done(), monotonic() - begun
        # Processes that the shell left in the background have the other end of the pipe.
        await asyncio.wait({output, run_ended}, return_when=asyncio.FIRST_COMPLETED)
        if not (ended.done() and output.done()):
            await _end_group(process, {ended, output})
        run_ended.cancel()
        return Event(
            at=begun - start,
            command=command.command,
            seconds=seconds if is_complete else None,
            exit_status=process.returncode if is_complete else None,
            output="\n".join(lines),
        )

    async def _ends_within(self, seconds: float) -> bool:
        """Whether the run ends before that."""
        try:
            await asyncio.wait_for(self._ended.wait(), max(0.0, seconds))
        except TimeoutError:
            return False
        return True


async def _keep_last(process: Process, lines: deque[str]) -> None:
    """Keep the last lines of the output; reads to its end, so that the pipe never fills."""
    if process.stdout is None:
        return
    rest = b""
    # Not by lines: a progress bar may never end its line.
    while part := await process.stdout.read(1 << 16):
        *complete, rest = (rest + part).splitlines(keepends=True)[-LINES - 1 :]
        if rest.endswith(b"\n"):
            complete, rest = [*complete, rest], b""
        lines.extend(_text(line) for line in complete)
        rest = rest[-LINE_LENGTH:]
    if rest:
        lines.append(_text(rest))


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()[:LINE_LENGTH]


async def _end_group(process: Process, tasks: set[asyncio.Task[object]]) -> None:
    """End the processes of a command, and the tasks that wait for them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        _, pending = await asyncio.wait(tasks, timeout=LINGER)
        if not pending:
            return
    # A process that left the group still has the pipe.
    for task in pending:
        task.cancel()
    await asyncio.wait(pending)
