"""A profile: filters, weighted scorers and a picker, for one phase of a request."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from ...backends.pods import Pod
from ...choice.context import ChoiceContext


class Filter(Protocol):
    """Rules candidates out."""

    @property
    def is_steady(self) -> bool:
        """As `Scorer.is_steady`."""

    def keep(self, pods: Sequence[Pod], context: ChoiceContext) -> Sequence[Pod]:
        """The pods that stay, in order; `pods` itself when all of them do."""


class Scorer(Protocol):
    """Rates candidates."""

    @property
    def is_steady(self) -> bool:
        """Whether scores depend on the pods' state alone and not on the request: the profile then
        reuses them until a scrape changes something."""

    def score(self, pods: Sequence[Pod], context: ChoiceContext) -> Sequence[float]:
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
        self, pods: Sequence[Pod], context: ChoiceContext, count: int, random: Random
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
        self, pods: Sequence[Pod], context: ChoiceContext
    ) -> tuple[Sequence[Pod], list[float]]:
        """The pods that no steady filter at the beginning rules out, and their totals so far."""
        if self._cache is None or self._cache[0] is not pods:
            kept = _keep(self._steady_filters, pods, context)
            totals = _add_scores([0.0] * len(kept), kept, self._steady, context)
            self._cache = (pods, kept, totals)
        return self._cache[1], self._cache[2]


def _keep(filters: Sequence[Filter], pods: Sequence[Pod], context: ChoiceContext) -> Sequence[Pod]:
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
    context: ChoiceContext,
) -> list[float]:
    for scorer, weight in scorers:
        scores = scorer.score(pods, context)
        totals = [t + weight * s for t, s in zip(totals, scores, strict=True)]
    return totals
