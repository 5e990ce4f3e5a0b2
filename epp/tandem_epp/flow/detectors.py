"""llm-d's saturation detectors: how loaded pods are, by thresholds. Pure.

The saturation of pods is the mean of theirs: 1 is what a configuration says they take. Both phases
count apart, and the more saturated one counts for all requests, as in llm-d.

Unlike llm-d's, what was placed since the last scrape counts at once (in-flight credit), so requests
that come between two scrapes do not all find the same room. And a metrics page that is not read any
more does not stop all requests: a pod of which nothing is known is full, but it gets one request a
second.

Source: llm-d/llm-d-router, pkg/epp/framework/plugins/flowcontrol/saturationdetector.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf
from typing import Final, Literal, Protocol

from tandem_contract.paths import Role
from tandem_planner.cost import PodFigures

from ..backends.fleet import Fleet
from ..backends.pace import BUSY_INTERVAL
from ..backends.pods import Pod, in_subset
from ..estimates.engine_figures import Gauges
from .ceilings import Ceilings, StaticCeilings
from .saturation import Saturation

_FULL: Final = 1.0
_NOT_SCRAPED: Final = Gauges()
_NO_GATE: Final = StaticCeilings()


class Detector(Protocol):
    """A saturation detector."""

    @property
    def is_scraped(self) -> bool:
        """Whether it depends on the engines' metrics pages."""

    def load(self, pod: Pod, figures: PodFigures, now: float) -> float:
        """Of what `pod` takes, the share that it has: 1 or more is full."""

    def admits(self, pod: Pod, figures: PodFigures, now: float) -> bool:
        """Whether the detector as a filter lets `pod` have a request."""


@dataclass(frozen=True)
class UtilizationDetector:
    """utilization-detector: by the engine's queue and the use of its KV cache."""

    queue_depth: int = 5
    """Requests in the queue of a full engine."""
    kv_cache_util: float = 0.8
    """Used share of a full KV cache."""
    staleness: float = 0.2
    """Seconds after which a busy pod's figures should have been replaced."""
    headroom: float = 0.0
    """How far a pod may exceed these limits, as a share of them."""
    is_scraped = True

    def load(self, pod: Pod, figures: PodFigures, now: float) -> float:
        if self._is_stale(pod, now):
            return _FULL
        waiting, usage = _queue_and_kv(pod, figures)
        return max(waiting / self.queue_depth, usage / self.kv_cache_util)

    def admits(self, pod: Pod, figures: PodFigures, now: float) -> bool:
        waiting, usage = _queue_and_kv(pod, figures)
        factor = 1.0 + self.headroom
        is_below = waiting < factor * self.queue_depth and usage < factor * self.kv_cache_util
        return is_below and not self._is_stale(pod, now)

    def _is_stale(self, pod: Pod, now: float) -> bool:
        # A pod at rest is scraped seldom, and its figures hold.
        age = now - pod.scraped_at
        return bool(pod.in_flight) and age > self.staleness + BUSY_INTERVAL


@dataclass(frozen=True)
class ConcurrencyDetector:
    """concurrency-detector: by requests in flight, by their prompt tokens, or by both."""

    max_concurrency: int = 100
    """Requests of a full pod."""
    max_token_concurrency: int = 1_000_000
    """Prompt tokens of a full pod."""
    mode: Literal["requests", "tokens", "hybrid"] = "requests"
    headroom: float = 0.0
    """As in `UtilizationDetector`."""
    is_scraped = False

    def load(self, pod: Pod, _figures: PodFigures, _now: float) -> float:
        requests = pod.in_flight / self.max_concurrency
        tokens = pod.tokens_in_flight / self.max_token_concurrency
        if self.mode == "hybrid":
            return max(requests, tokens)
        return requests if self.mode == "requests" else tokens

    def admits(self, pod: Pod, figures: PodFigures, now: float) -> bool:
        return self.load(pod, figures, now) < 1.0 + self.headroom


def _queue_and_kv(pod: Pod, figures: PodFigures) -> tuple[float, float]:
    """Requests that wait in the engine, and the used share of its KV cache, both with what was
    placed since the last scrape."""
    gauges = pod.gauges or _NOT_SCRAPED
    capacity = pod.estimates.capacity_tokens
    usage = gauges.kv_usage if isinf(capacity) else 1.0 - figures.free_tokens / capacity
    return gauges.waiting + pod.placed_since_scrape, usage


class DetectedSaturation:
    """The room of a fleet's pods, as a detector says."""

    def __init__(
        self, fleet: Fleet, saturation: Saturation, detector: Detector, ceilings: Ceilings | None
    ) -> None:
        self._fleet, self._saturation = fleet, saturation
        self._detector, self._ceilings = detector, ceilings or _NO_GATE

    def saturation(self, model: str | None, now: float) -> float:
        """Of the pods for `model`: the higher one of both phases."""
        pods = self._saturation.ready(model).pods
        phases = [
            [pod for pod in pods if pod.backend.role.serves(phase)]
            for phase in (Role.PREFILL, Role.DECODE)
        ]
        return max((self._mean(phase, now) for phase in phases if phase), default=_FULL)

    def has_room(self, model: str | None, priorities: Sequence[int], now: float) -> bool:
        """Whether a request of any of `priorities`, the highest first, may go now."""
        saturation = self.saturation(model, now)
        return all(saturation < limit for limit in self._limits(saturation, priorities, now))

    def pods_with_room(
        self,
        model: str | None,
        priority: int,
        priorities: Sequence[int],
        now: float,
        hint: frozenset[str] | None = None,
    ) -> Sequence[Pod]:
        """The pods that a request of `priority` may go to now; none: it waits. `priorities`: all,
        the highest first; `hint`: addresses of the pods that count, None: all."""
        pods = in_subset(self._saturation.ready(model).pods, hint)
        saturation = self.saturation(model, now)
        limits = dict(zip(priorities, self._limits(saturation, priorities, now), strict=True))
        if saturation < limits[priority]:
            return pods
        if not self._detector.is_scraped:
            return ()
        return self._saturation.probe(pods, now)

    def _limits(self, saturation: float, priorities: Sequence[int], now: float) -> Sequence[float]:
        return self._ceilings.limits(saturation, priorities, now)

    def _mean(self, pods: Sequence[Pod], now: float) -> float:
        figures = self._fleet.figures
        table, rows = figures.at(now).pods, figures.rows
        return sum(self._detector.load(pod, table[rows[pod]], now) for pod in pods) / len(pods)
