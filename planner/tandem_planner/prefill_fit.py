"""How long one engine takes to compute prompts, learned from measurements.

    seconds(n, cached) = a + b n + c (n² + 2 n cached)

n uncached tokens behind `cached` tokens: a is the cost of a request, b that of a token through the
layers, and c that of attention, in which each of the n tokens looks at all tokens before it: n²/2 +
n·cached pairs. Batches fit in, because the formula is additive: for several requests that an engine
computed together, the requests, tokens and pairs are summed.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from .learned_cost import LearnedCost
from .sample_window import is_usable


class PrefillCost(NamedTuple):
    """The coefficients of one engine."""

    fixed: float
    """Seconds per request."""
    per_token: float
    """Seconds per uncached token."""
    per_pair: float
    """Seconds per unit of n² + 2 n cached."""

    def seconds(self, uncached: float, cached: float = 0.0) -> float:
        """Seconds to compute `uncached` prompt tokens behind `cached` ones; 0 for none."""
        if uncached <= 0:
            return 0.0
        return self.fixed + uncached * (self.per_token + self.per_pair * (uncached + 2 * cached))


PREFILL_PRIOR: Final = PrefillCost(0.005, 1e-4, 5e-10)
"""Assumed before anything is measured: 10,000 tokens per second and 5 ms per request, about an 8B
model on one GPU of 2024. A token at position 100,000 costs twice as much as the first one."""


class PrefillSample(NamedTuple):
    """Prompts that an engine computed in `seconds`, alone or together."""

    requests: int
    tokens: float
    """Uncached tokens, of all requests."""
    pairs: float
    """n² + 2 n cached, summed over the requests."""
    seconds: float


def prefill_sample(prompts: Iterable[tuple[float, float]], seconds: float) -> PrefillSample:
    """A sample of prompts, given as (uncached, cached) tokens."""
    requests, tokens, pairs = 0, 0.0, 0.0
    for uncached, cached in prompts:
        requests += 1
        tokens += uncached
        pairs += uncached * (uncached + 2 * cached)
    return PrefillSample(requests, tokens, pairs, seconds)


class PrefillFit(LearnedCost[PrefillCost]):
    """The fit of one engine. The first sample after a start counts only until the second one: it
    has the engine's compilations and first allocations in it."""

    def __init__(self, prior: PrefillCost = PREFILL_PRIOR) -> None:
        super().__init__(PrefillCost._make, prior)
        self._is_cold = True

    def add(self, sample: PrefillSample, now: float) -> None:
        """Learn from a measurement; without tokens or seconds it says nothing."""
        features = (float(sample.requests), sample.tokens, sample.pairs)
        if sample.tokens < 1 or not is_usable(features, sample.seconds):
            return
        if self._is_cold and self.window.count:
            self._is_cold = False
            self.window.clear()
        self.window.add(features, sample.seconds, now)

    @property
    def is_cold(self) -> bool:
        """Whether its only sample is the first one after the engine's start."""
        return self._is_cold and self.count > 0

    def end_cold_start(self) -> None:
        """Keep the samples of the window: others measured them after the engine's start."""
        self._is_cold = False

    def restart(self) -> None:
        """The engine's process was replaced, perhaps by another machine: start again."""
        super().restart()
        self._is_cold = True
