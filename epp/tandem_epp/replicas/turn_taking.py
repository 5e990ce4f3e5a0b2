"""Lets a decision wait until this replica has the turn, where it would meet unseen placements.

Replicas that decide from the same figures choose the same pod, and one request then waits for the
prefill of the other. So a decision waits for its turn when that is expected to take longer than the
turn:

    unseen × mean prefill > mean wait

    unseen        placements of other replicas that this one does not know of yet: as many per
                  replica as this one made within the last UNSEEN_SECONDS
    mean prefill  seconds, over the pods
    mean wait     seconds for which the latest turns were waited for

A replica that is alone, has one pod, or decides rarely, waits for none.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from ..backends.fleet import Fleet
from .peers.turns import TurnChannel, Turns

UNSEEN_SECONDS: Final = 0.005
"""Seconds for which a placement may be unknown to other replicas: two to three times what
benchmarks/exchange.py measures."""
TURN_SECONDS: Final = 0.004
"""Seconds that a turn is assumed to be waited for before any was: two messages."""
_WEIGHT: Final = 0.02
"""Weight of the newest decision in averages: the first requests of a burst look like any other, but
met others before."""
_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


class Crowding:
    """How close together this replica's decisions are."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        """Times of the decisions within UNSEEN_SECONDS."""
        self._average = 0.0
        """Decisions within UNSEEN_SECONDS before a decision, on average."""

    def count_decision(self, now: float) -> float:
        """A decision is made `now`, in monotonic seconds: how many came shortly before, or usually
        do."""
        recent = self._recent
        while recent and recent[0] <= now - UNSEEN_SECONDS:
            recent.popleft()
        before = len(recent)
        recent.append(now)
        self._average += _WEIGHT * (before - self._average)
        return max(float(before), self._average)


class TurnMetrics:
    """Counts turns."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.waits = Histogram(
            "tandem_epp_turn_wait_seconds",
            "Seconds for which decisions waited for their turn among the replicas of this EPP; "
            "those that need none are not counted.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.expired = Counter(
            "tandem_epp_turns_expired_total",
            "Turns for which another replica of this EPP was skipped, since it had not granted "
            "them within 50 ms: it hangs, is throttled, or cannot be reached.",
            registry=registry,
        )


class TurnTaker:
    """Takes turns for the decisions of this replica."""

    def __init__(
        self, fleet: Fleet, channel: TurnChannel, turns: Turns, metrics: TurnMetrics
    ) -> None:
        self._fleet, self._channel, self._turns, self._metrics = fleet, channel, turns, metrics
        self._crowding = Crowding()
        self._mean_wait = TURN_SECONDS
        """Seconds; returns to TURN_SECONDS while no turn is taken."""
        turns.on_expired = metrics.expired.inc

    def needs_turn(self, now: float) -> bool:
        """Whether a decision that is due `now`, in monotonic seconds, should wait for a turn."""
        placed = self._crowding.count_decision(now)
        figures = self._fleet.figures
        if len(figures.pods) < 2:
            return False
        unseen = placed * len(self._channel.connected)
        needs = unseen * figures.mean_prefill > self._mean_wait
        if not needs:
            self.count_wait(TURN_SECONDS)
        return needs

    def count_wait(self, seconds: float) -> None:
        """A turn was waited for."""
        self._mean_wait += _WEIGHT * (seconds - self._mean_wait)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[float]:
        """Wait for the turn, if one is needed, and keep it until the context ends. The value is the
        seconds of the wait."""
        began = monotonic()
        if not self.needs_turn(began):
            yield 0.0
            return
        granted = asyncio.get_running_loop().create_future()
        waiter = partial(_resolve, granted)
        self._turns.enter(waiter)
        try:
            await granted
            waited = monotonic() - began
            self.count_wait(waited)
            self._metrics.waits.observe(waited)
            yield waited
        finally:
            self._turns.leave(waiter)


def _resolve(granted: "asyncio.Future[None]") -> None:
    # Done when the request's stream ended meanwhile.
    if not granted.done():
        granted.set_result(None)
