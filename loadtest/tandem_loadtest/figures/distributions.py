"""Makes the report's distributions, and decides which of them are invalid."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Final

from .histogram import RELATIVE_ERROR, Histogram, percentile_of
from .model import PERCENTILES, Distribution

INVALID_SECONDS: Final = 0.001
INVALID_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Delay:
    """p99 of the delays that the load generator itself adds, in seconds."""

    lateness: float = 0.0
    """Of its sends: part of every figure that counts from the intended time."""
    read_lag: float = 0.0
    """Of its reads: part of every figure."""


def invalid_reason(
    scale: float, delay: Delay, *, from_intended: bool, scale_name: str = "this p50"
) -> str | None:
    """Why a figure must not be used, in one line; None: it is valid.

    It is invalid if the generator's own p99 delay exceeds the larger of 1 ms and 5 % of `scale`,
    the figure's p50 or the limit of an SLO, in seconds: read lag for every figure, lateness only
    for those `from_intended` time.
    """
    limit = max(INVALID_SECONDS, INVALID_SHARE * scale)
    delays = {"read lag": delay.read_lag}
    if from_intended:
        delays["send lateness"] = delay.lateness
    for name, seconds in delays.items():
        if seconds > limit:
            return (
                f"the load generator's {name} p99 of {seconds * 1000:.3g} ms exceeds "
                f"{limit * 1000:.3g} ms, the larger of 1 ms and 5 % of {scale_name}"
            )
    return None


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of `values` in rising order, linear between ranks (numpy's default).

    So it compares with those of vLLM's benchmark. Raises ValueError when there is no value or
    `percent` is not from 0 to 100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError("a percentile is of at least one value, from 0 to 100")
    rank = (len(values) - 1) * percent / 100
    low, high = values[floor(rank)], values[ceil(rank)]
    # Rounding could exceed the larger value by a bit.
    return min(high, low + (high - low) * (rank - floor(rank)))


def of_values(
    values: Sequence[float], delay: Delay | None = None, *, from_intended: bool = False
) -> Distribution | None:
    """Distribution of values that were all kept; None without any.

    `delay` and `from_intended` as in `invalid_reason`; None: the figure is about the generator.
    """
    if not values:
        return None
    ordered = sorted(values)
    histogram = Histogram()
    histogram.add_all(ordered)
    percentiles = {f"{p:g}": percentile(ordered, p) for p in PERCENTILES}
    return _distribution(histogram, percentiles, 0.0, delay, from_intended=from_intended)


def of_histogram(histogram: Histogram, delay: Delay | None = None) -> Distribution | None:
    """Distribution of the values of a histogram; None without any. `delay` as in `of_values`."""
    if not histogram.count:
        return None
    percentiles = {
        f"{p:g}": percentile_of(histogram.counts, p, histogram.minimum, histogram.maximum)
        for p in PERCENTILES
    }
    return _distribution(histogram, percentiles, RELATIVE_ERROR, delay)


def _distribution(
    histogram: Histogram,
    percentiles: dict[str, float],
    relative_error: float,
    delay: Delay | None,
    *,
    from_intended: bool = False,
) -> Distribution:
    invalid = None
    if delay is not None:
        invalid = invalid_reason(percentiles["50"], delay, from_intended=from_intended)
    return Distribution(
        count=histogram.count,
        mean=histogram.total / histogram.count,
        minimum=histogram.minimum,
        maximum=histogram.maximum,
        percentiles=percentiles,
        buckets=sorted(histogram.counts.items()),
        relative_error=relative_error,
        invalid=invalid,
    )
