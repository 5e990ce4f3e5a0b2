"""Sends the turns of a session, one after the other, and makes a record of each."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ..calls import Answer, Call, Result
from ..records import Outcome, Record
from ..workload.sessions import Session

STOPPED_BEFORE: Final = "the run was stopped before its time"
STOPPED_IN_FLIGHT: Final = "the run was stopped while it was in flight"
EARLIER_TURN: Final = "an earlier turn of its conversation failed"

Write = Callable[[Session, int, Sequence[Answer]], Call]
"""Makes the call of a turn from the answers to all turns before it."""
OnRecord = Callable[[Record, Result | None], None]
"""Takes a record, and its result unless the request was never sent or was stopped in flight."""


class Send(Protocol):
    """Sends a call; a failure is in its result."""

    async def __call__(self, call: Call, /) -> Result: ...


class Clock(Protocol):
    """Time in seconds on a clock that all worker processes share."""

    def now(self) -> float: ...

    def call_at(self, when: float, call: Callable[[], None]) -> None: ...

    async def sleep_until(self, when: float) -> None: ...


@dataclass(slots=True)
class Counts:
    """Requests of a worker by their progress."""

    begun: int = 0
    """Sessions whose first request was due, or waited to become due."""
    sent: int = 0
    in_flight: int = 0
    peak: int = 0
    """Most in flight at the same time."""


@dataclass(slots=True, eq=False)
class TurnSender:
    """Sends the turns of many sessions."""

    send: Send
    write: Write
    clock: Clock
    on_record: OnRecord
    model: str
    """Name for records of requests that name no model of their own."""
    max_in_flight: int | None = None
    """None: no limit."""
    start: float = 0.0
    """Time of the clock that is 0 in records."""
    counts: Counts = field(default_factory=Counts)
    stopping: bool = False
    """Whether no further request may be sent."""
    waiting: set["asyncio.Task[object]"] = field(default_factory=set)
    """Tasks whose next turn's time has not come."""

    async def run(self, session: Session, call: Call, intended: float) -> float:
        """Send all turns, of which `call` is the first and due at `intended`.

        Returns the end of the last answer; of the request that failed or was not sent otherwise.
        """
        self.counts.begun += 1
        answers: list[Answer] = []
        for number in range(len(session.turns)):
            if number:
                intended += session.turns[number].think
                call = self.write(session, number, answers)
            if not await self._becomes_due(intended):
                self.skip_stopped(session, number, intended, STOPPED_BEFORE)
                return intended
            if self.max_in_flight is not None and self.counts.in_flight >= self.max_in_flight:
                reason = f"{self.max_in_flight} requests were in flight (--max-in-flight)"
                self.skip(session, number, intended, reason)
                return intended
            result = await self._send(session, number, call, intended)
            if result is None:
                return intended
            # The next turn counts from the end of this answer, however late its task runs.
            intended = (result.ended or self.clock.now()) - self.start
            if result.outcome is not Outcome.OK:
                self.skip(session, number + 1, intended, EARLIER_TURN)
                return intended
            answers.append(result.answer)
        return intended

    def skip_stopped(self, session: Session, first: int, intended: float, reason: str) -> None:
        """Make records of the turns from `first` on, which a stop keeps from being sent.

        The turns after the first would have been due after the stop.
        """
        self.on_record(unsent(session, first, self.model, intended, reason), None)
        now = self.clock.now() - self.start
        self.skip(session, first + 1, max(intended, now), STOPPED_BEFORE)

    def skip(self, session: Session, first: int, intended: float, reason: str) -> None:
        """Make records of the turns from `first` on, which are not sent."""
        for number in range(first, len(session.turns)):
            self.on_record(unsent(session, number, self.model, intended, reason), None)

    async def _becomes_due(self, intended: float) -> bool:
        """Wait until the time has come; False when the run is stopped before."""
        when = self.start + intended
        if when > self.clock.now() and not self.stopping:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101
            self.waiting.add(task)
            try:
                await self.clock.sleep_until(when)
            except asyncio.CancelledError:
                if not self.stopping:
                    raise
            finally:
                self.waiting.discard(task)
        return not self.stopping

    async def _send(
        self, session: Session, number: int, call: Call, intended: float
    ) -> Result | None:
        """Send one call and make its record. None when the run was stopped meanwhile."""
        counts = self.counts
        counts.sent += 1
        counts.in_flight += 1
        counts.peak = max(counts.peak, counts.in_flight)
        try:
            result = await self.send(call)
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            # A server that was cut off by the load generator itself has lost nothing.
            self.skip_stopped(session, number, intended, STOPPED_IN_FLIGHT)
            return None
        finally:
            counts.in_flight -= 1
        self.on_record(self._record(session, number, result, intended), result)
        return result

    def _record(self, session: Session, number: int, result: Result, intended: float) -> Record:
        usage, start = result.answer.usage, self.start
        return Record(
            index=session.index,
            intended=intended,
            outcome=result.outcome,
            error=result.error or "",
            status=result.status,
            started=_after(result.started, start),
            sent=_after(result.sent, start),
            first_token=_after(result.first_token, start),
            last_token=_after(result.last_token, start),
            ended=_after(result.ended, start),
            gaps=result.gaps,
            prompt_tokens=usage.prompt_tokens if usage else None,
            output_tokens=usage.completion_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            model=result.call.model or self.model,
            path=result.routing_path or "",
            prefill_backend=result.prefill_backend or "",
            decode_backend=result.decode_backend or "",
            session=session.index,
            turn=number,
            resent=result.resent,
        )


def unsent(session: Session, turn: int, model: str, intended: float, reason: str) -> Record:
    """The record of a turn that was not sent; `model` is the name where the turn has none."""
    return Record(
        index=session.index,
        intended=intended,
        outcome=Outcome.UNSENT,
        error=reason,
        model=session.turns[turn].model or model,
        session=session.index,
        turn=turn,
    )


def _after(time: float | None, start: float) -> float | None:
    return None if time is None else time - start
