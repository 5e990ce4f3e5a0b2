"""A work queue as in client-go: it coalesces keys, and retries failed ones with backoff.

    add(key) ───────────────────────► waiting ──get()──► active ──done()──► removed, or waiting
    add_after(key, 3.0), retry(key) ──► timer ──► add(key)                  again if added meanwhile

A key is never given to two workers at once. Each retry waits on its own timer, so a key that always
fails delays no other. Timers and random numbers are injected for tests.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_DELAY: Final = 0.5
"""Seconds before the first retry, at most; most conflicts are over by then."""
MAX_DELAY: Final = 60.0
"""Seconds between retries, at most. A raised quota goes unnoticed for as long."""


class Timer(Protocol):
    """A scheduled call, as `asyncio.TimerHandle`."""

    def cancel(self) -> None: ...
    def when(self) -> float: ...


Schedule = Callable[[float, Callable[[], None]], Timer]
"""Calls the second argument after the first, in seconds."""


def backoff(failures: int, jitter: float) -> float:
    """Seconds to wait after `failures` in a row; `jitter` is from 0 to 1.

    `min(60, 0.5 · 2^(failures-1)) · (0.5 … 1)`: the jitter spreads retries of keys that failed
    together.
    """
    limit = min(MAX_DELAY, FIRST_DELAY * 2.0 ** (failures - 1))
    return limit * (0.5 + jitter / 2)


class Queue(Generic[K]):
    """Keys that wait, keys that a worker has (active), and keys that a timer will add.

    Invariant: `_order` holds exactly the waiting keys that are not active. A key that is added
    while it is active is in `_waiting` alone until `done` puts it into `_order`.
    """

    def __init__(
        self, schedule: Schedule | None = None, jitter: Callable[[], float] = random.random
    ) -> None:
        self._schedule = schedule or _call_later
        self._jitter = jitter
        self._order: deque[K] = deque()
        self._waiting: set[K] = set()
        self._active: set[K] = set()
        self._timers: dict[K, Timer] = {}
        self._failures: dict[K, int] = {}
        self._not_empty = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        """The number of keys that wait for a worker."""
        return len(self._waiting)

    def add(self, key: K) -> None:
        """Make `key` wait for a worker; if it is active now, it waits until that worker is done."""
        # A reconciliation reads the state when it starts, so one covers all changes until then.
        if key in self._waiting or self._closed:
            return
        self._waiting.add(key)
        if key not in self._active:
            self._order.append(key)
            self._not_empty.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Add `key` after `seconds`, unless an earlier timer for it is already running."""
        if self._closed:
            return
        # Scheduled first, because timers are compared by the time at which they are due.
        timer = self._schedule(seconds, lambda: self._on_timer(key))
        # One timer per key. The earlier of two wins: a requeue must not postpone a due retry.
        if (running := self._timers.get(key)) is not None:
            if running.when() <= timer.when():
                timer.cancel()
                return
            running.cancel()
        self._timers[key] = timer

    def retry(self, key: K, *, at_least: float = 0.0) -> float:
        """Add `key` after a backoff of `at_least` seconds or more; returns the seconds."""
        # The delay reaches its maximum long before 60 failures, and 2.0 ** 1024 overflows.
        self._failures[key] = failures = min(60, self._failures.get(key, 0) + 1)
        delay = max(at_least, backoff(failures, self._jitter()))
        self.add_after(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """Reset the key's backoff after a success."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """The key that has waited longest; it is active until `done`. Raises QueueClosed."""
        # A loop, because the event wakes every worker although there may be a single key.
        while not self._order:
            if self._closed:
                raise QueueClosed
            # No await between the check and this line, so no `add` is missed.
            self._not_empty.clear()
            await self._not_empty.wait()
        key = self._order.popleft()
        self._waiting.discard(key)
        self._active.add(key)
        return key

    def done(self, key: K) -> None:
        """The worker that got `key` has finished with it, successfully or not."""
        self._active.discard(key)
        if key in self._waiting:
            self._order.append(key)
            self._not_empty.set()

    def close(self) -> None:
        """Drop all waiting keys and timers, and end workers at their next `get`."""
        self._closed = True
        # Active keys stay: their workers still call `done`, which then finds nothing waiting.
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        # Idle workers wake up and find the queue closed; active ones at their next `get`.
        self._order.clear()
        self._waiting.clear()
        self._not_empty.set()

    def _on_timer(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)


class QueueClosed(Exception):
    """The queue was closed: the worker should end."""


def _call_later(seconds: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)
