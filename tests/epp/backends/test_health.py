"""The failure rate of a pod, and how it passes through its states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_epp.backends.health import (
    BASE_EJECTION,
    BASE_PAUSE,
    EJECT_IN_A_ROW,
    HALF_LIFE,
    MAX_EJECTION,
    MAX_PAUSE,
    MIN_VOLUME,
    PROBE_SECONDS,
    Health,
    HealthState,
)
from tandem_epp.backends.outcomes import Outcome

NOW = 1000.0


def after(*outcomes: Outcome, now: float = NOW) -> Health:
    health = Health()
    for outcome in outcomes:
        health.record(outcome, now, now)
    return health


def ejected() -> Health:
    health = after(*[Outcome.ERROR] * EJECT_IN_A_ROW)
    assert health.should_eject
    health.eject(NOW)
    return health


def probing(health: Health) -> float:
    """Wait for the end of the ejection and place a probe; returns when."""
    now = health.until
    assert health.advance(now)
    assert health.place(now)
    return now


def test_the_rate_is_the_share_of_failures_of_at_least_the_minimum_volume() -> None:
    assert after(Outcome.ERROR).failure_rate == pytest.approx(1 / MIN_VOLUME)
    many = [Outcome.ERROR] * 10 + [Outcome.ANSWERED] * 30
    assert after(*many).failure_rate == pytest.approx(0.25)
    assert after(Outcome.BUSY, Outcome.UNKNOWN).failure_rate == 0


def test_the_rate_fades_without_requests() -> None:
    health = after(Outcome.ERROR, Outcome.ERROR)
    health.advance(NOW + HALF_LIFE)
    assert health.failure_rate == pytest.approx(1 / MIN_VOLUME)
    health.advance(NOW + 20 * HALF_LIFE)
    assert health.failure_rate == 0
    assert not health.needs_upkeep


@given(
    st.lists(st.tuples(st.sampled_from(list(Outcome)), st.floats(0, 100)), min_size=1, max_size=60)
)
def test_the_rate_stays_between_0_and_1_and_the_state_stays_consistent(
    events: list[tuple[Outcome, float]],
) -> None:
    health, now = Health(), NOW
    for outcome, wait in events:
        placed, now = now, now + wait
        health.advance(now)
        health.place(now)
        health.record(outcome, now, placed)
        if health.should_eject:
            health.eject(now)
        assert 0 <= health.failure_rate <= 1
        assert health.is_available == (not health.is_ejected or health.probe_due(now)) or (
            health.state in (HealthState.SUSPECT, HealthState.PAUSED)
            or (health.state is HealthState.EJECTED and health.until <= now)
        )
        assert health.until <= now + max(MAX_EJECTION, MAX_PAUSE, PROBE_SECONDS)


def test_failures_in_a_row_eject_a_pod_with_many_answers_behind_it() -> None:
    health = after(*[Outcome.ANSWERED] * 1000)
    for n in range(1, EJECT_IN_A_ROW + 1):
        health.record(Outcome.ERROR, NOW, NOW)
        assert health.should_eject == (n == EJECT_IN_A_ROW)


def test_half_failures_eject_a_pod_and_a_few_do_not() -> None:
    half = after(*[Outcome.ERROR, Outcome.ANSWERED] * 3)
    half.record(Outcome.ERROR, NOW, NOW)
    assert half.should_eject
    few = after(*[Outcome.ANSWERED, Outcome.ANSWERED, Outcome.ERROR] * 20)
    assert not few.should_eject
    assert not after(Outcome.ERROR).should_eject


def test_an_ejected_pod_is_due_for_one_probe_after_its_time() -> None:
    health = ejected()
    assert (health.is_available, health.until) == (False, NOW + BASE_EJECTION)
    assert not health.advance(health.until - 0.1)
    assert not health.place(health.until - 0.1)
    assert health.advance(health.until)
    assert health.is_available
    assert health.failure_rate == 0, "nothing keeps the cost from choosing it"
    assert health.place(health.until)
    assert not health.is_available, "one probe at a time"
    assert not health.place(health.until)


def test_a_probe_that_succeeds_ends_the_ejection() -> None:
    health = ejected()
    now = probing(health)
    assert health.record(Outcome.ANSWERED, now + 1, now)
    assert (health.state, health.failure_rate) == (HealthState.SERVING, 0)


def test_each_failed_probe_doubles_the_time_up_to_the_longest() -> None:
    health, seconds = ejected(), []
    for _ in range(9):
        now = probing(health)
        health.record(Outcome.ERROR, now, now)
        assert health.should_eject
        health.eject(now)
        seconds.append(health.until - now)
    expected = [min(MAX_EJECTION, BASE_EJECTION * 2**n) for n in range(1, 10)]
    assert seconds == pytest.approx(expected)


def test_the_time_starts_again_after_the_pod_served_for_long() -> None:
    for served, ejection in ((MAX_EJECTION - 1, 2 * BASE_EJECTION), (1e4, BASE_EJECTION)):
        health = ejected()
        now = probing(health)
        health.record(Outcome.ANSWERED, now, now)
        health.eject(now + served)
        assert health.until - (now + served) == pytest.approx(ejection)


def test_outcomes_of_requests_from_before_the_ejection_do_not_judge_the_probe() -> None:
    health = ejected()
    now = probing(health)
    for outcome in (Outcome.ANSWERED, Outcome.ERROR, Outcome.UNKNOWN, Outcome.BUSY):
        assert not health.record(outcome, now, NOW - 1)
        assert (health.state, health.should_eject) == (HealthState.PROBING, False)


@pytest.mark.parametrize("outcome", [Outcome.UNKNOWN, Outcome.BUSY])
def test_a_probe_without_a_verdict_is_repeated(outcome: Outcome) -> None:
    health = ejected()
    now = probing(health)
    assert health.record(outcome, now, now)
    assert not health.should_eject
    assert health.place(now)


def test_a_probe_without_an_outcome_is_repeated_after_a_while() -> None:
    health = ejected()
    now = probing(health)
    assert not health.advance(now + PROBE_SECONDS - 1)
    assert health.advance(now + PROBE_SECONDS)
    assert health.place(now + PROBE_SECONDS)


def test_an_ejected_pod_that_had_to_be_chosen_and_answered_serves_again() -> None:
    health = ejected()
    assert health.record(Outcome.ANSWERED, NOW + 1, NOW + 1)
    assert health.state is HealthState.SERVING


@pytest.mark.parametrize("outcome", [Outcome.UNREACHABLE, Outcome.RESET])
def test_a_pod_that_accepts_no_connection_is_suspect_until_a_scrape(outcome: Outcome) -> None:
    health = after(outcome)
    assert health.state is HealthState.SUSPECT
    assert not health.advance(NOW + 1e6)
    health.on_scrape()
    assert health.is_available
    assert after(Outcome.ERROR).is_available, "one error response is no reason"


def test_a_busy_pod_pauses_for_longer_each_time_or_as_long_as_it_says() -> None:
    health, pauses, now = Health(), [], NOW
    for _ in range(7):
        health.record(Outcome.BUSY, now, now)
        pauses.append(health.until - now)
        assert not health.is_available
        now = health.until
        assert health.advance(now)
        assert health.is_available
    assert pauses == pytest.approx([min(MAX_PAUSE, BASE_PAUSE * 2**n) for n in range(7)])
    health.record(Outcome.BUSY, now, now, retry_after=7)
    assert health.until - now == pytest.approx(7)
    health.record(Outcome.BUSY, now, now, retry_after=1)
    assert health.until - now == pytest.approx(7), "a later, shorter wish does not shorten it"
    endless = Health()
    endless.record(Outcome.BUSY, NOW, NOW, retry_after=1e9)
    assert endless.until == NOW + MAX_PAUSE


def test_another_process_starts_without_a_past() -> None:
    health = ejected()
    health.on_new_process(NOW)
    assert (health.state, health.failure_rate) == (HealthState.SERVING, 0)
    health.eject(NOW + 10)
    assert health.until - (NOW + 10) == pytest.approx(2 * BASE_EJECTION), "it failed before"


def test_a_busy_pod_that_then_accepts_nothing_waits_for_a_scrape() -> None:
    """As a pod does that drains and exits."""
    health = after(Outcome.BUSY)
    assert health.state is HealthState.PAUSED
    assert health.record(Outcome.UNREACHABLE, NOW + 0.1, NOW)
    assert not health.advance(NOW + MAX_PAUSE + 1)
    assert not health.is_available
    assert health.on_scrape()
    assert health.is_available
