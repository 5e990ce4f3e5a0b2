"""Confidence intervals of differences: known values, and how often they cover the truth."""

import random
from math import inf

import pytest

from tandem_loadtest.figures.compare import (
    Interval,
    difference,
    mean_interval,
    percentile_interval,
    rate_interval,
    share_interval,
    welch,
    within_run,
)
from tandem_loadtest.figures.distributions import of_values

from .samples import sample_repeat


def test_welchs_interval_of_equal_variances_is_the_classic_one() -> None:
    # Two groups of three with variance 1: √(2/3) × t with 4 degrees of freedom.
    interval = welch([1.0, 2.0, 3.0], [11.0, 12.0, 13.0])
    assert interval.low == pytest.approx(10 - 2.776445 * (2 / 3) ** 0.5, abs=1e-4)
    assert interval.high == pytest.approx(10 + 2.776445 * (2 / 3) ** 0.5, abs=1e-4)


def test_welchs_interval_without_variance_is_the_difference() -> None:
    assert welch([1.0, 1.0], [3.0, 3.0]) == Interval(2, 2)


def test_distances_to_the_bounds_add_up_as_squares() -> None:
    interval = difference(10, Interval(6, 13), 20, Interval(16, 24))
    assert interval == Interval(10 - 5, pytest.approx(10 + 32**0.5))
    assert difference(1, Interval(0, inf), 2, Interval(1, 3)).low == -inf


@pytest.mark.parametrize(("percent", "truth"), [(50, 0.6931), (90, 2.3026), (99, 4.6052)])
def test_a_percentile_lies_in_its_interval_in_95_of_100_cases(percent: float, truth: float) -> None:
    random_ = random.Random(5)
    covered = 0
    for _ in range(300):
        sample = of_values([random_.expovariate(1) for _ in range(500)])
        assert sample is not None
        interval = percentile_interval(sample, percent, sample.count)
        covered += interval.low <= truth <= interval.high
    assert covered / 300 >= 0.93


def test_few_values_do_not_bound_a_high_percentile() -> None:
    sample = of_values([0.1 * i for i in range(1, 101)])
    assert sample is not None
    interval = percentile_interval(sample, 99, 100)
    assert interval.high == inf
    assert interval.low == pytest.approx(9.7, rel=0.005)
    assert percentile_interval(sample, 1, 100).low == 0


def test_fewer_independent_values_give_a_wider_interval() -> None:
    random_ = random.Random(1)
    sample = of_values([random_.random() for _ in range(2000)])
    assert sample is not None
    narrow = percentile_interval(sample, 50, 2000)
    wide = percentile_interval(sample, 50, 50)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_a_mean_has_its_standard_error() -> None:
    sample = of_values([1.0, 3.0] * 50)
    assert sample is not None
    interval = mean_interval(sample, 100)
    # Deviation 1, 100 values.
    assert interval.low == pytest.approx(2 - 1.96 / 99**0.5, abs=0.002)
    assert interval.high == pytest.approx(2 + 1.96 / 99**0.5, abs=0.002)
    assert mean_interval(sample, 1) == Interval(-inf, inf)


def test_a_share_has_wilsons_interval() -> None:
    # Newcombe (1998), table I: 81 of 263.
    interval = share_interval(81, 263)
    assert interval.low == pytest.approx(0.2553, abs=1e-4)
    assert interval.high == pytest.approx(0.3662, abs=1e-4)
    assert share_interval(0, 100).high == pytest.approx(0.0370, abs=1e-4)


def test_a_rate_has_the_interval_of_a_poisson_process() -> None:
    # 100 requests in 10 s: 100 ± 19.6.
    interval = rate_interval(10, 10)
    assert interval.low == pytest.approx(8.04, abs=1e-3)
    assert interval.high == pytest.approx(11.96, abs=1e-3)


def test_a_run_shows_the_noise_of_latencies_shares_and_request_rates() -> None:
    repeat = sample_repeat(count=300)
    for name in ("ttft_p50", "ttft_mean", "itl_p90", "lost_share", "attainment", "goodput"):
        interval = within_run(name, repeat, None)
        assert interval is not None
        assert interval.low < interval.high
    whole = within_run("requests_per_second", repeat, 4)
    per_gpu = within_run("requests_per_second_per_gpu", repeat, 4)
    assert whole is not None
    assert per_gpu == Interval(whole.low / 4, whole.high / 4)


@pytest.mark.parametrize("name", ["output_tokens_per_second", "cache_hit_share"])
def test_a_run_does_not_show_the_noise_of_tokens(name: str) -> None:
    assert within_run(name, sample_repeat(count=50), None) is None


def test_the_gaps_of_a_request_are_not_independent() -> None:
    repeat = sample_repeat(count=300)
    assert repeat.all.itl is not None
    as_if_independent = percentile_interval(repeat.all.itl, 50, repeat.all.itl.count)
    interval = within_run("itl_p50", repeat, None)
    assert interval is not None
    assert interval.high - interval.low > as_if_independent.high - as_if_independent.low
