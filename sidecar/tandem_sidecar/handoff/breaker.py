"""Which prefill pods are left alone for a while, and until when. Pure: every call is told the time.

    closed ──(failures in a row)──► open ──(cooldown)──► half-open: one request probes
       ▲                             ▲                       │
       └──────── it answers ─────────┼───────────────────────┤
                                     └────── it fails ───────┘

Who was let through by `wait` owes exactly one of `answered`, `failed`, `busy` or `dropped`.
Only pods that failed or were busy are remembered, and those for `_FORGOTTEN` seconds.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tandem_contract.commandline import HostPort

from ..settings import Breaker

MAX_WAIT: Final = 60.0
"""Seconds of a Retry-After that are honoured."""
_FORGOTTEN: Final = 600.0


class Condition(StrEnum):
    """How a prefill pod is treated."""

    CLOSED = "closed"
    """It is asked, unless it wants to be left alone."""
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class _Target:
    failures: int = 0
    """In a row."""
    open: bool = False
    probing: bool = False
    until: float = 0.0
    """Not asked before."""
    seen: float = 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """One pod's, for those who look."""

    condition: Condition
    failures: int
    wait: float
    """Seconds until it may be asked."""


class Breakers:
    """One breaker for each prefill pod; times are any clock's seconds."""

    def __init__(self, settings: Breaker) -> None:
        self.settings = settings
        """Replaced by a reload."""
        self._targets: dict[HostPort, _Target] = {}
        self._swept = 0.0

    def wait(self, address: HostPort, now: float) -> float:
        """Seconds until `address` may be asked; 0: now, and this request is let through."""
        target = self._targets.get(address)
        if target is None:
            return 0.0
        target.seen = now
        if now < target.until:
            return target.until - now
        if target.open:
            if target.probing:
                return self.settings.cooldown
            target.probing = True
        return 0.0

    def answered(self, address: HostPort, now: float) -> None:
        """It lives: whatever it said, it said it."""
        target = self._targets.get(address)
        if target is not None:
            target.failures, target.open, target.probing, target.seen = 0, False, False, now

    def failed(self, address: HostPort, now: float, *, hung: bool = False) -> float:
        """It gave no answer, or a bad one; `hung`: not even a sign of life, which is enough.

        Seconds for which it is left alone from now on, 0 when it goes on being asked.
        """
        target = self._remember(address, now)
        target.failures += 1
        if hung or target.probing or target.failures >= self.settings.failures:
            target.open, target.probing = True, False
            target.until = max(target.until, now + self.settings.cooldown)
        return max(0.0, target.until - now)

    def busy(self, address: HostPort, now: float, wait: float) -> None:
        """It said to come back in `wait` seconds: a sign of life, and a wish."""
        self.answered(address, now)
        if wait > 0:
            target = self._remember(address, now)
            target.until = max(target.until, now + min(wait, MAX_WAIT))

    def dropped(self, address: HostPort) -> None:
        """The request that was let through ended without a verdict."""
        target = self._targets.get(address)
        if target is not None:
            target.probing = False

    def snapshot(self, now: float) -> dict[str, Standing]:
        """Every pod that is remembered, by `host:port`."""
        self._sweep(now)
        return {str(address): _standing(target, now) for address, target in self._targets.items()}

    def _remember(self, address: HostPort, now: float) -> _Target:
        self._sweep(now)
        target = self._targets.setdefault(address, _Target())
        target.seen = now
        return target

    def _sweep(self, now: float) -> None:
        """Forget who was not asked for long; at most once a minute."""
        if now - self._swept < _FORGOTTEN / 10:
            return
        self._swept = now
        kept = {a: t for a, t in self._targets.items() if now - t.seen < _FORGOTTEN}
        self._targets = kept


def _standing(target: _Target, now: float) -> Standing:
    wait = max(0.0, target.until - now)
    if not target.open:
        return Standing(Condition.CLOSED, target.failures, wait)
    condition = Condition.OPEN if wait > 0 else Condition.HALF_OPEN
    return Standing(condition, target.failures, wait)
