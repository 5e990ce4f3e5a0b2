"""Scorers of load and caches, one class each. Load is divided by the backend's `weight` before
comparison.

Formulas and defaults are llm-d's (llm-d-router, pkg/epp/framework/plugins/scheduling/scorer).

A backend that was not scraped yet counts as idle in every scorer that reads its gauges: it may be
new, and a low score would keep requests from it. Requests sent to it meanwhile count as in flight.
"""

from collections.abc import Sequence
from typing import Final

from ...backends.pods import Pod
from ...choice.context import ChoiceContext
from ...estimates.engine_figures import Gauges

_IDLE = Gauges()

QUEUE_THRESHOLD: Final = 128
"""Waiting requests at which load-aware-scorer gives 0; llm-d's default."""
TOKEN_THRESHOLD: Final = 4_194_304
"""Tokens in flight at which token-load-scorer gives 0: 128 requests of 32,768 tokens; llm-d's
default."""
MATCH_TOKENS: Final = 8192
"""Tokens of a match at which its length scores 1; llm-d's default."""


class PrefixCacheScorer:
    """How much of the prompt was routed to the backend before, from 0 to 1, higher is better:

        (1 - length_weight) * matched / prompt + length_weight * min(1, matched / scale_tokens)²

    Equal matches tie. A backend without an index entry scores 0, and so does every backend for a
    request that is not read. `max_tokens`: of matched and prompt no more than this counts; 0: all.
    """

    is_steady = False

    def __init__(
        self,
        length_weight: float = 0.0,
        scale_tokens: int = MATCH_TOKENS,
        max_tokens: int = 0,
    ) -> None:
        self._length_weight, self._scale_tokens = length_weight, scale_tokens
        self._max_tokens = max_tokens

    def score(self, pods: Sequence[Pod], context: ChoiceContext) -> list[float]:
        prompt = context.request.prompt_tokens if context.request else 0
        if self._max_tokens:
            prompt = min(prompt, self._max_tokens)
        if not prompt:
            return [0.0] * len(pods)
        return [self._score(min(prompt, context.placed_tokens(pod)), prompt) for pod in pods]

    def _score(self, matched: int, prompt: int) -> float:
        share = matched / prompt
        if not self._length_weight:
            return share
        length = min(1.0, matched / self._scale_tokens)
        return (1.0 - self._length_weight) * share + self._length_weight * length * length


class QueueScorer:
    """Requests waiting in the engine: 1 for the shortest queue to 0 for the longest, linear
    between. All equal: 1 each. Not scraped: counts as an empty queue."""

    is_steady = True

    def score(self, pods: Sequence[Pod], _context: ChoiceContext) -> list[float]:
        return _normalize([(p.gauges or _IDLE).waiting / p.backend.weight for p in pods])


class RunningRequestsSizeScorer:
    """Requests running in the engine: 1 for the fewest to 0 for the most, linear between. All
    equal: 1 each. Not scraped: counts as none running."""

    is_steady = True

    def score(self, pods: Sequence[Pod], _context: ChoiceContext) -> list[float]:
        return _normalize([(p.gauges or _IDLE).running / p.backend.weight for p in pods])


class KvCacheUtilizationScorer:
    """Free share of the KV cache: 0 (full) to 1 (empty), higher is better, independent of the other
    backends. Equal shares tie. Not scraped: counts as empty."""

    is_steady = True

    def score(self, pods: Sequence[Pod], _context: ChoiceContext) -> list[float]:
        return [1.0 - (p.gauges or _IDLE).kv_usage for p in pods]


class LoadAwareScorer:
    """Requests waiting in the engine, whatever the other backends have: 0.5 for none, and with
    `waiting` of them 0.5 * (1 - waiting / threshold), 0 from `threshold` on; higher is better.
    Equal queues tie. Not scraped: counts as an empty queue."""

    is_steady = True

    def __init__(self, threshold: int = QUEUE_THRESHOLD) -> None:
        self._threshold = threshold

    def score(self, pods: Sequence[Pod], _context: ChoiceContext) -> list[float]:
        loads = [(p.gauges or _IDLE).waiting / p.backend.weight for p in pods]
        return [0.5 * (1.0 - min(1.0, load / self._threshold)) for load in loads]


class ActiveRequestScorer:
    """Requests that this EPP placed there and that have not ended, counted exactly: 1 with at most
    `idle_threshold` of them, else from `max_busy_score` down to 0 for the most of any candidate,
    linear in (most - requests) / most. None in flight anywhere: 1 each."""

    is_steady = False

    def __init__(self, idle_threshold: int = 0, max_busy_score: float = 1.0) -> None:
        self._idle_threshold, self._max_busy_score = idle_threshold, max_busy_score

    def score(self, pods: Sequence[Pod], _context: ChoiceContext) -> list[float]:
        loads = [pod.in_flight / pod.backend.weight for pod in pods]
        most = max(loads, default=0.0)
        return [
            1.0 if load <= self._idle_threshold else self._max_busy_score * (most - load) / most
            for load in loads
        ]


class TokenLoadScorer:
    """Prompt tokens that the backend has to compute, those of this request included: 1 for none
    down to 0 from `threshold` on, linear between, whatever the other backends have. Only uncached
    tokens count, from the placement to the response headers, on the pod that computes them."""

    is_steady = False

    def __init__(self, threshold: int = TOKEN_THRESHOLD) -> None:
        self._threshold = threshold

    def score(self, pods: Sequence[Pod], context: ChoiceContext) -> list[float]:
        prompt = context.request.prompt_tokens if context.request else 0
        loads = [
            (pod.tokens_in_flight + max(0, prompt - context.placed_tokens(pod)))
            / pod.backend.weight
            for pod in pods
        ]
        return [1.0 - min(1.0, load / self._threshold) for load in loads]


class LoraAffinityScorer:
    """Whether the backend has the LoRA adapter that the request names: 1 if a request for it runs
    there, 0.8 if a slot is left for it, 0.6 if requests for it wait there, else 0; higher is
    better. Equal values tie. A backend that reports no adapters scores 0.8, and for a model that no
    backend reports as an adapter all score 1."""

    is_steady = False

    def score(self, pods: Sequence[Pod], context: ChoiceContext) -> list[float]:
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
