"""Compares two reports: which figures differ by more than the noise of the measurement. Pure."""

from collections.abc import Iterator
from math import inf
from typing import Final

import msgspec

from .intervals import LATENCIES, Value, complete, summary_values
from .model import Report
from .noise import Interval, difference, welch, within_run

LOST_SHARE: Final = 0.01
"""Share of lost requests from which on latencies of the others are no longer comparable."""
_HIGHER_IS_BETTER: Final = ("per_second", "goodput", "attainment", "cache_hit_share", "per_gpu")


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
