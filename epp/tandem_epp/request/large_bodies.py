"""Reads large bodies in another process, which runs while there are any.

reader = LargeBodies()
reading = await reader.read(kind, body)                 one body after the other
reading = await reader.read(None, body, content_type)   a form

Errors: `WorkerFault`.
"""

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Final

import msgspec

from tandem_contract.forms import MAX_TYPE
from tandem_contract.request_kinds import BodyKind

from .body_worker import HEADER, KINDS, Reading, read

LARGE: Final = 512 * 1024
"""Bytes from which a body counts as large. The slowest ones below it are read in 20 ms; reading
elsewhere takes two copies and some milliseconds more."""
IDLE_SECONDS: Final = 60.0
"""Seconds after the last large body at which the process ends."""
READ_SECONDS: Final = 10.0
"""Seconds after which a body is given up. 16 MB take less than one."""
_PIECE: Final = 256 * 1024
"""Bytes that are written at once, between which other streams have their turn."""
_log: Final = logging.getLogger(__name__)
_decoder: Final = msgspec.msgpack.Decoder(Reading)

_GIVEN_UP: Final = Reading(refusal="the body takes too much time or memory to read")


class WorkerFault(Exception):
    """A bug in what reads the body."""


class LargeBodies:
    """One process, and the bodies that wait for it."""

    def __init__(self) -> None:
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._pump: asyncio.Task[None] | None = None
        self._process: Process | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None

    async def read(self, kind: BodyKind | None, body: bytes, form_type: str = "") -> Reading:
        """What a pick needs to know of a body. `kind`: None for its model alone; `form_type`: the
        content type of a form, empty for JSON. Raises WorkerFault."""
        job = _Job(kind, body, form_type)
        self._jobs.put_nowait(job)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        try:
            reading = await job.reading
            if reading.fault is not None:
                raise WorkerFault(reading.fault)
            return reading
        finally:
            # A stream that ended meanwhile must not keep its body in the queue.
            job.body = b""

    async def close(self) -> None:
        """End the process; bodies that wait are not read."""
        if self._pump is not None:
            self._pump.cancel()
            with suppress(asyncio.CancelledError):
                await self._pump

    async def _run(self) -> None:
        try:
            while (job := await self._next()) is not None:
                if not job.reading.done():
                    reading = await self._read(job)
                    # Cancelled if its stream has ended meanwhile.
                    if not job.reading.done():
                        job.reading.set_result(reading)
        finally:
            await self._end()

    async def _next(self) -> "_Job | None":
        """The next body; None after a long time without one, and then the process has ended."""
        while True:
            try:
                return await asyncio.wait_for(self._jobs.get(), IDLE_SECONDS)
            except TimeoutError:
                await self._end()
            # A body that came while the process ended found this task running, and waits for it.
            # After this look nothing waits until the task is done.
            if self._jobs.empty():
                return None

    async def _read(self, job: "_Job") -> Reading:
        if self._process is None and not await self._start():
            # Better late for the others than not at all for this one.
            return read(job.kind, job.body, job.form_type)
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await self._ask(job)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            _log.warning("a request body of %d bytes could not be read", len(job.body))
            await self._end()
            return _GIVEN_UP

    async def _start(self) -> bool:
        command = (sys.executable, "-m", "tandem_epp.request.body_worker")
        try:
            self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        except OSError as err:
            _log.error("large request bodies delay others: %s did not start: %s", command[-1], err)
            return False
        return True

    async def _ask(self, job: "_Job") -> Reading:
        process, view = self._process, memoryview(job.body)
        if process is None or process.stdin is None or process.stdout is None:
            raise OSError("the process is gone")
        form_type = job.form_type.encode("latin-1", "replace")[: MAX_TYPE + 1]
        head = HEADER.pack(KINDS.index(job.kind), len(form_type), len(view))
        process.stdin.write(head + form_type)
        for at in range(0, len(view), _PIECE):
            process.stdin.write(view[at : at + _PIECE])
            await process.stdin.drain()
        _, _, size = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
        return _decoder.decode(await process.stdout.readexactly(size))

    async def _end(self) -> None:
        if (process := self._process) is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        # Only now: if `close` cancels this task meanwhile, `_run` comes here again and waits.
        self._process = None


class _Job:
    """A body that is to be read."""

    def __init__(self, kind: BodyKind | None, body: bytes, form_type: str) -> None:
        self.kind, self.body, self.form_type = kind, body, form_type
        self.reading: asyncio.Future[Reading] = asyncio.get_running_loop().create_future()
