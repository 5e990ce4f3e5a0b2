"""When backends are scraped, and how figures fade."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_epp.backends.pace import (
    BUSY_INTERVAL,
    HALF_LIFE,
    MAX_RATE,
    MAX_RETRY_INTERVAL,
    RETRY_INTERVAL,
    Allowance,
    fade,
    next_interval,
    select_due,
)
from tandem_epp.estimates.engine_figures import Gauges

LONGEST = 2.0


@dataclass
class FakeTarget:
    due_at: float


def test_an_idle_backend_is_scraped_less_and_less_often() -> None:
    intervals = [BUSY_INTERVAL]
    while intervals[-1] < LONGEST:
        intervals.append(next_interval(intervals[-1], LONGEST, is_busy=False))
    assert intervals == sorted(set(intervals)), "it grows at each scrape"
    assert next_interval(LONGEST, LONGEST, is_busy=False) == LONGEST
    assert next_interval(LONGEST, LONGEST, is_busy=True) == BUSY_INTERVAL


def test_a_failing_backend_is_tried_again_soon_and_then_less_often() -> None:
    assert next_interval(LONGEST, LONGEST, is_busy=True, failures=1) == RETRY_INTERVAL
    second = next_interval(RETRY_INTERVAL, LONGEST, is_busy=True, failures=2)
    assert RETRY_INTERVAL < second < MAX_RETRY_INTERVAL
    assert (
        next_interval(MAX_RETRY_INTERVAL, LONGEST, is_busy=True, failures=9) == MAX_RETRY_INTERVAL
    )


def test_no_interval_is_longer_than_that_of_health_checks() -> None:
    longest = 0.2
    for failures in (0, 1, 2, 9):
        assert next_interval(longest, longest, is_busy=False, failures=failures) == longest


def test_the_longest_overdue_are_scraped_first() -> None:
    late, later, early = FakeTarget(2.0), FakeTarget(1.0), FakeTarget(3.0)
    assert select_due([late, early, later], now=2.5, limit=5) == [later, late]
    assert select_due([late, early, later], now=2.5, limit=1) == [later]


def test_the_rate_of_all_scrapes_is_bounded() -> None:
    allowance, started = Allowance(burst=0.1), 0
    for step in range(1001):
        count = allowance.available(now=step * 0.01)
        allowance.spend(count)
        started += count
    assert started == pytest.approx(10 * MAX_RATE, rel=0.02)
    assert allowance.available(now=100.0) == int(0.1 * MAX_RATE), "rest saves up one burst only"


def test_fresh_figures_are_believed_with_what_was_placed_since() -> None:
    scraped = Gauges(running=4, waiting=2, kv_usage=0.6)
    assert fade(scraped, own_at_scrape=3, own=3, staleness=0.0) == scraped
    grown = fade(scraped, own_at_scrape=3, own=5, staleness=0.0)
    assert grown == Gauges(running=4, waiting=4, kv_usage=0.6 * 8 / 6)


def test_stale_figures_approach_what_this_router_knows_by_itself() -> None:
    scraped = Gauges(running=6, waiting=2, kv_usage=0.8, deferred=2)
    half = fade(scraped, own_at_scrape=2, own=2, staleness=HALF_LIFE)
    assert half.running + half.waiting == pytest.approx(5)
    old = fade(scraped, own_at_scrape=2, own=2, staleness=20 * HALF_LIFE)
    assert old.running + old.waiting == pytest.approx(2, abs=1e-4)
    assert old.deferred == pytest.approx(0, abs=1e-4)
    assert fade(Gauges(), 0, 3, staleness=20 * HALF_LIFE).running == pytest.approx(3, abs=1e-4)


@given(
    st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50),
    st.floats(0, 10),
)  # fmt: skip
def test_figures_fade_without_a_jump(
    running: int, waiting: int, own_at_scrape: int, own: int, staleness: float
) -> None:
    scraped = Gauges(running, waiting, kv_usage=0.5)
    before, after = (
        fade(scraped, own_at_scrape, own, seconds) for seconds in (staleness, staleness + 0.01)
    )
    largest = 0.01 * (running + waiting + own + own_at_scrape)
    assert abs(after.running - before.running) <= largest
    assert abs(after.waiting - before.waiting) <= largest
    assert min(after.running, after.waiting, after.kv_usage) >= 0
    assert after.kv_usage <= 1
