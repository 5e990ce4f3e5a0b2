"""Distributions of the report and the rule for invalid ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.figures.distributions import (
    Delay,
    invalid_reason,
    of_histogram,
    of_values,
    percentile,
)
from tandem_loadtest.figures.histogram import RELATIVE_ERROR, Histogram

VALUES = st.lists(st.floats(0, 1e4), min_size=1, max_size=100)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([1.0, 2.0, 3.0, 4.0], 0, 1.0),
        ([1.0, 2.0, 3.0, 4.0], 100, 4.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.5),
        ([0.0, 10.0], 99, 9.9),
    ],
)
def test_a_percentile_is_linear_between_ranks(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


@given(VALUES.map(sorted), st.floats(0, 100), st.floats(0, 100))
def test_a_percentile_lies_within_its_values_and_rises(
    values: list[float], percent: float, other_percent: float
) -> None:
    low, high = sorted((percentile(values, percent), percentile(values, other_percent)))
    assert values[0] <= low
    assert high <= values[-1]
    assert percentile(values, min(percent, other_percent)) == low


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_a_percentile_of_nothing_or_out_of_range_is_an_error(
    values: list[float], percent: float
) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_kept_values_have_exact_percentiles() -> None:
    distribution = of_values([0.4, 0.1, 0.3, 0.2])
    assert distribution is not None
    assert (distribution.count, distribution.minimum, distribution.maximum) == (4, 0.1, 0.4)
    assert distribution.mean == pytest.approx(0.25)
    assert distribution.percentiles["50"] == pytest.approx(0.25)
    assert {"1", "99", "99.9"} <= distribution.percentiles.keys()
    assert distribution.relative_error == 0
    assert sum(count for _, count in distribution.buckets) == 4
    assert distribution.buckets == sorted(distribution.buckets)
    assert distribution.invalid is None


def test_a_histogram_states_its_error() -> None:
    histogram = Histogram()
    histogram.add_all([0.1, 0.2])
    distribution = of_histogram(histogram)
    assert distribution is not None
    assert distribution.relative_error == RELATIVE_ERROR
    assert distribution.percentiles["99"] == pytest.approx(0.2, rel=RELATIVE_ERROR)


def test_there_is_no_distribution_without_values() -> None:
    assert of_values([]) is None
    assert of_histogram(Histogram()) is None


@pytest.mark.parametrize(
    ("p50", "lateness", "read_lag", "from_intended", "culprit"),
    [
        (0.010, 0.001, 0.001, True, None),
        (0.010, 0.0011, 0.0, True, "send lateness"),
        (0.010, 0.0011, 0.0, False, None),
        (0.010, 0.0, 0.0011, False, "read lag"),
        (1.0, 0.05, 0.05, True, None),
        (1.0, 0.051, 0.0, True, "send lateness"),
        (1.0, 0.0, 0.051, True, "read lag"),
    ],
)
def test_a_figure_is_invalid_beyond_the_larger_of_1_ms_and_5_percent(
    p50: float, lateness: float, read_lag: float, from_intended: bool, culprit: str | None
) -> None:
    reason = invalid_reason(p50, Delay(lateness, read_lag), from_intended=from_intended)
    if culprit is None:
        assert reason is None
    else:
        assert reason is not None
        assert culprit in reason


def test_the_reason_has_the_numbers() -> None:
    distribution = of_values([0.1], Delay(lateness=0.0123), from_intended=True)
    assert distribution is not None
    assert distribution.invalid == (
        "the load generator's send lateness p99 of 12.3 ms exceeds 5 ms, "
        "the larger of 1 ms and 5 % of this p50"
    )
