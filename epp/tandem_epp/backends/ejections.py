"""Which pods are ejected: applies outcomes to the health of pods, and never ejects too many.

At most MAX_SHARE of the ready pods of one role and model are ejected at a time, rounded down but at
least one of two, like Envoy's `max_ejection_percent`. A pod that is the only one of its kind is
therefore never ejected. Pods may leave the others behind later, because they crash or are removed:
`available` then keeps the ejected ones.

Failures that may be the request's fault eject no pod if they are all of one request, or if every
other pod fails as well (SHARED_RATE). Those of a request that fails alike on two pods count at
neither, unless a third one answers it: `failed_requests`.

`on_change` is called when the pods that may be chosen change, `on_rate` when only failure rates do.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Final

from tandem_contract.paths import Role

from .failed_requests import FailedRequests, RequestPart
from .health import OutcomeCounts
from .outcomes import Outcome
from .pods import Pod, log_return

MAX_SHARE: Final = 0.5
"""Share of the pods of a role and model that may be ejected at a time. Higher: a fault that all
pods share, such as a prompt that fails everywhere, loads the few that are left. Lower: more
requests fail when many pods do."""
SHARED_RATE: Final = 0.25
"""Failure rate of every other pod of a role and model from which errors, timeouts and failed
hand-offs eject none: they follow the requests, not the pod. Higher: a client whose requests fail
everywhere ejects healthy pods. Lower: a few errors everywhere keep a pod that fails always."""
UPKEEP_SECONDS: Final = 1.0
"""Seconds between two updates of fading failure rates."""
_log: Final = logging.getLogger(__name__)


class Ejections:
    """The ejected pods of a fleet."""

    def __init__(
        self,
        pods: Iterable[Pod],
        on_change: Callable[[], None] = lambda: None,
        on_rate: Callable[[], None] = lambda: None,
    ) -> None:
        """`pods` is iterated again at each use: the pods that exist then."""
        self._pods, self._on_change, self._on_rate = pods, on_change, on_rate
        self._watched: set[Pod] = set()
        """Pods whose health changes with time."""
        self._next_upkeep = inf
        self._failed_requests = FailedRequests[Pod]()
        self.on_ejected: Callable[[Pod, float], None] = lambda pod, now: None
        """Called with each pod that is ejected for a request of this EPP, and the time."""

    def record(
        self,
        pod: Pod,
        outcome: Outcome,
        now: float,
        placed: float,
        retry_after: float | None = None,
        *,
        is_own: bool = True,
        fingerprint: int = 0,
        is_prefill: bool = False,
    ) -> None:
        """Count the outcome at `pod` of a request that was placed at `placed`, and eject the pod if
        it fails too often; times are Unix seconds. `is_own`: this EPP placed the request, not
        another replica. `fingerprint`: of the request; 0: unlike all others. `is_prefill`: the
        pod was to prefill for another one."""
        health = pod.health
        rate, was_ejected = health.failure_rate, health.is_ejected
        is_requests = outcome.may_be_requests and self._is_requests_fault(
            pod, RequestPart(fingerprint, is_prefill), now
        )
        if outcome is Outcome.ANSWERED and self._failed_requests.parts:
            self._restore(RequestPart(fingerprint, is_prefill), now)
        changed = health.record(
            outcome,
            now,
            placed,
            retry_after,
            is_own=is_own,
            fingerprint=fingerprint if outcome.may_be_requests else 0,
            is_requests=is_requests,
        )
        if was_ejected and not health.is_ejected:
            log_return(pod, "it answered the probe")
        pod.estimates.changed()
        if health.should_eject and self._may_eject(pod, outcome):
            self.eject(pod, now)
            if is_own:
                self.on_ejected(pod, now)
        elif changed:
            self._on_change()
        elif health.failure_rate != rate:
            self._on_rate()
        self._watch(pod, now)

    def adopt(self, pod: Pod, now: float, until: float) -> None:
        """Another replica has ejected `pod` until then: so does this one, unless it has already, or
        too many would be ejected."""
        if not pod.health.is_ejected and self._leaves_enough(pod):
            self.eject(pod, now, until)

    def take_over(self, pod: Pod, counts: OutcomeCounts, now: float) -> None:
        """Go on from what another replica has counted at `pod`."""
        pod.health.take_over(counts, now)
        pod.estimates.changed()
        self._watch(pod, now)
        self._on_rate()

    def eject(self, pod: Pod, now: float, until: float | None = None) -> None:
        """Eject `pod` whatever the share; `until`: as another replica decided."""
        health = pod.health
        health.eject(now, until)
        pod.estimates.changed()
        reason = (
            f"{health.failure_rate:.0%} of its latest requests failed"
            if until is None
            else "as another replica decided"
        )
        _log.warning(
            "backend %s is ejected for %.0f s: %s; outcomes of this EPP's requests: %s",
            pod.name,
            health.until - now,
            reason,
            ", ".join(f"{n} {outcome}" for outcome, n in health.outcomes.items() if n) or "none",
        )
        self._watch(pod, now)
        self._on_change()

    def place(self, pod: Pod, now: float) -> None:
        """A request is placed on `pod`: it is the probe if one is due."""
        if pod.health.place(now):
            pod.estimates.changed()
            self._watch(pod, now)
            self._on_change()

    def advance(self, now: float) -> None:
        """Let time pass: to be called before each decision. Costs one comparison while all pods are
        healthy."""
        if now < self._next_upkeep:
            return
        # A list, because every state must advance: `any` would stop at the first.
        self._watched.intersection_update(self._pods)
        changes = [pod.health.advance(now) for pod in self._watched]
        for pod in self._watched:
            pod.estimates.changed()
        self._watched = {pod for pod in self._watched if pod.health.needs_upkeep}
        self._next_upkeep = self._upkeep_after(now)
        if any(changes):
            self._on_change()
        elif changes:
            self._on_rate()

    def _is_requests_fault(self, pod: Pod, part: RequestPart, now: float) -> bool:
        """Whether a failure at `pod` tells nothing of it; withdraws earlier ones that told as
        little."""
        if part.fingerprint:
            counted = self._failed_requests.on_failure(part, pod, now)
            if counted is not None:
                self._withdraw(counted, now)
                return True
        return False

    def _withdraw(self, counted: Sequence[tuple[Pod, float]], now: float) -> None:
        for pod, times in _by_pod(counted):
            if pod.health.withdraw(times, now):
                log_return(pod, "the requests that failed there fail elsewhere too")
                self._on_change()
            pod.estimates.changed()
            self._on_rate()

    def _restore(self, part: RequestPart, now: float) -> None:
        """A pod answered `part`: count the failures that seemed to be the request's fault. They
        eject no pod before its next one."""
        for pod, times in _by_pod(self._failed_requests.on_answer(part, now)):
            pod.health.restore(times, now, part.fingerprint)
            pod.estimates.changed()
            self._watch(pod, now)
            self._on_rate()

    def _alike(self, pod: Pod) -> list[Pod]:
        return [other for other in self._pods if other.ready and is_alike(other, pod)]

    def _watch(self, pod: Pod, now: float) -> None:
        if pod.health.needs_upkeep:
            self._watched.add(pod)
            # Never later than it was: outcomes of one pod must not put off the end of another's
            # pause.
            self._next_upkeep = min(self._next_upkeep, self._upkeep_after(now))

    def _upkeep_after(self, now: float) -> float:
        """When the next upkeep is due, if all that was due `now` is done."""
        ends = [pod.health.until for pod in self._watched if pod.health.until > now]
        upkeep = now + UPKEEP_SECONDS if self._watched else inf
        return min([upkeep, *ends])

    def _may_eject(self, pod: Pod, outcome: Outcome) -> bool:
        """Whether `outcome`, the last of several failures, may eject `pod`."""
        if pod.health.is_ejected:
            # A failed probe: it is among the ejected already.
            return True
        return self._leaves_enough(pod) and not (outcome.may_be_requests and self._all_fail(pod))

    def _leaves_enough(self, pod: Pod) -> bool:
        alike = self._alike(pod)
        ejected = sum(other.health.is_ejected for other in alike)
        return ejected + 1 <= len(alike) * MAX_SHARE

    def _all_fail(self, pod: Pod) -> bool:
        """Whether every other pod like `pod` fails as well."""
        return all(
            other is pod or other.health.failure_rate >= SHARED_RATE for other in self._alike(pod)
        )


def _by_pod(
    failures: Sequence[tuple[Pod, float]],
) -> Iterable[tuple[Pod, Sequence[float]]]:
    for pod in {pod for pod, _ in failures}:
        yield pod, [at for other, at in failures if other is pod]


def is_alike(pod: Pod, other: Pod) -> bool:
    """Whether both have the same role and a model in common, so that one may stand in for the
    other."""
    first, second = pod.backend, other.backend
    shares_model = (
        not first.models or not second.models or not set(first.models).isdisjoint(second.models)
    )
    return first.role is second.role and shares_model


def available(pods: Sequence[Pod]) -> tuple[Pod, ...]:
    """`pods` without those that are ejected, paused or suspect. If no pod is left for a phase, all
    pods for this phase stay: a request that may fail is better than one that is refused."""
    kept = {pod for pod in pods if pod.health.is_available}
    for phase in (Role.PREFILL, Role.DECODE):
        for_phase = [pod for pod in pods if pod.backend.role.serves(phase)]
        if kept.isdisjoint(for_phase):
            kept.update(for_phase)
    return tuple(pod for pod in pods if pod in kept)
