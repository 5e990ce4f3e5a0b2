"""A profile: filters, weighted scorers and a picker, for one phase of a request."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Final, Protocol

from ..backends.pods import Pod
from ..backends.prefix_tree import PrefixMatch, PrefixTree
from ..kv_events.collector import PreciseMatch
from ..request import InferenceRequest

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class ScoringContext:
    """A request, and lookups that combine it with a pod; the input of every scorer."""

    __slots__ = ("_match", "headers", "notes", "now", "peer", "precise", "prefixes", "request")

    def __init__(
        self,
        request: InferenceRequest | None,
        prefixes: PrefixTree[Pod] | None = None,
        precise: PreciseMatch | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        now: float = 0.0,
        *,
        peer: Pod | None = None,
    ) -> None:
        self.request = request
        """None for a request whose body the EPP does not read."""
        self.prefixes = prefixes
        """The prefix index; None: no pod is known to cache anything."""
        self.precise = precise
        """What the precise index has of the prompt; None: it is off, or the prompt is not
        tokenized."""
        self.headers = headers
        """The client's request headers, names in lower case."""
        self.now = now
        """Unix seconds."""
        self.peer = peer
        """The decode pod, once it is chosen: the prefill pod is chosen for it."""
        self.notes: dict[object, object] = {}
        """Plugin → what it found while it filtered or scored, for its own `on_placed`."""
        self._match: PrefixMatch[Pod] | None = None
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

    def _whole_blocks(self, assumed: int, pod: Pod) -> int:
        """Tokens in whole KV blocks of the pod: an engine caches no part of one."""
        tokens = self.request.tokens(assumed) if self.request else 0
        return tokens - tokens % pod.block_tokens


_NO_MATCH: Final[PrefixMatch[Pod]] = PrefixMatch((), {})


class Filter(Protocol):
    """Rules candidates out."""

    @property
    def is_steady(self) -> bool:
        """As `Scorer.is_steady`."""

    def keep(self, pods: Sequence[Pod], context: ScoringContext) -> Sequence[Pod]:
        """The pods that stay, in order; `pods` itself when all of them do."""


class Scorer(Protocol):
    """Rates candidates."""

    @property
    def is_steady(self) -> bool:
        """Whether scores depend on the pods' state alone and not on the request: the profile then
        reuses them until a scrape changes something."""

    def score(self, pods: Sequence[Pod], context: ScoringContext) -> Sequence[float]:
        """One score per pod, in order: 0 to 1, higher is better."""


class Picker(Protocol):
    """Draws from scored candidates."""

    @property
    def max_endpoints(self) -> int:
        """Addresses in the destination header: the decode pod and its alternates; at least 1."""

    def pick(self, scored: Sequence[tuple[float, Pod]], count: int, random: Random) -> list[Pod]:
        """At most `count` pods: the choice first, then the alternates in order."""


class Profile:
    """Filters, scorers with their weights, and a picker."""

    def __init__(
        self,
        filters: Sequence[Filter],
        scorers: Sequence[tuple[Scorer, float]],
        picker: Picker,
    ) -> None:
        # Filters run in their order, as one may keep everything where others left too little. The
        # steady ones at the beginning run after a scrape, the rest for every request.
        first = next((i for i, f in enumerate(filters) if not f.is_steady), len(filters))
        self._steady_filters, self._filters = filters[:first], filters[first:]
        self._steady = [(scorer, weight) for scorer, weight in scorers if scorer.is_steady]
        self._per_request = [(scorer, weight) for scorer, weight in scorers if not scorer.is_steady]
        self._picker = picker
        # The steady totals of one view. The key is the view's identity: a fleet returns the same
        # object until something changes that a scorer can see.
        self._cache: tuple[Sequence[Pod], Sequence[Pod], list[float]] | None = None

    @property
    def max_endpoints(self) -> int:
        """Addresses in the destination header, as the picker's parameters say."""
        return self._picker.max_endpoints

    def run(
        self, pods: Sequence[Pod], context: ScoringContext, count: int, random: Random
    ) -> list[Pod]:
        """The best `count` of `pods`, best first; empty when every pod is ruled out."""
        eligible, steady = self._steady_totals(pods, context)
        kept = _keep(self._filters, eligible, context)
        if kept is not eligible:
            # Scorers compare the candidates that are left with each other.
            steady = _add_scores([0.0] * len(kept), kept, self._steady, context)
        # `steady` may be the cache's own: `_add_scores` makes a new list and does not change it.
        totals = _add_scores(steady, kept, self._per_request, context)
        scored = list(zip(totals, kept, strict=True))
        return self._picker.pick(scored, count, random) if scored else []

    def _steady_totals(
        self, pods: Sequence[Pod], context: ScoringContext
    ) -> tuple[Sequence[Pod], list[float]]:
        """The pods that no steady filter at the beginning rules out, and their totals so far."""
        if self._cache is None or self._cache[0] is not pods:
            kept = _keep(self._steady_filters, pods, context)
            totals = _add_scores([0.0] * len(kept), kept, self._steady, context)
            self._cache = (pods, kept, totals)
        return self._cache[1], self._cache[2]


def _keep(filters: Sequence[Filter], pods: Sequence[Pod], context: ScoringContext) -> Sequence[Pod]:
    for each in filters:
        pods = each.keep(pods, context)
    return pods


def keep_if(pods: Sequence[Pod], is_kept: Callable[[Pod], bool]) -> Sequence[Pod]:
    """The pods for which `is_kept` holds; `pods` itself if it holds for all."""
    kept = [pod for pod in pods if is_kept(pod)]
    return pods if len(kept) == len(pods) else kept


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
