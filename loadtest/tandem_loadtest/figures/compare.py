"""Compares two reports: which figures differ by more than the noise of the measurement. Pure.

With repeats on both sides, the repeats show the noise (`welch`), by intervals of 95 %. With a
single run, only the sample inside of it does: `within_run` assumes independent requests, so that
the true noise is larger.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, sqrt
from statistics import fmean, variance
from typing import Final

import msgspec

from .histogram import percentile_of, value_of
from .intervals import LATENCIES, Value, Z, complete, summary_values, t_quantile
from .model import Distribution, Repeat, Report

LOST_SHARE: Final = 0.01
"""Share of lost requests from which on latencies of the others are no longer comparable."""
_HIGHER_IS_BETTER: Final = ("per_second", "goodput", "attainment", "cache_hit_share", "per_gpu")


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds, which may be infinite."""

    low: float
    high: float


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both reports."""

    name: str
    """As in `Report.summary`."""
    unit: str
    a: float
    b: float
    percent: float | None
    """(b − a) ÷ a in percent; None when a is 0."""
    low: float | None = None
    """95 % confidence interval of b − a; None: unknown, or without a bound on this side."""
    high: float | None = None
    beyond_noise: bool | None = None
    """Whether the interval excludes 0; None: it is unknown, `basis` says why."""
    improves: bool | None = None
    """Whether b is the better one; None without a difference beyond noise."""
    basis: str
    """What the interval comes from, or why there is none, in one line."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between two reports, called A and B."""

    differences: list[Difference]
    """Figures that both reports have, in the order of A."""
    warnings: list[str]
    """Why the two may not be comparable, one line each."""
    notes: list[str]
    """How to read the verdicts, one line each."""


_NOTED: Final = 20
"""Figures with a verdict from which on chance makes about one differ."""
_CACHE_SHARE: Final = 0.1
"""Difference of the shares of cached prompt tokens above which two runs are hardly comparable."""


def compare(a: Report, b: Report) -> Comparison:
    """Compare every figure that the summaries of both reports have."""
    differences = [_difference(name, a, b) for name in a.summary if name in b.summary]
    warnings = [*_settings(a, b), *_runs("A", a), *_runs("B", b), *_caches(a, b), *_missing(a, b)]
    return Comparison(
        differences=differences, warnings=warnings, notes=list(_notes(a, b, differences))
    )


def _difference(name: str, a: Report, b: Report) -> Difference:
    estimate_a, estimate_b = a.summary[name], b.summary[name]
    before, after = estimate_a.value, estimate_b.value
    change = after - before
    interval, basis = None, ""
    for side, invalid in (("A", estimate_a.invalid), ("B", estimate_b.invalid)):
        if invalid and not basis:
            basis = f"invalid in {side}: {invalid}"
    if not basis:
        interval, basis = _interval(name, a, b)
    beyond = None if interval is None else not interval.low <= 0 <= interval.high
    return Difference(
        name=name,
        unit=estimate_a.unit,
        a=before,
        b=after,
        percent=100 * change / before if before else None,
        low=None if interval is None or interval.low == -inf else interval.low,
        high=None if interval is None or interval.high == inf else interval.high,
        beyond_noise=beyond,
        improves=(change > 0) is name.endswith(_HIGHER_IS_BETTER) if beyond else None,
        basis=basis,
    )


def _values(name: str, report: Report) -> list[Value]:
    by_repeat = (summary_values(repeat, report.gpus) for repeat in complete(report.repeats))
    return [values[name] for values in by_repeat if name in values]


def _interval(name: str, a: Report, b: Report) -> tuple[Interval | None, str]:
    values_a, values_b = _values(name, a), _values(name, b)
    if not values_a or not values_b:
        return None, "no repeat has this figure"
    if len(values_a) > 1 and len(values_b) > 1:
        interval = welch([v.value for v in values_a], [v.value for v in values_b])
        basis = f"repeats: {len(values_a)} of A, {len(values_b)} of B"
    else:
        sides = [_side(name, a, values_a), _side(name, b, values_b)]
        if sides[0] is None or sides[1] is None:
            return None, "a single run does not show the noise of this figure: use --repeats"
        interval = difference(a.summary[name].value, sides[0], b.summary[name].value, sides[1])
        basis = "requests within the run, taken as independent: the true noise is larger"
    # The two histograms may be off in opposite directions.
    error = max(v.error for v in values_a) + max(v.error for v in values_b)
    return Interval(interval.low - error, interval.high + error), basis


def _side(name: str, report: Report, values: list[Value]) -> Interval | None:
    estimate = report.summary[name]
    if len(values) > 1 and estimate.low is not None and estimate.high is not None:
        return Interval(estimate.low, estimate.high)
    (repeat,) = (r for r in complete(report.repeats) if name in summary_values(r, report.gpus))
    return within_run(name, repeat, report.gpus)


def _settings(a: Report, b: Report) -> Iterator[str]:
    """Settings that differ. Another URL or version is what a comparison is often about."""
    for name in ("model", "endpoint", "machine", "processes", "gpus", "slo"):
        mine, other = getattr(a, name), getattr(b, name)
        if mine != other:
            yield f"{name} differs: {_text(mine)} in A, {_text(other)} in B"
    # The seed belongs to a run, not to its settings.
    for key in sorted((a.workload.keys() | b.workload.keys()) - {"seed"}):
        mine, other = a.workload.get(key), b.workload.get(key)
        if mine != other:
            yield f"workload {key} differs: {_text(mine)} in A, {_text(other)} in B"


def _text(value: object) -> str:
    if value is None:
        return "none"
    return msgspec.json.encode(value).decode() if isinstance(value, msgspec.Struct) else str(value)


def _runs(side: str, report: Report) -> Iterator[str]:
    stopped = sum(repeat.stopped for repeat in report.repeats)
    if stopped:
        yield f"{side}: {stopped} of {len(report.repeats)} repeats were stopped early"
    lost = report.summary.get("lost_share")
    if lost and lost.value >= LOST_SHARE:
        yield (
            f"{side} lost {lost.value:.1%} of its requests: latencies are those of the others, "
            "which may be the faster ones"
        )
    for quantity in LATENCIES:
        # All statistics of a distribution are invalid for the same reason.
        estimate = report.summary.get(f"{quantity}_p50")
        if estimate and estimate.invalid:
            yield f"{side}: {quantity} is invalid: {estimate.invalid}"


def _caches(a: Report, b: Report) -> Iterator[str]:
    hits = [report.summary.get("cache_hit_share") for report in (a, b)]
    if hits[0] and hits[1] and abs(hits[0].value - hits[1].value) > _CACHE_SHARE:
        yield (
            f"the prefix cache had {hits[0].value:.0%} of the prompt tokens in A and "
            f"{hits[1].value:.0%} in B: two runs of the same --seed send the same prompts"
        )


def _missing(a: Report, b: Report) -> Iterator[str]:
    for side, mine, other in (("A", a, b), ("B", b, a)):
        names = [name for name in mine.summary if name not in other.summary]
        if names:
            yield f"only {side} has {', '.join(names)}"


def _notes(a: Report, b: Report, differences: list[Difference]) -> Iterator[str]:
    count = sum(difference.beyond_noise is not None for difference in differences)
    if count >= _NOTED:
        yield (
            f"Intervals have 95 % confidence: of {count} figures without a true difference, "
            f"about {count / 20:.0f} would still appear to differ."
        )
    for side, report in (("A", a), ("B", b)):
        if len(complete(report.repeats)) == 1:
            yield (
                f"{side} has one repeat: its noise is estimated from the requests within the run "
                "as if they were independent, which is a lower bound; use --repeats 3 or more."
            )


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
