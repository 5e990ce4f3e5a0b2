"""A profile: filters, weighted scorers and a picker, for one phase of a request."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Final, Protocol

from ..backends.pods import Pod
from ..backends.prefix_tree import PrefixMatch, PrefixTree
from ..kv_events.collector import PreciseMatch
from ..request import InferenceRequest


@dataclass(slots=True)
class ScoringContext:
    """A request, and lookups that combine it with a pod; the input of every scorer."""

    request: InferenceRequest | None
    """None for a request whose body the EPP does not read."""
    prefixes: PrefixTree[Pod] | None = None
    """The prefix index; None: no pod is known to cache anything."""
    precise: PreciseMatch | None = None
    """What the precise index has of the prompt; None: it is off, or the prompt is not tokenized."""
    _match: PrefixMatch[Pod] | None = None
    """What the index has of the prompt, for all pods; looked up once per request."""

    @property
    def match(self) -> PrefixMatch[Pod]:
        """What each pod has of the prompt, to blocks of the index."""
        if self._match is None:
            if self.request is None or self.prefixes is None:
                return _NO_MATCH
            self._match = self.prefixes.match(self.request.chain)
        return self._match

    def placed_tokens(self, pod: Pod) -> int:
        """Length, in tokens, of the prompt's longest prefix that was routed to `pod` before: it is
        cached there or about to be."""
        placed = self._whole_blocks(self.match.placed_tokens(pod), pod)
        if self.precise is not None and (exact := self.precise.cached(pod.name)) is not None:
            # What was routed and is not answered yet is about to be cached; what was answered and
            # is not cached any more has been evicted.
            is_coming = self.match.placed_tokens(pod) > self.match.cached_tokens(pod)
            if is_coming or not self.precise.is_whole(pod.name):
                return max(exact.total, placed)
            return exact.total
        return placed

    def cached_tokens(self, pod: Pod) -> int:
        """Length, in tokens, of the prompt's longest prefix whose KV is on `pod`, by its KV events
        where they are known; else, believed to be."""
        cached = self._whole_blocks(self.match.cached_tokens(pod), pod)
        if self.precise is not None and (exact := self.precise.cached(pod.name)) is not None:
            return exact.total if self.precise.is_whole(pod.name) else max(exact.total, cached)
        return cached

    def hit_ratio(self, pod: Pod) -> float:
        """`placed_tokens` as a share of the prompt, 0 to 1; 0 for an empty prompt."""
        tokens = self.request.prompt_tokens if self.request else 0
        return self.placed_tokens(pod) / tokens if tokens else 0.0

    def _whole_blocks(self, assumed: int, pod: Pod) -> int:
        """Tokens in whole KV blocks of the pod: an engine caches no part of one."""
        tokens = self.request.tokens(assumed) if self.request else 0
        return tokens - tokens % pod.block_tokens


_NO_MATCH: Final[PrefixMatch[Pod]] = PrefixMatch((), {})


class Scorer(Protocol):
    """Rates candidates. A filter is a scorer that answers 0 or −∞."""

    @property
    def is_steady(self) -> bool:
        """Whether scores depend on the pods' state alone and not on the request: the profile then
        reuses them until a scrape changes something."""

    def score(self, pods: Sequence[Pod], context: ScoringContext) -> Sequence[float]:
        """One score per pod, in order: 0 to 1, higher is better; −∞ rules a pod out."""


class Picker(Protocol):
    """Draws from scored candidates."""

    @property
    def max_endpoints(self) -> int:
        """Addresses in the destination header: the decode pod and its alternates; at least 1."""

    def pick(self, scored: Sequence[tuple[float, Pod]], count: int, random: Random) -> list[Pod]:
        """At most `count` pods: the choice first, then the alternates in order."""


class Profile:
    """Filters and scorers with their weights, and a picker."""

    def __init__(self, scorers: Sequence[tuple[Scorer, float]], picker: Picker) -> None:
        # Split once: steady scorers run after a scrape, the others for every request.
        self._steady = [(scorer, weight) for scorer, weight in scorers if scorer.is_steady]
        self._per_request = [(scorer, weight) for scorer, weight in scorers if not scorer.is_steady]
        self._picker = picker
        # The steady totals of one view. The key is the view's identity: a fleet returns the same
        # object until something changes that a scorer can see.
        self._cache: tuple[Sequence[Pod], list[Pod], list[float]] | None = None

    @property
    def max_endpoints(self) -> int:
        """Addresses in the destination header, as the picker's parameters say."""
        return self._picker.max_endpoints

    def run(
        self, pods: Sequence[Pod], context: ScoringContext, count: int, random: Random
    ) -> list[Pod]:
        """The best `count` of `pods`, best first; empty when every pod is ruled out."""
        # Both lists are the cache's own: `_add_scores` makes a new list and changes neither.
        eligible, steady = self._steady_totals(pods, context)
        totals = _add_scores(steady, eligible, self._per_request, context)
        scored = [(t, pod) for t, pod in zip(totals, eligible, strict=True) if t != -inf]
        return self._picker.pick(scored, count, random) if scored else []

    def _steady_totals(
        self, pods: Sequence[Pod], context: ScoringContext
    ) -> tuple[list[Pod], list[float]]:
        """The pods that no steady filter rules out, and their totals so far."""
        if self._cache is None or self._cache[0] is not pods:
            totals = _add_scores([0.0] * len(pods), pods, self._steady, context)
            scored = [(pod, t) for pod, t in zip(pods, totals, strict=True) if t != -inf]
            self._cache = (pods, [pod for pod, _ in scored], [t for _, t in scored])
        return self._cache[1], self._cache[2]


def _add_scores(
    totals: list[float],
    pods: Sequence[Pod],
    scorers: Sequence[tuple[Scorer, float]],
    context: ScoringContext,
) -> list[float]:
    for scorer, weight in scorers:
        scores = scorer.score(pods, context)
        totals = [t + weight * s for t, s in zip(totals, scores, strict=True)]
    return totals
