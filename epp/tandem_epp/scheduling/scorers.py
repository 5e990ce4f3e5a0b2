"""Filters and scorers, one class each. Load is divided by the backend's `weight` before comparison.

A backend that was not scraped yet counts as idle in every scorer that reads its gauges: it may be
new, and a low score would keep requests from it. Requests sent to it meanwhile count as in flight.
"""

from collections.abc import Sequence
from math import inf

from tandem_contract.paths import Role

from ..backends.engine_page import Gauges
from ..backends.pods import Pod
from .profile import ScoringContext

_IDLE = Gauges()


class RoleFilter:
    """−∞ for a backend whose role excludes `phase`, 0 for one that may run it; a unified backend
    may run any. Every backend has a role, so no data can be missing; all that remain tie."""

    is_steady = True

    def __init__(self, phase: Role) -> None:
        self._phase = phase

    def score(self, pods: Sequence[Pod], _context: ScoringContext) -> list[float]:
        return [0.0 if pod.backend.role.serves(self._phase) else -inf for pod in pods]


class PrefixCacheScorer:
    """Share of the prompt that was routed to the backend before: 0 (nothing) to 1 (all of it),
    higher is better. Equal shares tie. A backend without an index entry scores 0, and so does every
    backend for a request that is not read."""

    is_steady = False

    def score(self, pods: Sequence[Pod], context: ScoringContext) -> list[float]:
        return [context.hit_ratio(pod) for pod in pods]


class QueueScorer:
    """Requests waiting in the engine: 1 for the shortest queue to 0 for the longest, linear
    between. All equal: 1 each. Not scraped: counts as an empty queue."""

    is_steady = True

    def score(self, pods: Sequence[Pod], _context: ScoringContext) -> list[float]:
        return _normalize([(p.gauges or _IDLE).waiting / p.backend.weight for p in pods])


class RunningRequestsSizeScorer:
    """Requests running in the engine: 1 for the fewest to 0 for the most, linear between. All
    equal: 1 each. Not scraped: counts as none running."""

    is_steady = True

    def score(self, pods: Sequence[Pod], _context: ScoringContext) -> list[float]:
        return _normalize([(p.gauges or _IDLE).running / p.backend.weight for p in pods])


class KvCacheUtilizationScorer:
    """Free share of the KV cache: 0 (full) to 1 (empty), higher is better, independent of the other
    backends. Equal shares tie. Not scraped: counts as empty."""

    is_steady = True

    def score(self, pods: Sequence[Pod], _context: ScoringContext) -> list[float]:
        return [1.0 - (p.gauges or _IDLE).kv_usage for p in pods]


class ActiveRequestScorer:
    """Requests that this EPP placed there and that have not ended, counted exactly: 1 for none to 0
    for the most of any candidate, linear between. None in flight anywhere: 1 each."""

    is_steady = False

    def score(self, pods: Sequence[Pod], _context: ScoringContext) -> list[float]:
        loads = [pod.in_flight / pod.backend.weight for pod in pods]
        most = max(loads, default=0.0)
        return [1.0 - load / most for load in loads] if most else [1.0] * len(loads)


class LoraAffinityScorer:
    """Whether the backend has the LoRA adapter that the request names: 1 if a request for it runs
    there, 0.8 if a slot is left for it, 0.6 if requests for it wait there, else 0; higher is
    better. Equal values tie. A backend that reports no adapters scores 0.8, and for a model that no
    backend reports as an adapter all score 1."""

    is_steady = False

    def score(self, pods: Sequence[Pod], context: ScoringContext) -> list[float]:
        model = context.request.model if context.request else None
        reported = (pod.adapters.reported for pod in pods)
        if model is None or not any(model in r.running or model in r.waiting for r in reported):
            return [1.0] * len(pods)
        return [pod.adapters.affinity(model) for pod in pods]


def _normalize(loads: list[float]) -> list[float]:
    """Loads as scores: the lowest is 1, the highest 0; all equal: 1 each."""
    low, high = min(loads, default=0.0), max(loads, default=0.0)
    # No load tells the pods apart: equal scores leave the choice to the other scorers.
    if high == low:
        return [1.0] * len(loads)
    return [(high - load) / (high - low) for load in loads]
