"""The health of one pod, from the outcomes of its requests. Pure: `now` is Unix seconds.

*Failure rate.* Failures F and answers S are counted with exponential decay: a count of the past is
worth 2^(−age / HALF_LIFE) today.

    failure rate = F / max(F + S, MIN_VOLUME)        0 to 1

Below MIN_VOLUME the missing requests count as answered, so that one failure of a pod that has few
requests is no rate of 1, and so that the rate fades while the pod gets no requests.

*States.* `ejections.Ejections` decides when a pod is ejected and lets time pass.

    SERVING ── no connection ──► SUSPECT ── successful scrape ──► SERVING
    PAUSED ─── no connection ──► SUSPECT
    SERVING ── busy ───────────► PAUSED ─── time ───────────────► SERVING
    SERVING ── eject ──────────► EJECTED ── time ───────────────► PROBE_DUE
    PROBE_DUE ── a request is placed ──► PROBING ── it is answered ──► SERVING
                                         PROBING ── it fails ────────► EJECTED, for longer
                                         PROBING ── no outcome ──────► PROBE_DUE

Pods in SERVING and PROBE_DUE are chosen; others only while no better pod of their role is left.
"""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from .outcomes import Outcome

HALF_LIFE: Final = 10.0
"""Seconds in which the weight of an outcome halves. Shorter: a pod with few requests is never
judged. Longer: a pod that recovered is avoided for long."""
MIN_VOLUME: Final = 5.0
"""Outcomes, decayed, below which a rate is not trusted. Lower: one error of an idle pod sends its
prefixes elsewhere. Higher: more requests fail before a pod is avoided."""
EJECT_RATE: Final = 0.5
"""Failure rate from which a pod is ejected: one that answers half of its requests still helps less
than it harms."""
EJECT_IN_A_ROW: Final = 3
"""Failures in a row that eject a pod, whatever its rate: a pod with a thousand answers behind it
would otherwise fail a thousand requests first."""
BASE_EJECTION: Final = 5.0
"""Seconds of the first ejection; each further one takes twice as long."""
MAX_EJECTION: Final = 300.0
"""Seconds of the longest ejection. A pod that then served for as long starts again at the base."""
PROBE_SECONDS: Final = 30.0
"""Seconds for which a probe may stay without an outcome before another request may be one."""
BASE_PAUSE: Final = 1.0
"""Seconds without new requests after a busy answer without Retry-After; doubles per answer."""
MAX_PAUSE: Final = 30.0
"""Seconds of the longest pause, whatever Retry-After says."""
NEGLIGIBLE_RATE: Final = 0.005
"""Failure rate below which the past is forgotten, so that healthy pods need no upkeep."""


class OutcomeCounts(NamedTuple):
    """What `Health` has counted, for another replica."""

    failures: float
    answers: float
    in_a_row: int
    streak: int
    returned: float
    """Seconds since the last ejection ended."""
    are_several: bool = True
    """Whether the failures are of more than one request."""


class HealthState(StrEnum):
    """Whether the pod gets requests; the label `state` of a metric."""

    SERVING = "serving"
    SUSPECT = "suspect"
    """It accepted no connection. Until its next successful scrape others are preferred."""
    PAUSED = "paused"
    """It asked for no more requests for a moment."""
    EJECTED = "ejected"
    """It failed too often."""
    PROBE_DUE = "probe_due"
    """Ejected for long enough: the next request that chooses it is the probe."""
    PROBING = "probing"
    """The probe is under way."""


_CHOSEN: Final = frozenset({HealthState.SERVING, HealthState.PROBE_DUE})
_OUT: Final = frozenset({HealthState.EJECTED, HealthState.PROBE_DUE, HealthState.PROBING})


class Health:
    """Failure rate and state of one pod."""

    def __init__(self) -> None:
        self.state = HealthState.SERVING
        self.until = 0.0
        """When EJECTED, PAUSED or PROBING ends by time; Unix seconds."""
        self.failure_rate = 0.0
        """0 to 1, as of the last `record` or `decay`; 0 while a probe is due, so that the pod is
        chosen like any other."""
        self.outcomes: Counter[Outcome] = Counter()
        """Outcomes of own requests so far, without decay."""
        self.ejections = 0
        """Ejections so far."""
        self.should_eject = False
        """Whether the last outcome is reason enough to eject the pod, if the share of ejected pods
        allows it."""
        self.answered_at = 0.0
        """When the pod last answered a request; Unix seconds, 0: never."""
        self._failures = self._answers = self._decayed_at = 0.0
        self._in_a_row = 0
        """Failures since the last answer."""
        self._failed = 0
        """Fingerprint of the request that failed first, of those that count; 0: unknown."""
        self._are_several = False
        """Whether the failures are of more than one request. Those of one never eject the pod."""
        self._streak = 0
        """Ejections of which each came less than MAX_EJECTION after the one before had ended."""
        self._ejected_at = self._returned_at = self._forgotten_at = 0.0
        self._pauses = 0
        """Busy answers since the last other one."""

    @property
    def is_available(self) -> bool:
        """Whether the pod may be chosen as usual."""
        return self.state in _CHOSEN

    @property
    def is_ejected(self) -> bool:
        """Whether the pod is ejected and has not yet proved that it serves again."""
        return self.state in _OUT

    @property
    def needs_upkeep(self) -> bool:
        """Whether the passing of time changes anything."""
        return self.state is not HealthState.SERVING or self.failure_rate > 0

    def probe_due(self, now: float) -> bool:
        """Whether the next request placed on the pod is a probe."""
        return self.is_ejected and self.state is not HealthState.PROBING and now >= self.until

    def place(self, now: float) -> bool:
        """A request is placed on the pod; returns whether the state changed: it is the probe."""
        if not self.probe_due(now):
            return False
        self._enter(HealthState.PROBING, now + PROBE_SECONDS)
        return True

    def record(
        self,
        outcome: Outcome,
        now: float,
        placed: float,
        retry_after: float | None = None,
        *,
        is_own: bool = True,
        fingerprint: int = 0,
        is_requests: bool = False,
    ) -> bool:
        """Count the outcome of a request that was placed at `placed`; returns whether the state
        changed. Sets `should_eject`.

        `retry_after`: seconds for which a busy pod asked to be left alone. `is_own`: this EPP
        placed the request, not another replica. `fingerprint`: of the request; 0: unlike all
        others. `is_requests`: a failure that is the request's fault, which tells nothing of the
        pod.
        """
        self.outcomes[outcome] += is_own
        self.should_eject = False
        if outcome is Outcome.UNKNOWN or is_requests:
            return self._on_unknown(now, placed)
        if outcome is Outcome.BUSY:
            return self._on_busy(now, placed, retry_after)
        self._fade(now)
        self._pauses = 0
        if outcome.is_failure:
            self._failures += 1
            self._in_a_row += 1
            self._failed_with(fingerprint)
            self._update_rate()
            return self._on_failure(outcome, placed)
        self._answers += 1
        self._in_a_row = 0
        self.answered_at = now
        self._update_rate()
        return self._on_answer(now, placed)

    def withdraw(self, times: Sequence[float], now: float) -> bool:
        """Uncount failures of these times: the request was at fault. Returns whether that ends an
        ejection, for which no failure is left."""
        self._recount(times, now, -1)
        ends = self.is_ejected and self._failures < NEGLIGIBLE_RATE
        if self._failures < NEGLIGIBLE_RATE:
            self._failed, self._are_several = 0, False
        if ends:
            self._enter(HealthState.SERVING, 0.0)
        self._update_rate()
        return ends

    def restore(self, times: Sequence[float], now: float, fingerprint: int) -> None:
        """Count failures of these times: the request `fingerprint` was not at fault."""
        if self._recount(times, now, 1):
            self._failed_with(fingerprint)
            self._update_rate()

    def eject(self, now: float, until: float | None = None) -> None:
        """Eject the pod, for longer than the last time; `until`: as another replica decided."""
        if not self.is_ejected and now - self._returned_at > MAX_EJECTION:
            self._streak = 0
        self._streak += 1
        self.ejections += 1
        self._ejected_at = now
        seconds = min(MAX_EJECTION, BASE_EJECTION * 2 ** (self._streak - 1))
        self._enter(HealthState.EJECTED, now + seconds if until is None else until)

    def advance(self, now: float) -> bool:
        """Let time pass; returns whether the state changed."""
        self.decay(now)
        if now < self.until:
            return False
        match self.state:
            case HealthState.EJECTED | HealthState.PROBING:
                self._enter(HealthState.PROBE_DUE, self.until)
            case HealthState.PAUSED:
                self._enter(HealthState.SERVING, 0.0)
            case _:
                return False
        return True

    def decay(self, now: float) -> None:
        """Let the counts fade until `now`."""
        if now > self._decayed_at:
            self._fade(now)
            self._update_rate()

    def counts(self, now: float) -> OutcomeCounts | None:
        """What has been counted; None if that is nothing."""
        self.decay(now)
        # The receiver ejects the pod itself, which is one more.
        streak = self._streak - self.is_ejected
        if not self.failure_rate and not self._in_a_row and not streak:
            return None
        returned = max(0.0, now - self._returned_at)
        return OutcomeCounts(
            self._failures, self._answers, self._in_a_row, streak, returned, self._are_several
        )

    def take_over(self, counts: OutcomeCounts, now: float) -> None:
        """Go on from the counts of another replica, unless more has been counted here."""
        self.decay(now)
        if counts.streak > self._streak:
            self._streak, self._returned_at = counts.streak, now - counts.returned
        if counts.failures + counts.answers > self._failures + self._answers:
            self._failures, self._answers = counts.failures, counts.answers
            self._in_a_row, self._are_several = counts.in_a_row, counts.are_several
            self._update_rate()

    def on_scrape(self) -> bool:
        """A scrape succeeded: the pod accepts connections again. Returns whether the state
        changed."""
        if self.state is not HealthState.SUSPECT:
            return False
        self._enter(HealthState.SERVING, 0.0)
        return True

    def on_new_process(self, now: float) -> None:
        """Another process answers: what the old one did says nothing about it. The length of the
        next ejection still grows: a pod may restart and fail again and again."""
        self._returned_at = max(self._returned_at, self._ejected_at)
        self._forget(now)
        self._enter(HealthState.SERVING, 0.0)

    def _fade(self, now: float) -> None:
        """`decay`, without the rate that follows from it."""
        if now > self._decayed_at:
            factor = 0.5 ** ((now - self._decayed_at) / HALF_LIFE)
            self._failures *= factor
            self._answers *= factor
            self._decayed_at = now
            if self._failures < NEGLIGIBLE_RATE:
                self._failed, self._are_several = 0, False

    def _on_failure(self, outcome: Outcome, placed: float) -> bool:
        if self.is_ejected:
            # Requests from before the ejection still fail: they say nothing new.
            is_probe = self.state is HealthState.PROBING and placed >= self._ejected_at
            self.should_eject = is_probe
            return False
        is_judged = self._failures + self._answers >= MIN_VOLUME
        self.should_eject = self._are_several and (
            self._in_a_row >= EJECT_IN_A_ROW or (is_judged and self.failure_rate >= EJECT_RATE)
        )
        if outcome.accepts_nothing and self.state in (HealthState.SERVING, HealthState.PAUSED):
            self._enter(HealthState.SUSPECT, 0.0)
            return True
        return False

    def _on_answer(self, now: float, placed: float) -> bool:
        # The answer to a request from before the ejection does not show that the pod recovered.
        if not self.is_ejected or placed < self._ejected_at:
            return False
        self._returned_at = now
        self._forget(now)
        self._enter(HealthState.SERVING, 0.0)
        return True

    def _on_unknown(self, now: float, placed: float) -> bool:
        if self.state is not HealthState.PROBING or placed < self._ejected_at:
            return False
        self._enter(HealthState.PROBE_DUE, now)
        return True

    def _on_busy(self, now: float, placed: float, retry_after: float | None) -> bool:
        if self.is_ejected:
            # A busy pod is alive and still unproved: probe again.
            return self._on_unknown(now, placed)
        seconds = BASE_PAUSE * 2 ** min(self._pauses, 10) if retry_after is None else retry_after
        self._pauses += 1
        changed = self.state is not HealthState.PAUSED
        self._enter(HealthState.PAUSED, max(self.until, now + min(MAX_PAUSE, seconds)))
        return changed

    def _enter(self, state: HealthState, until: float) -> None:
        self.state, self.until = state, until
        self._update_rate()

    def _recount(self, times: Sequence[float], now: float, sign: int) -> bool:
        """Add failures of these times, or with a `sign` of -1 remove them, except those that were
        forgotten. Returns whether there were others."""
        self._fade(now)
        times = [time for time in times if time > self._forgotten_at]
        failures = sum(0.5 ** ((now - time) / HALF_LIFE) for time in times)
        in_a_row = sum(time > self.answered_at for time in times)
        self._failures = max(0.0, self._failures + sign * failures)
        self._in_a_row = max(0, self._in_a_row + sign * in_a_row)
        return bool(times)

    def _failed_with(self, fingerprint: int) -> None:
        self._are_several |= not fingerprint or self._failed not in (0, fingerprint)
        self._failed = fingerprint

    def _forget(self, now: float) -> None:
        self._forgotten_at = now
        self._failures = self._answers = 0.0
        self._in_a_row = self._pauses = self._failed = 0
        self._are_several = False

    def _update_rate(self) -> None:
        rate = self._failures / max(self._failures + self._answers, MIN_VOLUME)
        is_probe_due = self.state is HealthState.PROBE_DUE
        self.failure_rate = 0.0 if is_probe_due or rate < NEGLIGIBLE_RATE else rate
