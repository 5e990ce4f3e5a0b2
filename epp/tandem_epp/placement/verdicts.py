"""Applies the outcome of a request to the health of its pods.

`outcomes` judges, `backends.ejections` counts:

pods = PlacedPods(decode, prefill, placed)   the request is placed
pods.start(fleet)                            it may be the probe of an ejected pod
pods.judge_response(fleet, response, now)    response headers passed
pods.judge_end(fleet, outcome, now)          the request ended after them, or
pods.judge_silence(fleet, now)               without any

Where a sidecar or the reference engine serves, headers come with the first token: the pod answered.
vLLM sends the headers of a stream at once, even if its engine hangs. So whether it answered is
judged at the end, if its metrics tell whether tokens flowed.
"""

from collections.abc import Sequence
from typing import Final

from tandem_contract.paths import RoutingPath
from tandem_contract.timing import parse_timing

from ..backends.fleet import Fleet
from ..backends.outcomes import (
    Outcome,
    abandoned,
    decode_outcome,
    ended,
    ended_unproved,
    prefill_outcomes,
)
from ..backends.pods import Pod
from ..exchange import BrokenAnswer, Ending, ResponseHeaders

_SPLIT: Final = RoutingPath.PREFILL_THEN_DECODE


class PlacedPods:
    """The pods of one request."""

    __slots__ = ("can_fall_back", "decode", "fingerprint", "is_own", "placed", "prefill")

    def __init__(
        self,
        decode: Pod,
        prefill: Sequence[Pod],
        placed: float,
        can_fall_back: bool = True,
        is_own: bool = True,
        *,
        fingerprint: int = 0,
    ) -> None:
        self.decode = decode
        self.prefill = prefill
        """The candidates; empty without a split."""
        self.placed = placed
        """When the request was placed; Unix seconds."""
        self.can_fall_back = can_fall_back
        """Whether the sidecar may serve a split request alone when the prefill fails."""
        self.is_own = is_own
        """Whether this EPP placed the request, and not another replica."""
        self.fingerprint = fingerprint
        """`InferenceRequest.fingerprint`; 0: the prompt is not known."""

    def start(self, fleet: Fleet) -> None:
        """The request goes to its pods: it is the probe of one that is due for a probe."""
        for pod in (self.decode, *self.prefill[:1]):
            fleet.ejections.place(pod, self.placed)

    def judge_response(self, fleet: Fleet, response: ResponseHeaders, now: float) -> Outcome | None:
        """Count the outcome at each pod, from the response's headers; returns the decode pod's.
        None: only the end of the answer will tell."""
        is_sidecar = response.path is not None
        outcome = decode_outcome(response.status, response.details, is_sidecar=is_sidecar)
        if outcome is Outcome.ANSWERED and self._proves_nothing(response):
            for pod in self.prefill[:1]:
                self._record(fleet, pod, Outcome.UNKNOWN, now)
            return None
        if not self.prefill:
            self._record(fleet, self.decode, outcome, now, _seconds(response.retry_after))
            return outcome
        has_failed = self._has_prefill_failed(response)
        handoffs = self._handoff_outcomes(response, has_failed=has_failed)
        if has_failed:
            # The sidecar's own error, which says nothing about the decode pod.
            outcome = Outcome.UNKNOWN
        retry_after = _seconds(response.retry_after)
        self._record(fleet, self.decode, outcome, now, retry_after)
        for i, (pod, handoff) in enumerate(zip(self.prefill, handoffs, strict=True)):
            # Where nothing was learned, the first candidate must know, because it may be probed.
            if i == 0 or handoff is not Outcome.UNKNOWN:
                self._record(fleet, pod, handoff, now)
        return outcome

    def judge_unreachable(self, fleet: Fleet, now: float) -> None:
        """Count that the decode pod took nothing of the request, which another one served."""
        self._record(fleet, self.decode, Outcome.UNREACHABLE, now)

    def judge_silence(self, fleet: Fleet, now: float) -> Outcome:
        """Count that the request ended without response headers; returns the outcome at the decode
        pod."""
        outcome = abandoned(now - self._worked_at)
        self._record(fleet, self.decode, outcome, now)
        # The sidecar limits the time of the prefill: only the decode pod can have stalled.
        for pod in self.prefill[:1]:
            self._record(fleet, pod, Outcome.UNKNOWN, now)
        return outcome

    def judge_end(self, fleet: Fleet, outcome: Outcome | None, now: float) -> Outcome:
        """Count what the end of the request, at `now`, tells of the decode pod, for which
        `judge_response` returned `outcome`; returns the outcome that holds."""
        pod = self.decode
        if outcome is not None:
            if outcome is not Outcome.ANSWERED or pod.counters.generated_tokens is None:
                return outcome
            if ended(self._silent, has_work=pod.has_work) is outcome:
                return outcome
            outcome = Outcome.STALLED
        else:
            is_scraped = pod.scraped_at >= self.placed
            has_generated = pod.generated_at >= self.placed if is_scraped else None
            outcome = ended_unproved(
                self._silent, has_work=pod.has_work, has_generated=has_generated
            )
        self._record(fleet, pod, outcome, now)
        return outcome

    @property
    def _silent(self) -> float:
        """Seconds until the decode pod's last scrape in which it showed no sign of work. How it
        does without a scrape is judged by its scrapes' failures."""
        return self.decode.scraped_at - self._worked_at

    @property
    def _worked_at(self) -> float:
        """When the decode pod last showed a sign of work since the request was placed, or that
        time; Unix seconds."""
        return max(self.decode.health.answered_at, self.decode.generated_at, self.placed)

    def _proves_nothing(self, response: ResponseHeaders) -> bool:
        """Whether the engine may have sent the headers before it computed anything, and its
        metrics will tell whether it did."""
        is_first_token = response.path is not None or response.timing is not None
        is_reported = self.decode.counters.generated_tokens is not None
        return response.is_stream and not is_first_token and is_reported

    def _record(
        self,
        fleet: Fleet,
        pod: Pod,
        outcome: Outcome,
        now: float,
        retry_after: float | None = None,
    ) -> None:
        fleet.ejections.record(
            pod,
            outcome,
            now,
            self.placed,
            retry_after,
            is_own=self.is_own,
            fingerprint=self.fingerprint,
            is_prefill=pod is not self.decode,
        )

    def _has_prefill_failed(self, response: ResponseHeaders) -> bool:
        """Whether the response is the sidecar's error, because no prefill succeeded."""
        if self.can_fall_back or response.status < 500 or response.path != _SPLIT:
            return False
        # With the times of a prefill it is an error of the decode engine.
        return parse_timing(response.timing or "").leg is None

    def _handoff_outcomes(
        self, response: ResponseHeaders, *, has_failed: bool
    ) -> Sequence[Outcome]:
        named = response.prefill or ""
        names = [named if pod.is_named(named) else pod.name for pod in self.prefill]
        return prefill_outcomes(
            names,
            response.path,
            response.prefill,
            response.status,
            has_failed=has_failed,
        )


def judge_broken(fleet: Fleet, broken: BrokenAnswer, now: float, *, is_own: bool = True) -> None:
    """Count that an answer ended too early, at `now`, at each pod with its address: the ranks of an
    engine share one. `is_own`: Envoy told this EPP, and not another replica."""
    outcome = Outcome.BROKEN if broken.ending is Ending.BROKEN else Outcome.STALLED
    for pod in fleet:
        # A pod that generates tokens works: then the client was impatient.
        is_working = broken.ending is Ending.LEFT and pod.generated_at >= broken.started
        if pod.address == broken.backend and not is_working:
            fleet.ejections.record(pod, outcome, now, broken.started, is_own=is_own)


def _seconds(retry_after: str | None) -> float | None:
    """The header's value if it is a number of seconds; a date counts as unknown."""
    text = retry_after or ""
    return float(text) if text.isascii() and text.isdigit() else None
