"""Start times: the rates and distributions that `start_times` promises."""

import random
from itertools import islice, pairwise
from math import exp, sqrt
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.workload.arrivals import start_times
from tandem_loadtest.workload.settings import Arrivals, WorkloadError

MANY = 20_000
OPEN = ("poisson", "constant", "gamma", "ramp")


def take(arrivals: Arrivals, count: int, seed: int = 1, duration: float = 60.0) -> list[float]:
    times = islice(start_times(arrivals, seed=seed, duration=duration), count)
    return [time for time in times if time is not None]


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise([0.0, *times])]


def variation(values: list[float]) -> float:
    return stdev(values) / fmean(values)


@given(
    st.sampled_from(OPEN), st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.floats(0.05, 50),
    st.integers(),
)  # fmt: skip
def test_times_are_in_order_and_follow_from_the_seed(
    process: str, rate: float, rate_end: float, shape: float, seed: int
) -> None:
    arrivals = Arrivals(process=process, rate=rate, rate_end=rate_end, burstiness=shape)
    times = take(arrivals, 50, seed)
    assert len(times) == 50
    assert times == sorted(times)
    assert times[0] >= 0
    assert times == take(arrivals, 50, seed)


@pytest.mark.parametrize("process", ["poisson", "gamma"])
def test_another_seed_gives_other_times(process: str) -> None:
    arrivals = Arrivals(process=process, rate=5)
    assert take(arrivals, 3, seed=1) != take(arrivals, 3, seed=2)


@pytest.mark.parametrize("rate", [0.5, 40.0, 3000.0])
@pytest.mark.parametrize("process", ["poisson", "constant", "gamma"])
def test_the_mean_rate_is_the_given_one(process: str, rate: float) -> None:
    times = take(Arrivals(process=process, rate=rate, burstiness=0.5), MANY)
    assert MANY / times[-1] == pytest.approx(rate, rel=0.04)


def test_constant_times_are_exact_multiples_from_zero() -> None:
    # No sum of gaps: rounding errors would add up over hours.
    assert take(Arrivals(process="constant", rate=3), 7) == [i / 3 for i in range(7)]


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0, 25.0])
def test_gamma_gaps_vary_by_one_over_the_root_of_the_shape(shape: float) -> None:
    times = take(Arrivals(process="gamma", rate=10, burstiness=shape), MANY)
    assert variation(gaps(times)) == pytest.approx(1 / sqrt(shape), rel=0.04)


@pytest.mark.parametrize("process", ["poisson", "gamma"])
def test_poisson_and_burstiness_one_have_exponential_gaps(process: str) -> None:
    sample = sorted(gaps(take(Arrivals(process=process, rate=2), MANY)))
    # Kolmogorov-Smirnov distance from 1 - exp(-2t); 1.63/√n is exceeded in 1 % of samples.
    distance = max(abs((i + 1) / len(sample) - (1 - exp(-2 * gap))) for i, gap in enumerate(sample))
    assert distance < 1.63 / sqrt(MANY)


@pytest.mark.parametrize(("rate", "rate_end"), [(10.0, 400.0), (400.0, 10.0), (50.0, 50.0)])
def test_a_ramp_has_the_cumulative_count_of_its_rate(rate: float, rate_end: float) -> None:
    duration = 100.0
    arrivals = Arrivals(process="ramp", rate=rate, rate_end=rate_end)
    times = take(arrivals, 4 * MANY, duration=duration)
    for t in (25.0, 50.0, 75.0, 100.0):
        expected = rate * t + (rate_end - rate) * t * t / (2 * duration)
        count = sum(time <= t for time in times)
        # Counts of a Poisson process have a standard deviation of the root of their mean.
        assert abs(count - expected) < 4 * sqrt(expected)
    after = sum(duration < time <= duration + 20 for time in times)
    assert abs(after - 20 * rate_end) < 4 * sqrt(20 * rate_end)


def test_a_closed_loop_has_no_times() -> None:
    times = start_times(Arrivals(process="closed", concurrency=2), seed=1)
    assert list(islice(times, 3)) == [None, None, None]


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        (Arrivals(process="poisson"), "`poisson` need a rate above 0, not None"),
        (Arrivals(process="constant", rate=0), "`constant` need a rate above 0, not 0"),
        (Arrivals(process="poisson", rate=-1), "above 0, not -1"),
        (Arrivals(process="poisson", rate=float("nan")), "above 0, not nan"),
        (Arrivals(process="poisson", rate=float("inf")), "above 0, not inf"),
        (Arrivals(process="gamma", rate=1, burstiness=0), "shape above 0, not 0"),
        (Arrivals(process="ramp", rate=1), "a rate at the end above 0, not None"),
        (Arrivals(process="ramp", rate=1, rate_end=0), "a rate at the end above 0, not 0"),
        (Arrivals(process="bursts", rate=1), "'bursts': write one of poisson, constant"),
        (Arrivals(process="trace"), "need a trace as the workload"),
    ],
)
def test_missing_or_invalid_settings_are_an_error(arrivals: Arrivals, message: str) -> None:
    # Before the first time is asked for: a run must not start.
    with pytest.raises(WorkloadError, match=message):
        start_times(arrivals, seed=1, duration=60)


def test_a_ramp_needs_a_duration() -> None:
    with pytest.raises(WorkloadError, match="need a duration above 0, not None"):
        start_times(Arrivals(process="ramp", rate=1, rate_end=2), seed=1)


def test_arrivals_and_other_random_values_of_a_seed_are_independent() -> None:
    expected = random.Random(1).expovariate(5)
    assert take(Arrivals(process="poisson", rate=5), 1, seed=1) != [expected]
