"""What a load generator should have reported, from what the server did."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .load_reports import Reported
from .load_server import Served

SLACK: Final = 0.1
"""Share of the true latency by which a reported latency may differ."""
LEAST_SLACK: Final = 0.005
"""Seconds by which it may differ in any case: the client reads a token later than the server has
written it."""
JUDGED: Final = ("ttft_p50", "ttft_p95", "itl_p50")
"""Latencies that a right report has right. Not the 99th percentile: on a shared machine, other work
delays the four slowest of 400 requests more than the tools differ."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The true result of a run. Times in seconds, of good answers only."""

    ok: int
    failed: int
    """Scheduled requests without a good answer."""
    ttft_p50: float
    """From the time for which the request was scheduled until the tool could read the token."""
    ttft_p95: float
    ttft_p99: float
    itl_p50: float


def truth(
    served: Sequence[Served], scheduled: int, rate: float, pause: tuple[float, float] = (0, 0)
) -> Truth:
    """The truth of `scheduled` requests at `rate` per second, equally spaced.

    `pause` is when the tool was stopped, by the clock of `served`: it could read what the server
    wrote meanwhile only at the end.
    `served` is in the order of arrival. A tool may probe the server first, so only the last
    `scheduled` requests count. Raises ValueError when no answer was good.
    """
    run = served[-scheduled:]
    # When the schedule began: the earliest time that agrees with an arrival. A request never
    # arrives before its time, but the first may be late.
    start = min(request.arrived - index / rate for index, request in enumerate(run))
    good = [(index, request) for index, request in enumerate(run) if request.ok]
    if not good:
        raise ValueError("the server gave no good answer")
    ttfts = [_readable(request.tokens[0], pause) - start - index / rate for index, request in good]
    gaps = [
        later - earlier
        for _, request in good
        for earlier, later in zip(request.tokens, request.tokens[1:], strict=False)
    ]
    return Truth(
        len(good),
        scheduled - len(good),
        statistics.median(ttfts),
        percentile(ttfts, 95),
        percentile(ttfts, 99),
        statistics.median(gaps),
    )


def _readable(written: float, pause: tuple[float, float]) -> float:
    start, end = pause
    return end if start <= written < end else written


def percentile(values: Sequence[float], share: int) -> float:
    """The `share`-th percentile (1 to 99), interpolated between two values."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]


def mistakes(reported: Reported, true: Truth) -> list[str]:
    """The names of the values that are wrong; empty: the report is right."""
    wrong = [name for name in ("ok", "failed") if getattr(reported, name) != getattr(true, name)]
    for name in JUDGED:
        value, right = getattr(reported, name), getattr(true, name)
        if value is None or abs(value - right) > max(LEAST_SLACK, SLACK * right):
            wrong.append(name)
    return wrong
