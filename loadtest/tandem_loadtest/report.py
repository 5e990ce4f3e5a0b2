"""Statistics of a run for each routing path. All times in seconds.

Percentiles interpolate linearly between the two nearest ranks (numpy's default), so that they
compare with those of vLLM's benchmark.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor
from statistics import fmean
from typing import Final

from .calls import Result

UNROUTED: Final = "unrouted"
"""Path of results whose response had no routing path header."""


@dataclass(frozen=True, slots=True)
class Slos:
    """Service level objectives of a request, in seconds."""

    ttft: float
    """Largest time to first token."""
    itl: float
    """Largest mean of one request's times between tokens."""

    def met_by(self, result: Result) -> bool:
        """Whether a complete, streamed answer met both; others never do, as they show neither."""
        if not result.ok or result.ttft is None or result.ttft > self.ttft:
            return False
        # An answer of one token has no gaps: its TTFT alone decides.
        return not result.itls or fmean(result.itls) <= self.itl


@dataclass(frozen=True, slots=True)
class PathFigures:
    """Statistics of the requests of one path; None where nothing was measured.

    Times are those of complete, streamed answers; ITL percentiles are over all their gaps.
    """

    requests: int
    failed: int
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    goodput: float | None = None
    """Requests per second that met the SLOs; None without SLOs."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile, linear between ranks. Raises ValueError for no values."""
    if not values or not 0 <= percent <= 100:
        raise ValueError("a percentile is of at least one value, from 0 to 100")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = ordered[floor(rank)], ordered[ceil(rank)]
    # Rounding could exceed the largest value by a bit.
    return min(high, low + (high - low) * (rank - floor(rank)))


def summarize(
    results: Iterable[Result], *, slos: Slos | None = None, seconds: float | None = None
) -> dict[str, PathFigures]:
    """Statistics by routing path, in alphabetical order.

    Goodput needs `slos` and the run's `seconds`. Raises ValueError for SLOs without a duration.
    """
    by_path: dict[str, list[Result]] = {}
    for result in results:
        by_path.setdefault(result.routing_path or UNROUTED, []).append(result)
    return {path: figures(by_path[path], slos=slos, seconds=seconds) for path in sorted(by_path)}


def figures(
    results: Sequence[Result], *, slos: Slos | None = None, seconds: float | None = None
) -> PathFigures:
    """Statistics of all `results` together; arguments and errors as in `summarize`."""
    if slos and not seconds:
        raise ValueError("goodput is per second: give the run's duration")
    # A failed request's times would make a server that fails fast look good.
    whole = [r for r in results if r.ok]
    ttfts = [r.ttft for r in whole if r.ttft is not None]
    itls = [itl for r in whole for itl in r.itls]
    return PathFigures(
        requests=len(results),
        failed=len(results) - len(whole),
        ttft_p50=_percentile(ttfts, 50),
        ttft_p99=_percentile(ttfts, 99),
        itl_p50=_percentile(itls, 50),
        itl_p99=_percentile(itls, 99),
        goodput=sum(map(slos.met_by, results)) / seconds if slos and seconds else None,
    )


def to_json(by_path: dict[str, PathFigures]) -> dict[str, dict[str, float | int | None]]:
    """Plain values for JSON: path → statistic → value."""
    return {path: asdict(value) for path, value in by_path.items()}


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None
