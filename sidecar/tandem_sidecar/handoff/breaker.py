"""Circuit breakers of the prefill pods. Pure: every call is given the time.

    closed ──(failures in a row)──► open ──(cooldown)──► half-open: one request probes
       ▲                             ▲                       │
       └──────── it answers ─────────┼───────────────────────┤
                                     └────── it fails ───────┘

The caller reports the result of each request that `admit` let through, by exactly one of
`record_success`, `record_failure`, `record_busy` or `cancel`. Only pods that failed or were busy
are remembered, for `_TTL` seconds after their last use, and `MAX_TARGETS` of them at most: without
signed plans a request may name any address of the allow-list.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tandem_contract.commandline import HostPort

from ..settings import Breaker

MAX_WAIT: Final = 60.0
"""Seconds of a Retry-After that are honoured."""
MAX_TARGETS: Final = 1024
"""Pods that are remembered; of more, those used longest ago are forgotten."""
_TTL: Final = 600.0


class BreakerState(StrEnum):
    """State of one circuit breaker."""

    CLOSED = "closed"
    """Requests are sent, except while a Retry-After of the pod runs."""
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class _Target:
    failures: int = 0
    """Failures in a row."""
    open: bool = False
    probing: bool = False
    """Whether the one request of the half-open state is in flight."""
    until: float = 0.0
    """Time before which no request is sent."""
    last_used: float = 0.0


@dataclass(frozen=True, slots=True)
class BreakerStatus:
    """One pod's circuit breaker, as `/state` and the metrics show it."""

    condition: BreakerState
    failures: int
    """Failures in a row."""
    wait: float
    """Seconds until a request may be sent."""


class Breakers:
    """A circuit breaker for each prefill pod; times are seconds of any monotonic clock."""

    def __init__(self, settings: Breaker) -> None:
        self.settings = settings
        """Replaced by a reload."""
        self._targets: dict[HostPort, _Target] = {}
        self._swept = 0.0

    def admit(self, address: HostPort, now: float) -> float:
        """Let a request to `address` through and return 0, or return the seconds to wait."""
        target = self._targets.get(address)
        # A pod without an entry has not failed recently: the usual request costs this one lookup.
        if target is None:
            return 0.0
        target.last_used = now
        if now < target.until:
            return target.until - now
        if target.open:
            # Half open: one request probes, and the others wait for its result.
            if target.probing:
                return self.settings.cooldown
            # No other request is admitted until the caller reports: a probe that is never reported
            # would keep the pod out of use.
            target.probing = True
        return 0.0

    def record_success(self, address: HostPort, now: float) -> None:
        """The pod answered; whatever its status, it is alive."""
        target = self._targets.get(address)
        if target is not None:
            target.failures, target.open, target.probing, target.last_used = 0, False, False, now

    def record_failure(self, address: HostPort, now: float, *, hung: bool = False) -> float:
        """The pod did not answer, or answered with an error; `hung` opens the circuit at once.

        Returns the seconds for which no request is sent from now on; 0 if the circuit is closed.
        """
        target = self._remember(address, now)
        target.failures += 1
        # A failed probe opens the circuit again, and a hang would cost every request its silence
        # timeout, so neither has to repeat.
        if hung or target.probing or target.failures >= self.settings.failures:
            target.open, target.probing = True, False
            # A Retry-After of the pod that runs longer stays in force.
            target.until = max(target.until, now + self.settings.cooldown)
        return max(0.0, target.until - now)

    def record_busy(self, address: HostPort, now: float, wait: float) -> None:
        """The pod is alive and asks for no requests for `wait` seconds (429 or 503)."""
        self.record_success(address, now)
        if wait > 0:
            target = self._remember(address, now)
            target.until = max(target.until, now + min(wait, MAX_WAIT))

    def cancel(self, address: HostPort) -> None:
        """The admitted request ended without a result, so another one may probe."""
        target = self._targets.get(address)
        if target is not None:
            target.probing = False

    def snapshot(self, now: float) -> dict[str, BreakerStatus]:
        """Every remembered pod, by `host:port`."""
        self._evict(now)
        return {str(address): _status(target, now) for address, target in self._targets.items()}

    def _remember(self, address: HostPort, now: float) -> _Target:
        self._evict(now)
        target = self._targets.setdefault(address, _Target())
        target.last_used = now
        if len(self._targets) > MAX_TARGETS:
            del self._targets[min(self._targets, key=lambda each: self._targets[each].last_used)]
        return target

    def _evict(self, now: float) -> None:
        """Drop pods that were not used for `_TTL` seconds; looks at most once a minute."""
        if now - self._swept < _TTL / 10:
            return
        self._swept = now
        self._targets = {a: t for a, t in self._targets.items() if now - t.last_used < _TTL}


def _status(target: _Target, now: float) -> BreakerStatus:
    wait = max(0.0, target.until - now)
    if not target.open:
        return BreakerStatus(BreakerState.CLOSED, target.failures, wait)
    condition = BreakerState.OPEN if wait > 0 else BreakerState.HALF_OPEN
    return BreakerStatus(condition, target.failures, wait)
