"""Gaps by time."""

import random
from collections import Counter

import pytest

from tandem_loadtest.figures.gaps import Gaps
from tandem_loadtest.figures.histogram import Histogram, buckets_of
from tandem_loadtest.figures.timeline import interval_for

Answer = tuple[float, tuple[float, ...]]


def answers(seconds: float, *, seed: int, count: int = 60) -> list[Answer]:
    """First tokens and gaps within `seconds`; the last answer ends close to it."""
    random_ = random.Random(seed)
    created = []
    for index in range(count):
        first = 0.7 * seconds * (index + random_.random()) / count
        gaps = [random_.expovariate(1) for _ in range(random_.randint(1, 40))]
        scale = 0.25 * seconds / sum(gaps)
        created.append((first, tuple(gap * scale for gap in gaps)))
    return created


def gaps_of(records: list[Answer]) -> Gaps:
    gaps = Gaps()
    for first, values in records:
        gaps.add(first, values)
    return gaps


def by_interval(records: list[Answer], interval: float, count: int) -> list[Counter[int]]:
    """What `Gaps.by_interval` says, from all gaps."""
    expected: list[Counter[int]] = [Counter() for _ in range(count)]
    for first, values in records:
        for i, bucket in enumerate(buckets_of(values)):
            expected[int((first + sum(values[: i + 1])) / interval)][bucket] += 1
    return expected


@pytest.mark.parametrize("seconds", [3.0, 23.0, 25.0, 61.0, 119.0, 130.0, 250.0, 1300.0, 9000.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_gaps_are_counted_in_the_interval_in_which_they_end(seconds: float, seed: int) -> None:
    records = answers(seconds, seed=seed)
    interval = interval_for(seconds)
    expected = by_interval(records, interval, 121)
    assert gaps_of(records).by_interval(interval, 121) == expected


@pytest.mark.parametrize("seconds", [(3.0, 3.0), (20.0, 100.0), (1000.0, 30.0)])
def test_merged_gaps_equal_those_of_all(seconds: tuple[float, float]) -> None:
    a, b = (answers(s, seed=seed) for seed, s in enumerate(seconds))
    merged, whole = gaps_of(a), gaps_of(a + b)
    merged.merge(gaps_of(b))
    interval = interval_for(max(seconds))
    assert merged.by_interval(interval, 121) == whole.by_interval(interval, 121)
    assert merged.histogram().counts == whole.histogram().counts


def test_the_histogram_has_all_gaps() -> None:
    records = answers(50.0, seed=1)
    expected = Histogram()
    expected.add_all(gap for _, gaps in records for gap in gaps)
    histogram = gaps_of(records).histogram()
    assert histogram.counts == expected.counts
    assert (histogram.count, histogram.minimum, histogram.maximum) == (
        expected.count, expected.minimum, expected.maximum,
    )  # fmt: skip
    assert histogram.total == pytest.approx(expected.total)


def test_many_gaps_of_the_same_time_are_counted() -> None:
    gaps = Gaps()
    for _ in range(2500):
        gaps.add(0.0, (0.001,) * 90)
    assert gaps.by_interval(0.1, 1)[0].total() == gaps.histogram().count == 225_000


def test_gaps_after_the_last_interval_are_in_the_last() -> None:
    assert gaps_of([(0.55, (0.1, 0.2))]).by_interval(0.1, 2)[1].total() == 2
