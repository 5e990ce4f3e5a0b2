"""Filters by role, label and load, one class each.

Meaning and defaults are llm-d's (llm-d-router, pkg/epp/framework/plugins/scheduling/filter).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem_contract.labels import LLMD_ROLE
from tandem_contract.paths import Role
from tandem_contract.selectors import holds

from ...backends.pods import Pod
from ...choice.context import ChoiceContext
from ...estimates.engine_figures import Gauges
from ...flow.detectors import Detector, UtilizationDetector
from .llmd_parameters import Condition, LabelSelector, Metric
from .profile import keep_if

_IDLE = Gauges()
_LLMD_ROLES: Mapping[Role, str] = {
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
    Role.UNIFIED: "prefill-decode",
}


def label(pod: Pod, key: str) -> str | None:
    """The value of a label of `pod`; None: it has none. A backend without the label of llm-d's
    roles has one by its role."""
    value = pod.backend.labels.get(key)
    return _LLMD_ROLES[pod.backend.role] if value is None and key == LLMD_ROLE else value


@dataclass(frozen=True)
class RoleFilter:
    """Keeps backends that may run `phase`; a unified backend may run any."""

    phase: Role
    is_steady = True

    def keep(self, pods: Sequence[Pod], _context: ChoiceContext) -> Sequence[Pod]:
        return keep_if(pods, lambda pod: pod.backend.role.serves(self.phase))


@dataclass(frozen=True)
class LabelFilter:
    """Keeps pods whose label `key` has one of `values`, and those without it if `allows_none`."""

    key: str
    values: frozenset[str]
    allows_none: bool
    is_steady = True

    def keep(self, pods: Sequence[Pod], _context: ChoiceContext) -> Sequence[Pod]:
        return keep_if(pods, lambda pod: self._matches(label(pod, self.key)))

    def _matches(self, value: str | None) -> bool:
        return self.allows_none if value is None else value in self.values


@dataclass(frozen=True)
class SelectorFilter:
    """Keeps pods that a Kubernetes label selector matches: all of its labels and expressions."""

    selector: LabelSelector
    is_steady = True

    def keep(self, pods: Sequence[Pod], _context: ChoiceContext) -> Sequence[Pod]:
        return keep_if(pods, self._matches)

    def _matches(self, pod: Pod) -> bool:
        return all(
            label(pod, key) == value for key, value in self.selector.matchLabels.items()
        ) and all(
            holds(label(pod, e.key), e.operator, e.values) for e in self.selector.matchExpressions
        )


@dataclass(frozen=True)
class UtilizationFilter:
    """Keeps pods of which no figure exceeds its limit; if none is left and `keeps_all_if_none`,
    all. Not scraped: every figure of the engine counts as 0."""

    conditions: Sequence[Condition]
    keeps_all_if_none: bool

    @property
    def is_steady(self) -> bool:
        # Requests in flight change without a scrape.
        return all(condition.metric is not Metric.ACTIVE for condition in self.conditions)

    def keep(self, pods: Sequence[Pod], _context: ChoiceContext) -> Sequence[Pod]:
        kept = keep_if(pods, self._is_below)
        return pods if not kept and self.keeps_all_if_none else kept

    def _is_below(self, pod: Pod) -> bool:
        return all(_figure(pod, c.metric) <= c.maxValue for c in self.conditions)


@dataclass(frozen=True)
class DetectorFilter:
    """Keeps pods that a saturation detector admits; if it is the utilization-detector and none is
    left, all."""

    detector: Detector
    is_steady = False

    def keep(self, pods: Sequence[Pod], context: ChoiceContext) -> Sequence[Pod]:
        now = context.now
        kept = keep_if(pods, lambda pod: self.detector.admits(pod, pod.estimates.figures(now), now))
        return pods if not kept and isinstance(self.detector, UtilizationDetector) else kept


def _figure(pod: Pod, metric: Metric) -> float:
    gauges = pod.gauges or _IDLE
    match metric:
        case Metric.ACTIVE:
            return pod.in_flight
        case Metric.RUNNING:
            return gauges.running
        case Metric.WAITING:
            return gauges.waiting
        case Metric.KV_USAGE:
            return gauges.kv_usage
