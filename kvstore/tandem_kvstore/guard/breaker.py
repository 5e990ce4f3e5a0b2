"""A circuit breaker: after failures in a row no request asks the store until a probe succeeds.

    CLOSED ──failures in a row──► OPEN ──cool-down──► HALF_OPEN ──probe succeeds──► CLOSED
                                   ▲                      └──────probe fails──┐
                                   └──────────twice the cool-down─────────────┘

It cannot stay open: a store that works again is used after one cool-down and one probe.
"""

from dataclasses import dataclass
from enum import IntEnum


class BreakerState(IntEnum):
    """The values are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When the breaker opens, and for how long."""

    failures: int = 3
    """Failures in a row that open it. 1: a single lost connection stops all loads. More: more
    requests wait until their deadline before it opens."""
    cool_down: float = 1.0
    """Seconds until the first probe. Shorter: a store that is down is probed often."""
    longest: float = 30.0
    """Longest cool-down in seconds. Longer: a store that works again stays unused for longer."""
    probe_timeout: float = 5.0
    """Seconds after which another probe may start if this one has no result."""


class Breaker:
    """The breaker of one store."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._failures = 0
        self._cool_down = self._settings.cool_down
        # While open, the time of the next probe; while half-open, when the probe counts as lost.
        self._until = 0.0
        self.state = BreakerState.CLOSED

    @property
    def allows(self) -> bool:
        """Whether requests may use the store. Probes ask `start_probe` instead."""
        return self.state is BreakerState.CLOSED

    def start_probe(self, now: float) -> bool:
        """Whether a probe is due. If so, the caller runs one and records its result."""
        if self.state is BreakerState.CLOSED or now < self._until:
            return False
        self.state = BreakerState.HALF_OPEN
        self._until = now + self._settings.probe_timeout
        return True

    def record_success(self) -> None:
        """A request or a probe succeeded."""
        # A request that began before the breaker opened does not close it.
        if self.state is not BreakerState.OPEN:
            self.state = BreakerState.CLOSED
            self._failures, self._cool_down = 0, self._settings.cool_down

    def record_failure(self, now: float) -> None:
        """A request or a probe failed."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._cool_down = min(2 * self._cool_down, self._settings.longest)
        elif self.state is BreakerState.OPEN or self._failures < self._settings.failures:
            return
        self.state, self._until = BreakerState.OPEN, now + self._cool_down
