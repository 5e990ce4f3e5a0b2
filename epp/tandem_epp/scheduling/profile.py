"""A profile: filters and weighted scorers, then a picker, for one phase of a request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Protocol

from ..backends.pods import Pod
from ..request import InferenceRequest


@dataclass(slots=True)
class Context:
    """What scorers may ask about the request at hand."""

    request: InferenceRequest | None
    """None for a request that passes through unread."""
    _matched: dict[str, int] = field(default_factory=dict, repr=False)

    def cached_tokens(self, pod: Pod) -> int:
        """Prompt tokens that `pod` caches or will; looked up once per request and pod."""
        if self.request is None:
            return 0
        if (known := self._matched.get(pod.name)) is None:
            chain = self.request.chain(pod.block_tokens)
            known = pod.index.match(chain) * pod.block_tokens
            self._matched[pod.name] = known
        return known

    def held_tokens(self, pod: Pod) -> int:
        """Prompt tokens whose KV is believed to be on `pod` now."""
        if self.request is None:
            return 0
        return pod.held.match(self.request.chain(pod.block_tokens)) * pod.block_tokens

    def hit_ratio(self, pod: Pod) -> float:
        """Cached share of the prompt, 0 to 1; 0 for an empty prompt."""
        tokens = self.request.prompt_tokens if self.request else 0
        return self.cached_tokens(pod) / tokens if tokens else 0.0


class Scorer(Protocol):
    """Rates candidates; also a filter, which answers 0 or −∞."""

    @property
    def steady(self) -> bool:
        """Whether scores move only when the candidates do, not with each request."""

    def score(self, pods: Sequence[Pod], context: Context) -> Sequence[float]:
        """One score per pod, in order; 0 to 1, higher is better, −∞ rules out."""


class Picker(Protocol):
    """Draws from rated candidates."""

    def pick(self, rated: Sequence[tuple[float, Pod]], count: int, random: Random) -> list[Pod]:
        """At most `count` pods, the choice first, then the alternates in order."""


class Profile:
    """Filters and scorers with their weights, and a picker."""

    def __init__(self, scorers: Sequence[tuple[Scorer, float]], picker: Picker) -> None:
        self._steady = [(s, w) for s, w in scorers if s.steady]
        self._moving = [(s, w) for s, w in scorers if not s.steady]
        self._picker = picker
        self._rated: tuple[Sequence[Pod], list[Pod], list[float]] | None = None

    def run(self, pods: Sequence[Pod], context: Context, count: int, random: Random) -> list[Pod]:
        """The best `count` of `pods`, best first; empty when every one is ruled out.

        Steady scores are kept for as long as `pods` is the same object, which a fleet's views are
        until a scrape moves something.
        """
        eligible, base = self._base(pods, context)
        totals = _added(base, eligible, self._moving, context)
        rated = [(t, pod) for t, pod in zip(totals, eligible, strict=True) if t != -inf]
        return self._picker.pick(rated, count, random) if rated else []

    def _base(self, pods: Sequence[Pod], context: Context) -> tuple[list[Pod], list[float]]:
        if self._rated is None or self._rated[0] is not pods:
            totals = _added([0.0] * len(pods), pods, self._steady, context)
            kept = [(pod, t) for pod, t in zip(pods, totals, strict=True) if t != -inf]
            self._rated = (pods, [pod for pod, _ in kept], [t for _, t in kept])
        return self._rated[1], self._rated[2]


def _added(
    base: list[float],
    pods: Sequence[Pod],
    scorers: Sequence[tuple[Scorer, float]],
    context: Context,
) -> list[float]:
    totals = base
    for scorer, weight in scorers:
        scores = scorer.score(pods, context)
        totals = [t + weight * s for t, s in zip(totals, scores, strict=True)]
    return totals
