"""Distributions of prompt and answer lengths, in tokens. Pure."""

import random
from dataclasses import dataclass, replace
from math import log
from typing import Final, Protocol, Self

_LONGEST: Final = 8
"""Bound of a draw, in means: a lognormal distribution has no end, but a context window has."""


class Lengths(Protocol):
    """Token counts of a mean, each at least 1."""

    @property
    def mean(self) -> float:
        """Mean in tokens, before draws are bounded."""

    def draw(self, generator: random.Random) -> int:
        """A length from 1 token up to the distribution's bound."""

    def scaled(self, mean: float) -> Self:
        """The same distribution with another mean."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths whose logarithm is normally distributed, rounded and cut to 1 … 8 × mean.

    The median is mean × exp(−spread²/2). With a spread up to 1, the upper bound lowers the mean by
    at most 2 %.
    """

    mean: float
    """Tokens, at least 1."""
    spread: float = 0.0
    """Standard deviation of the natural logarithm; 0: all lengths are equal."""

    def draw(self, generator: random.Random) -> int:
        """A length from 1 to 8 × mean tokens."""
        if not self.spread:
            return max(1, round(self.mean))
        tokens = generator.lognormvariate(log(self.mean) - self.spread**2 / 2, self.spread)
        return max(1, round(min(tokens, _LONGEST * self.mean)))

    def scaled(self, mean: float) -> Self:
        """The same spread with another mean."""
        return replace(self, mean=mean)


@dataclass(frozen=True, slots=True)
class Bimodal:
    """Two uniform ranges of lengths: mostly short ones, and a share of long ones."""

    share: float
    """Share of long ones, 0 to 1."""
    short: tuple[float, float] = (50, 200)
    """Bounds in tokens."""
    long: tuple[float, float] = (2000, 4000)
    """Bounds in tokens."""

    @property
    def mean(self) -> float:
        """Mean in tokens of both ranges together."""
        return (1 - self.share) * sum(self.short) / 2 + self.share * sum(self.long) / 2

    def draw(self, generator: random.Random) -> int:
        """A length within one of the two ranges."""
        bounds = self.long if generator.random() < self.share else self.short
        return max(1, round(generator.uniform(*bounds)))

    def scaled(self, mean: float) -> Self:
        """Both ranges moved by the same factor."""
        factor = mean / self.mean
        short, long = self.short, self.long
        return replace(
            self,
            short=(short[0] * factor, short[1] * factor),
            long=(long[0] * factor, long[1] * factor),
        )
