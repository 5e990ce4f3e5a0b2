"""Sends sessions: open loop at their times, or closed loop so many at a time.

The schedule is never moved. A session that is sent late keeps its intended time; a request whose
time comes while `max_in_flight` requests are in flight is never sent.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from .look_ahead import LookAhead
from .turns import STOPPED_BEFORE, TurnSender

DISPATCH_SLICE: Final = 0.001
"""Seconds of beginning overdue sessions between two iterations of the loop: a worker that cannot
keep up still reads answers."""


class Sender:
    """Sends all sessions of a look-ahead from `turns.start` on."""

    def __init__(
        self,
        ahead: LookAhead,
        turns: TurnSender,
        *,
        concurrency: int | None = None,
        duration: float | None = None,
        has_known_end: bool = True,
    ) -> None:
        """`concurrency` sessions at a time; None: open loop, at the sessions' own times.

        `duration`: seconds after which no further session starts. `has_known_end`: all sessions
        begin unless the run is stopped; otherwise those that have not begun do not count.
        """
        self._ahead = ahead
        self._turns = turns
        self._clock = turns.clock
        self._concurrency = concurrency
        self._duration = duration
        self._has_known_end = has_known_end
        self._tasks: set[asyncio.Task[object]] = set()
        """Those that may have requests in flight."""
        self._all_begun = asyncio.Event()
        """Set when no further session begins."""

    async def run(self) -> None:
        """Return when every request has its record."""
        async with asyncio.TaskGroup() as group:
            filler = group.create_task(self._ahead.keep_full(self._turns.start))
            if self._concurrency is None:
                self._dispatch(group)
                await self._all_begun.wait()
            else:
                slots = [self._spawn(group, self._slot()) for _ in range(self._concurrency)]
                await asyncio.wait(slots)
            filler.cancel()
        if self._turns.stopping and self._has_known_end:
            await self._skip_rest()

    def stop(self, grace: float) -> None:
        """Send nothing more, and close what is in flight after `grace` seconds."""
        self._turns.stopping = True
        self._all_begun.set()
        # Not now: a task that is cancelled before its first step makes no record of its session.
        asyncio.get_running_loop().call_soon(_cancel, self._turns.waiting)
        self._clock.call_at(self._clock.now() + grace, lambda: _cancel(self._tasks))

    def _spawn(
        self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, object]
    ) -> asyncio.Task[object]:
        task = group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _dispatch(self, group: asyncio.TaskGroup) -> None:
        """Open loop: begin all sessions whose time has come, and come back at the next's time."""
        slice_end = self._clock.now() + DISPATCH_SLICE
        while not self._turns.stopping:
            session = self._ahead.head()
            start = session.start if session else None
            if start is None or (self._duration is not None and start >= self._duration):
                self._all_begun.set()
                return
            due, now = self._turns.start + start, self._clock.now()
            if due > now or now > slice_end:
                self._clock.call_at(due, lambda: self._dispatch(group))
                return
            prepared = self._ahead.take()
            if prepared is not None:
                # Not awaited: in an open loop, a slow answer never delays the next session.
                self._spawn(group, self._turns.run(*prepared, start))

    async def _slot(self) -> None:
        """Closed loop: send one session after the other, with the think time between them."""
        last_end: float | None = None
        while not self._turns.stopping and (session := self._ahead.head()) is not None:
            # The first sessions begin at the start, without thinking.
            due = 0.0 if last_end is None else last_end + session.turns[0].think
            if self._duration is not None and due >= self._duration:
                return
            prepared = self._ahead.take()
            if prepared is not None:
                last_end = await self._turns.run(*prepared, due)

    async def _skip_rest(self) -> None:
        """Make records of the sessions that the stop kept from beginning."""
        now = self._clock.now() - self._turns.start
        for count, session in enumerate(self._ahead.rest()):
            start = now if session.start is None else session.start
            if self._duration is not None and start >= self._duration:
                return
            self._turns.skip_stopped(session, 0, start, STOPPED_BEFORE)
            if count % 1000 == 999:
                # The records are sent to the parent meanwhile.
                await asyncio.sleep(0)


def _cancel(tasks: set[asyncio.Task[object]]) -> None:
    for task in list(tasks):
        task.cancel()
