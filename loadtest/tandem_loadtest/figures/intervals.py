"""The summary of all repeats, with 95 % confidence intervals."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import atan, cos, exp, lgamma, pi, pow, sqrt
from statistics import fmean, stdev
from typing import Final

from .model import Distribution, Estimate, Figures, Repeat, Report, Slo

CONFIDENCE: Final = 0.95
Z: Final = 1.959964
"""Quantile of the normal distribution for `CONFIDENCE`, two-sided."""

LATENCIES: Final = ("ttft", "ttft_wire", "itl", "tpot", "e2e", "e2e_wire")
"""Distributions of `Figures` that the summary has."""
STATISTICS: Final = ("mean", "p50", "p90", "p99")
"""What it has of each, like `ttft_p50`."""


@dataclass(frozen=True, slots=True)
class Value:
    """One figure of one repeat."""

    value: float
    unit: str
    invalid: str | None = None
    """Why it must not be used; None: it is valid."""
    error: float = 0.0
    """Largest absolute error of `value` that comes from the histogram."""


@lru_cache(maxsize=256)
def t_quantile(freedom: float) -> float:
    """The t for which a share of 0.95 of Student's distribution lies within ±t.

    `freedom` is the degrees of freedom, at least 1, not necessarily whole. The substitution
    t = √freedom × tan θ turns the integral of the density into one of cos^(freedom−1) over a finite
    range, which Simpson's rule solves; bisection inverts it. The error is below 1e-4.
    """
    factor = 2 * exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2)) / sqrt(pi)

    def share(t: float) -> float:
        steps, angle = 256, atan(t / sqrt(freedom))
        heights = [pow(cos(angle * i / steps), freedom - 1) for i in range(steps + 1)]
        weighted = heights[0] + heights[-1] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2])
        return factor * weighted * angle / steps / 3

    # The quantile falls from 12.71 for 1 degree of freedom to the normal distribution's.
    low, high = Z - 1e-3, 12.8
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < CONFIDENCE else (low, middle)
    return (low + high) / 2


def estimate(values: Sequence[Value]) -> Estimate:
    """Mean of one value per repeat, with Student's interval and the histogram's error.

    Raises ValueError without a value.
    """
    if not values:
        raise ValueError("an estimate needs at least one value")
    unit = values[0].unit
    invalid = next((value.invalid for value in values if value.invalid), None)
    numbers = [value.value for value in values]
    mean = fmean(numbers)
    if len(values) == 1:
        return Estimate(value=mean, unit=unit, invalid=invalid)
    half = t_quantile(len(values) - 1) * stdev(numbers) / sqrt(len(values))
    half += max(value.error for value in values)
    # No figure is negative, and no share exceeds 1.
    high = min(1.0, mean + half) if unit == "share" else mean + half
    return Estimate(value=mean, low=max(0.0, mean - half), high=high, unit=unit, invalid=invalid)


def statistic(distribution: Distribution, name: str) -> float:
    """One of `STATISTICS` of a distribution."""
    return distribution.mean if name == "mean" else distribution.percentiles[name[1:]]


def summary_values(repeat: Repeat, gpus: int | None) -> dict[str, Value]:
    """The summary's figures of one repeat, by name; without those that it has no value for."""
    return dict([*_latencies(repeat.all), *_rates(repeat, gpus), *_shares(repeat)])


def _latencies(figures: Figures) -> Iterator[tuple[str, Value]]:
    for name in LATENCIES:
        distribution: Distribution | None = getattr(figures, name)
        if distribution is not None:
            for part in STATISTICS:
                value = statistic(distribution, part)
                # The mean is exact: histograms keep the sum.
                error = 0.0 if part == "mean" else value * distribution.relative_error
                yield f"{name}_{part}", Value(value, "s", distribution.invalid, error)


def _rates(repeat: Repeat, gpus: int | None) -> Iterator[tuple[str, Value]]:
    rates = repeat.rates
    values = [
        ("requests_per_second", Value(rates.requests, "requests/s")),
        ("output_tokens_per_second", Value(rates.output_tokens, "tokens/s")),
        ("total_tokens_per_second", Value(rates.total_tokens, "tokens/s")),
    ]
    if rates.goodput is not None:
        values.append(("goodput", Value(rates.goodput, "requests/s", rates.invalid)))
    for name, value in values:
        yield name, value
        if gpus:
            per_gpu = Value(value.value / gpus, f"{value.unit}/GPU", value.invalid)
            yield f"{name}_per_gpu", per_gpu


def _shares(repeat: Repeat) -> Iterator[tuple[str, Value]]:
    figures = repeat.all
    if repeat.rates.attainment is not None:
        yield "attainment", Value(repeat.rates.attainment, "share", repeat.rates.invalid)
    if repeat.rates.due:
        yield "lost_share", Value(repeat.rates.lost / repeat.rates.due, "share")
    if figures.cached_tokens is not None and figures.prompt_tokens:
        share = figures.cached_tokens / figures.prompt_tokens
        yield "cache_hit_share", Value(share, "share")


def summarize(repeats: Sequence[Repeat], gpus: int | None) -> dict[str, Estimate]:
    """Every figure over the repeats that have it.

    A repeat that was stopped early counts only if all were: its rates and losses differ.
    """
    by_name: dict[str, list[Value]] = {}
    for repeat in complete(repeats):
        for name, value in summary_values(repeat, gpus).items():
            by_name.setdefault(name, []).append(value)
    return {name: estimate(values) for name, values in by_name.items()}


def complete(repeats: Sequence[Repeat]) -> Sequence[Repeat]:
    """Repeats that were not stopped early; all if every one was."""
    return [repeat for repeat in repeats if not repeat.stopped] or repeats


def build_report(
    repeats: Sequence[Repeat],
    *,
    tandem_version: str,
    machine: str,
    url: str,
    model: str,
    endpoint: str,
    workload: dict[str, str | int | float | bool | None],
    processes: int,
    gpus: int | None = None,
    slo: Slo | None = None,
) -> Report:
    """The report of a benchmark; arguments as in `Report`. Raises ValueError without a repeat."""
    if not repeats:
        raise ValueError("a report needs at least one repeat")
    return Report(
        tandem_version=tandem_version,
        machine=machine,
        url=url,
        model=model,
        endpoint=endpoint,
        workload=workload,
        processes=processes,
        gpus=gpus,
        slo=slo,
        summary=summarize(repeats, gpus),
        repeats=list(repeats),
    )
