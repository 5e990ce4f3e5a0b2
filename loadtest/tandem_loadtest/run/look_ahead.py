"""Prepares the first prompt of sessions ahead of their time, so that their sends are not late."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final

from ..calls import Call, Message
from ..workload.sessions import Session
from .turns import Clock, Write

MOST_SESSIONS: Final = 1000
"""Sessions that are prepared at most; schedules up to this length are prepared before the start."""
MOST_CHARACTERS: Final = 64 << 20
"""Characters (or token ids) of all prepared prompts: a bound of the worker's memory."""
MOST_SECONDS: Final = 5.0
"""Time for preparing before the start; the rest follows during the run."""
SLICE: Final = 0.0005
"""Seconds of preparing between two iterations of the loop: reads wait no longer, unless a single
prompt takes longer."""
REFILL: Final = 0.02
"""Seconds between two looks at how much is left."""


class LookAhead:
    """The sessions of a worker in order, of which the next ones are prepared."""

    def __init__(self, sessions: Iterable[Session], write: Write, clock: Clock) -> None:
        self._sessions = iter(sessions)
        self._write = write
        self._clock = clock
        self._ready: deque[tuple[Session, Call]] = deque()
        self._characters = 0
        self._exhausted = False
        self._cost = 0.0
        """Seconds for one prompt: the longest of late."""

    def head(self) -> Session | None:
        """The next session, prepared now if it is not yet; None after the last."""
        if not self._ready:
            self._prepare()
        return self._ready[0][0] if self._ready else None

    def take(self) -> tuple[Session, Call] | None:
        """Remove the next session; None after the last."""
        if self.head() is None:
            return None
        session, call = self._ready.popleft()
        self._characters -= _size(call)
        return session, call

    def rest(self) -> Iterable[Session]:
        """Remove all sessions that are left, without preparing them."""
        self._exhausted = True
        while self._ready:
            yield self._ready.popleft()[0]
        yield from self._sessions

    @property
    def is_full(self) -> bool:
        """Whether there is nothing to prepare for now."""
        full = len(self._ready) >= MOST_SESSIONS or self._characters >= MOST_CHARACTERS
        return full or self._exhausted

    def fill(self, seconds: float) -> None:
        """Prepare for about `seconds`, or less when nothing is left to prepare."""
        end = self._clock.now() + seconds
        while not self.is_full and self._clock.now() < end:
            self._prepare()

    async def keep_full(self, start: float) -> None:
        """Prepare in the gaps between sends, until the last session; `start` is the run's."""
        while not self._exhausted:
            now = self._clock.now()
            due = self._next_send(start)
            if self.is_full:
                await self._clock.sleep_until(now + REFILL)
            # A prompt that takes longer than the gap would make this send late. When few are left,
            # waiting would make all the later ones late.
            elif due is not None and due - now < self._cost and len(self._ready) > 10:
                await self._clock.sleep_until(due)
            else:
                self.fill(SLICE)
            await asyncio.sleep(0)

    def _next_send(self, start: float) -> float | None:
        first = self._ready[0][0].start if self._ready else None
        return None if first is None else start + first

    def _prepare(self) -> None:
        session = next(self._sessions, None)
        if session is None:
            self._exhausted = True
            return
        begun = self._clock.now()
        call = self._write(session, 0, ())
        self._cost = max(self._clock.now() - begun, 0.95 * self._cost)
        self._ready.append((session, call))
        self._characters += _size(call)


def _size(call: Call) -> int:
    prompt = call.prompt
    if isinstance(prompt, str) or not isinstance(prompt[0], Message):
        return len(prompt)
    return sum(len(message.content) for message in prompt if isinstance(message, Message))
