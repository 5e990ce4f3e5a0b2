"""Keys to work on: coalesced, one worker a key at a time, failures tried again ever later.

    add(key) ──► waiting ──get()──► worked on ──done()──► gone, or waiting again if it was added
    add_after(key, 3.0), retry(key) ──► timer ──┘                        meanwhile

A key that always fails waits on a timer of its own, so it delays no other. Nothing here knows what
a key is; the clock and the dice are given.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_DELAY: Final = 0.5
"""Seconds before the first retry: a conflict is over by then."""
LONGEST_DELAY: Final = 60.0
"""Seconds between retries at most: how long a lifted quota may go unnoticed."""


class Timer(Protocol):
    """A call to come."""

    def cancel(self) -> None: ...
    def when(self) -> float: ...


Schedule = Callable[[float, Callable[[], None]], Timer]
"""Call the second in so many seconds."""


def backoff(failures: int, dice: float) -> float:
    """Seconds before trying again after `failures` in a row; `dice` is from 0 to 1.

    `min(60, 0.5 · 2^(failures-1)) · (0.5 … 1)`: the spread keeps keys that failed together apart.
    """
    longest = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (failures - 1))
    return longest * (0.5 + dice / 2)


class Queue(Generic[K]):
    """The keys that wait, those worked on, and those that come back later."""

    def __init__(
        self, schedule: Schedule | None = None, dice: Callable[[], float] = random.random
    ) -> None:
        self._schedule = schedule or _on_the_loop
        self._dice = dice
        self._order: deque[K] = deque()
        self._waiting: set[K] = set()
        self._active: set[K] = set()
        self._timers: dict[K, Timer] = {}
        self._failures: dict[K, int] = {}
        self._some = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        """Keys that wait for a worker."""
        return len(self._waiting)

    def add(self, key: K) -> None:
        """Work on `key` soon; again afterwards when it is being worked on now."""
        if key in self._waiting or self._closed:
            return
        self._waiting.add(key)
        if key not in self._active:
            self._order.append(key)
            self._some.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Add `key` in so many seconds, or earlier when that was asked for already."""
        if self._closed:
            return
        timer = self._schedule(seconds, lambda: self._due(key))
        if (before := self._timers.get(key)) is not None:
            if before.when() <= timer.when():
                timer.cancel()
                return
            before.cancel()
        self._timers[key] = timer

    def retry(self, key: K, *, at_least: float = 0.0) -> float:
        """Add `key` after a failure; the seconds it waits, never under `at_least`."""
        # Past 60 failures the delay is the longest anyhow, and 2.0 ** 1024 is no float.
        self._failures[key] = failures = min(60, self._failures.get(key, 0) + 1)
        delay = max(at_least, backoff(failures, self._dice()))
        self.add_after(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """Count the key's failures from none again."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """The key that has waited longest, now worked on. Raises QueueClosed at the end."""
        while not self._order:
            if self._closed:
                raise QueueClosed
            self._some.clear()
            await self._some.wait()
        key = self._order.popleft()
        self._waiting.discard(key)
        self._active.add(key)
        return key

    def done(self, key: K) -> None:
        """The work that `get` gave is over."""
        self._active.discard(key)
        if key in self._waiting:
            self._order.append(key)
            self._some.set()

    def close(self) -> None:
        """Give out nothing more; what is being worked on goes on."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._order.clear()
        self._waiting.clear()
        self._some.set()

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)


class QueueClosed(Exception):
    """No more work: the worker ends."""


def _on_the_loop(seconds: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)
