"""Filters and scorers, one class each. A backend's `weight` divides its load before it is compared.

A backend not scraped yet counts as idle in every scorer that reads its gauges: it may be new, and
it gets no request to be measured by unless it may be chosen. What was sent to it meanwhile is in
the in-flight count.
"""

from collections.abc import Sequence
from math import inf

from tandem_contract.paths import Role

from ..backends.pods import Gauges, Pod
from .profile import Context

_IDLE = Gauges()


class RoleFilter:
    """Rules out by role: −∞ for a backend that may not run `phase`, 0 for one that may; a unified
    backend may run any. Every backend has a role, so nothing is missing and ties say nothing."""

    steady = True

    def __init__(self, phase: Role) -> None:
        self._phase = phase

    def score(self, pods: Sequence[Pod], _context: Context) -> list[float]:
        return [0.0 if pod.backend.role.serves(self._phase) else -inf for pod in pods]


class PrefixCacheScorer:
    """Cached share of the prompt: 0 (none) to 1 (all of it), higher is better. Equal shares tie; a
    backend without an index entry, and any for a request that passes through, scores 0."""

    steady = False

    def score(self, pods: Sequence[Pod], context: Context) -> list[float]:
        return [context.hit_ratio(pod) for pod in pods]


class QueueScorer:
    """Requests waiting in the engine: 1 for the shortest queue to 0 for the longest, in proportion
    between. All equal: 1 each. Not scraped: counts as an empty queue."""

    steady = True

    def score(self, pods: Sequence[Pod], _context: Context) -> list[float]:
        return _spread([(p.gauges or _IDLE).waiting / p.backend.weight for p in pods])


class RunningRequestsSizeScorer:
    """Requests running in the engine: 1 for the fewest to 0 for the most, in proportion between.
    All equal: 1 each. Not scraped: counts as none running."""

    steady = True

    def score(self, pods: Sequence[Pod], _context: Context) -> list[float]:
        return _spread([(p.gauges or _IDLE).running / p.backend.weight for p in pods])


class KvCacheUtilizationScorer:
    """Free share of the KV cache: 0 (full) to 1 (empty), higher is better, whatever the others
    have. Equal shares tie; not scraped: counts as empty."""

    steady = True

    def score(self, pods: Sequence[Pod], _context: Context) -> list[float]:
        return [1.0 - (p.gauges or _IDLE).kv_usage for p in pods]


class ActiveRequestScorer:
    """Requests this router placed there and that have not ended, counted exactly: 1 for none, 0
    for the most of any candidate, in proportion between. Nothing placed anywhere: 1 each."""

    steady = False

    def score(self, pods: Sequence[Pod], _context: Context) -> list[float]:
        loads = [pod.in_flight / pod.backend.weight for pod in pods]
        most = max(loads, default=0.0)
        return [1.0 - load / most for load in loads] if most else [1.0] * len(loads)


def _spread(loads: list[float]) -> list[float]:
    low, high = min(loads, default=0.0), max(loads, default=0.0)
    if high == low:
        return [1.0] * len(loads)
    return [(high - load) / (high - low) for load in loads]
