"""Histograms: error of percentiles, merging, buckets."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.figures.histogram import (
    RELATIVE_ERROR,
    Histogram,
    buckets_of,
    percentile_of,
    value_of,
)

SECONDS = st.one_of(st.just(0.0), st.floats(1e-9, 1e5))
VALUES = st.lists(SECONDS, min_size=1, max_size=200)


def histogram(values: list[float]) -> Histogram:
    created = Histogram()
    created.add_all(values)
    return created


@given(VALUES, st.floats(0, 100))
def test_a_percentile_is_off_by_its_relative_error_at_most(
    values: list[float], percent: float
) -> None:
    exact = sorted(values)[max(1, ceil(len(values) * percent / 100)) - 1]
    measured = histogram(values).percentile(percent)
    assert abs(measured - exact) <= RELATIVE_ERROR * exact


@given(SECONDS)
def test_a_bucket_stands_for_its_values(value: float) -> None:
    (bucket,) = buckets_of([value])
    assert abs(value_of(bucket) - value) <= RELATIVE_ERROR * value


@given(SECONDS, SECONDS)
def test_buckets_rise_with_their_values(a: float, b: float) -> None:
    low, high = buckets_of(sorted((a, b)))
    assert low <= high
    assert value_of(low) <= value_of(high)


@given(VALUES, VALUES)
def test_merged_histograms_equal_that_of_all_values(a: list[float], b: list[float]) -> None:
    merged, whole = histogram(a), histogram(a + b)
    merged.merge(histogram(b))
    assert merged.counts == whole.counts
    assert (merged.count, merged.minimum, merged.maximum) == (
        whole.count, whole.minimum, whole.maximum,
    )  # fmt: skip
    assert merged.total == pytest.approx(sum(a) + sum(b))


def test_any_iterable_of_values_can_be_added() -> None:
    assert histogram([0.5, 0.25]).counts == histogram(list(iter((0.25, 0.5)))).counts
    lazy = Histogram()
    lazy.add_all(value / 4 for value in (1, 2))
    lazy.add_all(())
    assert lazy.counts == histogram([0.25, 0.5]).counts


@pytest.mark.parametrize(("counts", "percent"), [({}, 50), ({1: 1}, -1), ({1: 1}, 100.5)])
def test_a_percentile_of_nothing_or_out_of_range_is_an_error(
    counts: dict[int, int], percent: float
) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile_of(counts, percent, 0, 1)
