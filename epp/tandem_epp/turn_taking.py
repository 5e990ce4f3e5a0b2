"""Lets a decision wait until this replica has the turn, where it would meet unseen placements.

Without other replicas, and while requests are far apart, a decision does not wait. It does when

    unseen placements × seconds of a prefill > TURN_SECONDS

since replicas that decide from the same figures choose the same pod, and one request then waits for
the prefill of the other. As many placements are unseen as this replica made within UNSEEN_SECONDS,
times the other replicas.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic, time
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from .backends.fleet import Fleet
from .peers.turns import TurnChannel, Turns

UNSEEN_SECONDS: Final = 0.005
"""Seconds for which a placement may be unknown to other replicas: two to three times what
benchmarks/exchange.py measures."""
TURN_SECONDS: Final = 0.004
"""Seconds that it takes to get the turn: two messages."""
_WEIGHT: Final = 0.02
"""Weight of the newest decision in the average: the first requests of a burst look like any other,
but met others before."""
_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


class Crowding:
    """How close together this replica's decisions are."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        """Times of the decisions within UNSEEN_SECONDS."""
        self._average = 0.0
        """Decisions within UNSEEN_SECONDS before a decision, on average."""

    def count_decision(self, now: float) -> float:
        """A decision is made `now`, in seconds: how many came shortly before, or usually do."""
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
            "Seconds for which a decision waited for its turn among the replicas of this EPP; "
            "decisions that are far apart wait for none.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.expired = Counter(
            "tandem_epp_turns_expired_total",
            "Turns that began although another replica of this EPP had not granted them in time.",
            registry=registry,
        )


class TurnTaker:
    """Takes turns for the decisions of this replica."""

    def __init__(
        self, fleet: Fleet, channel: TurnChannel, turns: Turns, metrics: TurnMetrics
    ) -> None:
        self._fleet, self._channel, self._turns, self._metrics = fleet, channel, turns, metrics
        self._crowding = Crowding()
        turns.on_expired = metrics.expired.inc

    def needs_turn(self, now: float) -> bool:
        """Whether a decision that is due `now` (Unix seconds) should wait for a turn."""
        placed = self._crowding.count_decision(now)
        unseen = placed * len(self._channel.connected)
        return unseen * self._fleet.figures.longest_prefill > TURN_SECONDS

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn, if one is needed, and keep it until the context ends."""
        if not self.needs_turn(time()):
            yield
            return
        began, granted = monotonic(), asyncio.get_running_loop().create_future()
        waiter = partial(_resolve, granted)
        self._turns.enter(waiter)
        try:
            await granted
            self._metrics.waits.observe(monotonic() - began)
            yield
        finally:
            self._turns.leave(waiter)


def _resolve(granted: "asyncio.Future[None]") -> None:
    # Done when the request's stream ended meanwhile.
    if not granted.done():
        granted.set_result(None)
