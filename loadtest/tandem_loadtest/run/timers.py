"""Calls functions at exact times: a Linux timerfd on the event loop instead of the loop's timers.

`loop.call_at` counts in milliseconds: asyncio is up to 1 ms late, uvloop also up to 1 ms early. A
timerfd fires within some 50 µs of its time, without a busy loop.
"""

import asyncio
import ctypes
import heapq
import os
from collections.abc import Callable
from itertools import count
from time import CLOCK_MONOTONIC, monotonic
from typing import Final, Self

_libc: Final = ctypes.CDLL(None, use_errno=True)
_ABSOLUTE: Final = 1
"""TFD_TIMER_ABSTIME of Linux."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("value", _Time))


class Timers:
    """Calls functions on the running loop, in order of their times, which are on CLOCK_MONOTONIC.

    with Timers() as timers:
        timers.call_at(monotonic() + 0.25, send)
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        """Tells apart calls of the same time, so that functions are never compared."""
        self._setting = _Setting()
        self._armed: float | None = None
        """Time for which the kernel's timer is set."""
        self._firing = False

    def __enter__(self) -> Self:
        self._file = _libc.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file, self._fire)
        return self

    def __exit__(self, *_: object) -> None:
        """Forget the calls whose time has not come."""
        self._heap.clear()
        self._loop.remove_reader(self._file)
        os.close(self._file)

    def now(self) -> float:
        """Seconds on CLOCK_MONOTONIC, which all processes of a machine share."""
        return monotonic()

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Call it at `when`, or in the next iteration of the loop if that is over."""
        heapq.heappush(self._heap, (when, next(self._order), call))
        # Calls that add others set the timer once, when all of them have returned.
        if not self._firing:
            self._arm()

    async def sleep_until(self, when: float) -> None:
        """Return at `when`, at once if that is over."""
        if when > monotonic():
            passed = self._loop.create_future()
            self.call_at(when, lambda: _set(passed))
            await passed

    def _arm(self) -> None:
        when = self._heap[0][0]
        if when == self._armed:
            return
        self._armed = when
        value = self._setting.value
        # 0 would disarm the timer; a time that is over fires at once.
        nanoseconds = max(1, int(when * 1e9))
        value.seconds, value.nanoseconds = divmod(nanoseconds, 1_000_000_000)
        _libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(self._setting), None)

    def _fire(self) -> None:
        # Calls that are added meanwhile wait for the next iteration, so that reads get their turn.
        now = monotonic()
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        self._firing = True
        for call in due:
            call()
        self._firing = False
        self._armed = None
        if self._heap:
            # Setting the timer also makes its file unreadable until it fires again.
            self._arm()
        else:
            os.read(self._file, 8)


def _set(passed: asyncio.Future[None]) -> None:
    # The task that waits may have been cancelled.
    if not passed.done():
        passed.set_result(None)
