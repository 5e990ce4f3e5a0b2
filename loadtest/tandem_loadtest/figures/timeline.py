"""Divides a run into intervals of a round length, about 60 to 120 of them."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from ..records import Outcome
from .distributions import percentile
from .gaps import Gaps
from .histogram import percentile_of
from .model import Timeline

MOST_INTERVALS: Final = 120


def interval_for(seconds: float) -> float:
    """The shortest of 0.1, 0.2, 0.5, 1, 2, 5, … seconds that needs at most 120 intervals."""
    tenths = 1
    while seconds > MOST_INTERVALS * tenths / 10:
        # 1, 2, 5, 10, …: the step from 2 to 5 is the only one that does not double.
        tenths = tenths * 5 // 2 if str(tenths).startswith("2") else tenths * 2
    return tenths / 10


@dataclass(frozen=True, slots=True)
class Moments:
    """Times of a run, in seconds after its start, from which its timeline is made."""

    end: float
    """Times after it are left out: requests that a stopped run did not send."""
    intended: Sequence[float]
    sent: Sequence[float]
    ended: Sequence[float]
    """Of requests that were sent; fewer than `sent` if some did not end."""
    ttft_intended: Sequence[float]
    """Intended time of each of `ttft`."""
    ttft: Sequence[float]
    losses: Mapping[Outcome, Sequence[float]]
    paths: Mapping[str, Sequence[float]]
    backends: Mapping[str, Sequence[float]]


def timeline(moments: Moments, gaps: Gaps) -> Timeline:
    """The timeline of a run."""
    interval = interval_for(moments.end)
    count = max(1, ceil(moments.end / interval))

    def numbers(times: Iterable[float]) -> list[int]:
        counts = [0] * count
        for time in times:
            if time <= moments.end:
                counts[_position(time, interval, count)] += 1
        return counts

    ttfts: list[array[float]] = [array("d") for _ in range(count)]
    for time, seconds in zip(moments.ttft_intended, moments.ttft, strict=True):
        ttfts[_position(time, interval, count)].append(seconds)
    ordered = [sorted(values) for values in ttfts]
    buckets = gaps.by_interval(interval, count)
    return Timeline(
        interval=interval,
        scheduled=numbers(moments.intended),
        in_flight=_in_flight(moments.sent, moments.ended, interval, count),
        ttft_p50=[percentile(values, 50) if values else None for values in ordered],
        ttft_p99=[percentile(values, 99) if values else None for values in ordered],
        itl_p50=[percentile_of(counts, 50, 0, inf) if counts else None for counts in buckets],
        itl_p99=[percentile_of(counts, 99, 0, inf) if counts else None for counts in buckets],
        losses={str(key): numbers(times) for key, times in moments.losses.items()},
        paths={key: numbers(times) for key, times in moments.paths.items()},
        backends={key: numbers(times) for key, times in moments.backends.items()},
    )


def _position(time: float, interval: float, count: int) -> int:
    return min(count - 1, int(time / interval))


def _in_flight(
    sent: Sequence[float], ended: Sequence[float], interval: float, count: int
) -> list[int]:
    """Most requests in flight at the same time, by interval."""
    most = [0] * count
    level = position = 0
    # At the same time, an end counts before a start: the two requests did not overlap.
    for time, change in sorted([*((t, 1) for t in sent), *((t, -1) for t in ended)]):
        reached = _position(time, interval, count)
        for passed in range(position + 1, reached + 1):
            most[passed] = level
        position = reached
        level += change
        most[position] = max(most[position], level)
    for passed in range(position + 1, count):
        most[passed] = level
    return most
