"""Confidence intervals of 95 % for the difference between two runs. Pure.

With repeats on both sides, the repeats show the noise (`welch`). With a single run, only the sample
inside of it does: `within_run` assumes independent requests, so that the true noise is larger.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, sqrt
from statistics import fmean, variance

from .histogram import percentile_of, value_of
from .intervals import LATENCIES, Z, t_quantile
from .model import Distribution, Repeat


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds, which may be infinite."""

    low: float
    high: float


def welch(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Interval of mean(b) − mean(a) by Welch's t-test; at least two values on each side."""
    difference = fmean(b) - fmean(a)
    error_a, error_b = variance(a) / len(a), variance(b) / len(b)
    if not error_a + error_b:
        return Interval(difference, difference)
    freedom = (error_a + error_b) ** 2 / (error_a**2 / (len(a) - 1) + error_b**2 / (len(b) - 1))
    half = t_quantile(freedom) * sqrt(error_a + error_b)
    return Interval(difference - half, difference + half)


def difference(a: float, around_a: Interval, b: float, around_b: Interval) -> Interval:
    """Interval of b − a from those of a and b, which may be asymmetric.

    The distances to the bounds add up as squares (the method MOVER of Zou and Donner, 2008).
    """
    low = sqrt((b - around_b.low) ** 2 + (around_a.high - a) ** 2)
    high = sqrt((around_b.high - b) ** 2 + (a - around_a.low) ** 2)
    return Interval(b - a - low, b - a + high)


def percentile_interval(distribution: Distribution, percent: float, independent: int) -> Interval:
    """Interval of a percentile by order statistics.

    The rank of the true percentile among n independent values is binomial; its normal
    approximation, rounded outwards, gives the ranks of the bounds. A bound beyond the smallest or
    the largest value is 0 or infinite. `independent` is n, at most the number of values: the gaps
    of a request depend on each other.
    """
    n, share = independent, percent / 100
    half = Z * sqrt(n * share * (1 - share))
    low, high = floor(n * share - half), ceil(n * share + half) + 1
    counts = dict(distribution.buckets)
    least, most = distribution.minimum, distribution.maximum

    def value(rank: int) -> float:
        return percentile_of(counts, 100 * rank / n, least, most)

    return Interval(value(low) if low >= 1 else 0.0, value(high) if high <= n else inf)


def mean_interval(distribution: Distribution, independent: int) -> Interval:
    """Interval of a mean by its standard error; unbounded for fewer than two values."""
    if independent < 2:
        return Interval(-inf, inf)
    squares = sum(
        count * (value_of(bucket) - distribution.mean) ** 2
        for bucket, count in distribution.buckets
    )
    half = Z * sqrt(squares / distribution.count / (independent - 1))
    return Interval(distribution.mean - half, distribution.mean + half)


def share_interval(successes: float, trials: int) -> Interval:
    """Wilson's interval of a share."""
    share, square = successes / trials, Z**2 / trials
    middle = (share + square / 2) / (1 + square)
    half = Z * sqrt(share * (1 - share) / trials + square / trials / 4) / (1 + square)
    return Interval(middle - half, middle + half)


def rate_interval(rate: float, seconds: float) -> Interval:
    """Interval of a number of requests per second that arrive independently (Poisson)."""
    half = Z * sqrt(rate / seconds)
    return Interval(rate - half, rate + half)


def within_run(name: str, repeat: Repeat, gpus: int | None) -> Interval | None:
    """Interval of a figure of the summary from a single run; None where a run does not show it.

    Raises KeyError if the run has no value for it.
    """
    name, divisor = name.removesuffix("_per_gpu"), gpus if name.endswith("_per_gpu") else 1
    quantity, _, part = name.rpartition("_")
    if quantity in LATENCIES:
        return _latency_interval(quantity, part, repeat)
    figures, rates = repeat.all, repeat.rates
    if name == "lost_share":
        return share_interval(rates.lost, rates.due)
    if name == "attainment":
        return share_interval(figures.within_slo or 0, rates.due)
    rate = {"requests_per_second": rates.requests, "goodput": rates.goodput}.get(name)
    if rate is None:
        return None
    interval = rate_interval(rate, repeat.seconds)
    return Interval(interval.low / (divisor or 1), interval.high / (divisor or 1))


def _latency_interval(quantity: str, part: str, repeat: Repeat) -> Interval:
    distribution: Distribution | None = getattr(repeat.all, quantity)
    if distribution is None:
        raise KeyError(f"{quantity}_{part}")
    streamed = repeat.all.ttft
    independent = distribution.count
    if quantity == "itl" and streamed is not None:
        independent = min(independent, streamed.count)
    if part == "mean":
        return mean_interval(distribution, independent)
    return percentile_interval(distribution, float(part[1:]), independent)
