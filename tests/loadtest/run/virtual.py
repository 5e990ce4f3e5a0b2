"""A clock that the test moves, sessions to send on it, and a server's answers at stated times."""

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any, TypeVar

from tandem_loadtest.calls import Answer, Call, Result, Usage
from tandem_loadtest.records import Outcome, Record
from tandem_loadtest.run.look_ahead import LookAhead
from tandem_loadtest.run.sender import Sender
from tandem_loadtest.run.turns import TurnSender
from tandem_loadtest.workload.sessions import Segment, Session, Turn

Value = TypeVar("Value")
START = 1000.0
"""Time of the clock at which runs begin."""


class VirtualClock:
    """Time that goes on only when every task waits."""

    def __init__(self) -> None:
        self.time = START
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def now(self) -> float:
        return self.time

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), call))

    async def sleep_until(self, when: float) -> None:
        if when > self.time:
            passed = asyncio.get_running_loop().create_future()
            # As the real timers do: the task that waits may have been cancelled.
            self.call_at(when, lambda: None if passed.done() else passed.set_result(None))
            await passed

    async def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Do the work, letting time jump to the next timer whenever all tasks wait."""
        task = asyncio.create_task(work)
        while not task.done():
            # More iterations than any chain of tasks in a test needs.
            for _ in range(30):
                await asyncio.sleep(0)
            if self._heap and not task.done():
                when, _, call = heapq.heappop(self._heap)
                self.time = max(self.time, when)
                call()
        return await task


class VirtualServer:
    """Answers each call after `latency` seconds of the clock; its n-th answer may fail."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        latency: float = 0.5,
        failing: Sequence[int] = (),
        blocking: float = 0.0,
    ) -> None:
        """`failing`: numbers of calls that fail, from 0; `blocking`: seconds for which the first
        call blocks the event loop, as a busy load generator does."""
        self._clock = clock
        self._latency = latency
        self._failing = failing
        self._blocking = blocking
        self.calls: list[Call] = []

    async def send(self, call: Call) -> Result:
        number, started = len(self.calls), self._clock.now()
        self.calls.append(call)
        if not number:
            self._clock.time += self._blocking
        await self._clock.sleep_until(started + self._latency)
        failed = number in self._failing
        return Result(
            call,
            status=500 if failed else 200,
            answer=Answer(text=f"answer {number}", usage=Usage(3, 2)),
            error="HTTP 500" if failed else None,
            outcome=Outcome.ERROR_STATUS if failed else Outcome.OK,
            started=started,
            sent=started,
            first_token=self._clock.now(),
            last_token=self._clock.now(),
            ended=self._clock.now(),
        )


class Run:
    """A sender on a virtual clock, and the records that it makes."""

    def __init__(
        self,
        sessions: Sequence[Session],
        *,
        latency: float = 0.5,
        failing: Sequence[int] = (),
        blocking: float = 0.0,
        max_in_flight: int | None = None,
        concurrency: int | None = None,
        duration: float | None = None,
        has_known_end: bool = True,
        writing: float = 0.0,
    ) -> None:
        """`writing`: seconds for which the writing of a prompt blocks the event loop."""
        self.clock = VirtualClock()
        self._writing = writing
        self.server = VirtualServer(self.clock, latency=latency, failing=failing, blocking=blocking)
        self.records: list[Record] = []
        self.written: list[tuple[int, int, list[str]]] = []
        """Index, turn and answers so far of every prompt, in the order of writing."""
        self.turns = TurnSender(
            send=self.server.send,
            write=self._write,
            clock=self.clock,
            on_record=lambda record, _: self.records.append(record),
            model="m",
            max_in_flight=max_in_flight,
            start=START,
        )
        self.ahead = LookAhead(sessions, self._write, self.clock)
        self.sender = Sender(
            self.ahead,
            self.turns,
            concurrency=concurrency,
            duration=duration,
            has_known_end=has_known_end,
        )

    async def finish(self) -> list[Record]:
        """Run to the end. Returns the records in the order of index and turn."""
        await self.clock.run(self.sender.run())
        return sorted(self.records, key=lambda record: (record.index, record.turn))

    def stop_at(self, time: float, grace: float = 0.0) -> None:
        """Stop the run so many seconds after its start."""
        self.clock.call_at(START + time, lambda: self.sender.stop(grace))

    def _write(self, session: Session, turn: int, answers: Sequence[Answer]) -> Call:
        self.clock.time += self._writing
        self.written.append((session.index, turn, [answer.text for answer in answers]))
        return Call(f"prompt {session.index}", max_tokens=2)


def single(index: int, start: float | None = None) -> Session:
    """A session of one request."""
    return conversation(index, start, 0.0)


def conversation(index: int, start: float | None, *think: float) -> Session:
    """A session with a turn for each think time."""
    segments = (Segment(f"prompt/{index}", 3),)
    return Session(index, tuple(Turn(segments, 2, think=pause) for pause in think), start=start)
