from collections.abc import Callable

import pytest

from tandem_loadtest.figures.collector import Collector
from tandem_loadtest.figures.histogram import Histogram
from tandem_loadtest.figures.model import Repeat, SearchStep, Slo
from tandem_loadtest.run.options import Search
from tandem_loadtest.run.search import (
    highest_rate,
    lowest_rate,
    next_rate,
    search_warnings,
    step_of,
)

from ..figures.records import answer

SEARCH = Search(attainment=0.9, precision=0.05, most_steps=20)


def step(rate: float, attainment: float, invalid: str | None = None) -> SearchStep:
    return SearchStep(
        rate=rate, scheduled=rate, achieved=rate, attainment=attainment, invalid=invalid
    )


def run(
    attainment: Callable[[float], float], *, first: float, search: Search = SEARCH
) -> list[SearchStep]:
    """All steps of a search on a server with this share of requests within the SLO by rate."""
    steps: list[SearchStep] = []
    while (rate := next_rate(steps, first=first, search=search)) is not None:
        steps.append(step(rate, attainment(rate)))
    return steps


@pytest.mark.parametrize("capacity", [0.7, 3.0, 17.3, 64.0, 400.0])
@pytest.mark.parametrize("first", [0.5, 10.0, 300.0])
def test_the_search_finds_the_capacity_within_its_precision(capacity: float, first: float) -> None:
    steps = run(lambda rate: 1.0 if rate <= capacity else 0.5, first=first)
    answer = highest_rate(steps, SEARCH)
    assert answer is not None
    assert answer <= capacity <= answer * 1.05
    assert search_warnings(steps, SEARCH) == []


def test_the_search_does_not_go_below_a_rate_that_a_step_can_judge() -> None:
    steps: list[SearchStep] = []
    lowest = lowest_rate(4.0)
    while (rate := next_rate(steps, first=10.0, search=SEARCH, lowest=lowest)) is not None:
        steps.append(step(rate, 0.0))
    assert [step.rate for step in steps] == [10.0, 5.0, 2.5]
    (warning,) = search_warnings(steps, SEARCH)
    assert "use a longer --duration" in warning


def test_the_share_of_good_requests_decides() -> None:
    steps = run(lambda rate: 1 - rate / 100, first=1.0)
    assert highest_rate(steps, SEARCH) == pytest.approx(10.0, rel=0.05)


def test_rates_double_until_the_first_failure_then_the_range_is_halved() -> None:
    steps = run(lambda rate: 1.0 if rate < 5 else 0.0, first=1.0)
    assert [step.rate for step in steps[:5]] == pytest.approx([1, 2, 4, 8, 32**0.5])


def test_a_rate_that_passes_above_a_failed_one_does_not_count() -> None:
    steps = [step(rate, share) for rate, share in ((4, 1.0), (8, 0.5), (16, 1.0))]
    assert highest_rate(steps, SEARCH) == 4


def test_the_search_ends_after_the_most_steps() -> None:
    search = Search(attainment=0.9, most_steps=4)
    assert len(run(lambda _: 1.0, first=1.0, search=search)) == 4
    never = run(lambda _: 0.0, first=1.0, search=search)
    assert [step.rate for step in never] == [1.0, 0.5, 0.25, 0.125]
    assert highest_rate(never, search) is None


def test_an_invalid_step_ends_the_search_upwards_with_a_warning() -> None:
    steps: list[SearchStep] = []
    while (rate := next_rate(steps, first=1.0, search=SEARCH)) is not None:
        # The server is fast enough for every rate, the load generator for those up to 20.
        steps.append(step(rate, 1.0, "read lag" if rate > 20 else None))
    assert next(s.rate for s in steps if s.invalid) == 32
    assert max(s.rate for s in steps) == 32
    answer = highest_rate(steps, SEARCH)
    assert answer is not None
    assert answer <= 20 <= answer * 1.05
    (warning,) = search_warnings(steps, SEARCH)
    assert warning.startswith("the load generator was the limit of the search, not the server: at ")
    assert warning.endswith("sessions/s, read lag")


@pytest.mark.parametrize(
    ("shares", "warning"),
    [
        ((1.0, 1.0, 1.0), "ended at 4 sessions/s without finding a rate that fails"),
        ((0.0, 0.0, 0.0), "ended at 0.25 sessions/s without finding a rate that meets the SLO"),
        ((1.0, 0.0, 1.0), "highest rate is between 1.414 and 2 sessions/s"),
    ],
)
def test_a_search_that_does_not_find_both_ends_warns(
    shares: tuple[float, ...], warning: str
) -> None:
    search = Search(attainment=0.9, most_steps=3)
    steps: list[SearchStep] = []
    while (rate := next_rate(steps, first=1.0, search=search)) is not None:
        steps.append(step(rate, shares[len(steps)]))
    (found,) = search_warnings(steps, search)
    assert warning in found


def repeat(*, late: float = 0.0, lag: float = 0.0, slo: Slo) -> Repeat:
    """20 answers in 8 s, all within the limits."""
    collector, histogram = Collector(slo), Histogram()
    for index in range(20):
        collector.add(answer(index, intended=0.1 * index, late=late))
    histogram.add_all([lag])
    return collector.repeat(started="", seconds=8.0, read_lag=histogram, cpu_share=[])


def test_a_step_has_what_was_scheduled_and_what_was_achieved() -> None:
    slo = Slo(ttft=1.0)
    made = step_of(5.0, repeat(slo=slo), duration=4.0, sessions=20, due=20)
    assert made == SearchStep(rate=5.0, scheduled=5.0, achieved=2.5, attainment=1.0)


@pytest.mark.parametrize(
    ("slo", "late", "lag", "reason"),
    [
        # 5 % of the limit are 100 ms.
        (Slo(ttft=2), 0.2, 0.0, "send lateness"),
        (Slo(e2e=2), 0.2, 0.0, "send lateness"),
        (Slo(ttft=9), 0.2, 0.0, None),
        # ITL does not count from the intended time.
        (Slo(itl=2), 0.2, 0.0, None),
        (Slo(itl=0.1), 0.0, 0.01, "read lag"),
        (Slo(ttft=2), 0.0, 0.01, None),
    ],
)
def test_a_step_is_invalid_if_the_generator_was_too_late_for_its_slo(
    slo: Slo, late: float, lag: float, reason: str | None
) -> None:
    measured = repeat(late=late, lag=lag, slo=slo)
    invalid = step_of(5.0, measured, duration=4.0, sessions=20, due=20).invalid
    if reason is None:
        assert invalid is None
    else:
        assert invalid is not None
        assert reason in invalid
        assert invalid.endswith("use --processes")


def test_a_step_is_invalid_if_its_file_ended_before_the_duration() -> None:
    slo = Slo(ttft=1.0)
    made = step_of(9.0, repeat(slo=slo), duration=4.0, sessions=20, due=36)
    assert made.invalid is not None
    assert "20 sessions, 36 were due within 4 s" in made.invalid
