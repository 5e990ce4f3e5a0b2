"""Measures how well a worker process itself keeps up: read lag and CPU share.

Lateness of sends needs no watch: every record has its intended and its actual time.
"""

import asyncio
import random
from time import monotonic, process_time
from typing import Final

from ..figures.histogram import Histogram
from .timers import Timers

PERIOD: Final = 0.005
"""Mean seconds between two measurements: 200 per second cost well below 1 % of a core."""


class SelfWatch:
    """Measures from `start` on until `stop`."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._loop = asyncio.get_running_loop()
        self._random = random.Random(0)
        self._running = False
        self._wall = self._cpu = 0.0
        self.read_lag = Histogram()
        """Seconds by which the loop served a timer late. A byte that arrived when the timer was due
        waited no longer: the measurement ends after all reads of that iteration of the loop."""

    def start(self) -> None:
        """Begin to measure."""
        self._running = True
        self._wall, self._cpu = monotonic(), process_time()
        self._schedule()

    def stop(self) -> float:
        """End, and return the CPU time ÷ the wall time since the start."""
        self._running = False
        return (process_time() - self._cpu) / max(monotonic() - self._wall, 1e-9)

    def _schedule(self) -> None:
        # Random, so that the measurements do not keep step with constant arrivals.
        due = monotonic() + PERIOD * (0.5 + self._random.random())
        self._timers.call_at(due, lambda: self._fire(due))

    def _fire(self, due: float) -> None:
        # `call_soon` runs in the next iteration, after all reads that are ready in this one.
        self._loop.call_soon(self._measure, due)

    def _measure(self, due: float) -> None:
        if self._running:
            self.read_lag.add_all((max(0.0, monotonic() - due),))
            self._schedule()
