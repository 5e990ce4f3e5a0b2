"""The parent's end of one worker process."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from itertools import islice
from typing import Final, Self, TypeVar

from ..records import Record
from . import protocol
from .load import has_known_end, sessions_of, writer_of
from .protocol import Batch, Ended, Job
from .spec import RunSpec
from .turns import unsent

_Stream = TypeVar("_Stream")

LINGER: Final = 5.0
"""Seconds that a worker gets to end by itself."""
READ_LIMIT: Final = 16 << 20
"""Bytes of messages that wait in the parent, per worker."""
MAX_REASON: Final = 300
"""Characters of a dead worker's last line in a warning."""


class WorkerLink:
    """One worker process and what it has said."""

    def __init__(self, process: Process, spec: RunSpec) -> None:
        self._process = process
        self.spec = spec
        """Its part of the run."""
        self.reported: set[tuple[int, int]] = set()
        """Index and turn of the requests whose records it sent."""
        self.pid = process.pid
        self._stdin, self.stdout = _pipe(process.stdin), _pipe(process.stdout)
        self._errors = asyncio.create_task(_last_line(_pipe(process.stderr)))
        self.ready, self.done, self.checked = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.refusal: str | None = None
        """Why it cannot do its job."""
        self.batch = Batch(records=[], begun=0, sent=0, in_flight=0)
        """The last one, without its records."""
        self.ended: Ended | None = None
        self.closing = False

    @classmethod
    async def open(cls, job: Job) -> Self:
        """Start a process and give it its job."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tandem_loadtest.run.worker"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=READ_LIMIT,
            # Ctrl-C in a terminal reaches the parent only, which stops the run in order.
            start_new_session=True,
        )
        link = cls(process, job.spec)
        link.tell(job)
        return link

    def tell(self, message: protocol.FromParent) -> None:
        """Send a message; to a worker that has died, it is lost."""
        if not self._stdin.is_closing():
            self._stdin.write(protocol.to_worker(message))

    async def exit_reason(self) -> str:
        """Why the process ended: its last line on stderr and its exit status."""
        line = (await self._errors)[:MAX_REASON]
        status = f"exit status {await self._process.wait()}"
        return f"{line} ({status})" if line else status

    async def close(self) -> None:
        """End the process: at the end of its stdin, or by force."""
        self.closing = True
        self._stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), LINGER)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._errors


async def _last_line(stderr: asyncio.StreamReader) -> str:
    """The last line that is not empty; reads to the end, so that the pipe never fills."""
    last = b""
    async for line in stderr:
        last = line.strip() or last
    return last.decode(errors="replace")


def _pipe(stream: _Stream | None) -> _Stream:
    """A stream of a process that was started with pipes, which are never None."""
    if stream is None:
        raise ValueError("the process has no pipes")
    return stream


REASON = "its worker process died before it reported the request"


def unreported(link: WorkerLink, *, last_end: float, died: float) -> Iterator[Record]:
    """A record for every request of the worker's schedule without one; their outcome is `unsent`.

    Where the schedule does not say which sessions begin (in closed loop, those before the end of
    the run), these are the sessions that had begun by the worker's last message.

    In closed loop, the intended time of a session is not known: `last_end`, when an answer ended
    for the last time, for those that had begun; `died` for the others. It is `died` for the turns
    after the first that is unreported, too.
    """
    spec, begun = link.spec, link.batch.begun
    sessions = sessions_of(spec, writer_of(spec))
    if not has_known_end(spec):
        sessions = islice(sessions, begun)
    for number, session in enumerate(sessions):
        start = session.start
        if start is None:
            start = last_end if number < begun else died
        for turn in range(len(session.turns)):
            if (session.index, turn) not in link.reported:
                yield unsent(session, turn, spec.target.model, start, REASON)
                # Those that follow would have been due later.
                start = max(start, died)
