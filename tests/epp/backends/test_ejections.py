"""Ejections of a fleet: their limit, probes, and what views contain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_epp.backends.ejections import MAX_SHARE, UPKEEP_SECONDS, is_alike
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.health import EJECT_IN_A_ROW, HealthState
from tandem_epp.backends.outcomes import Outcome
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.estimates.engine_figures import Gauges

NOW = 1000.0


def fleet_of(*pods: tuple[str, Role, tuple[str, ...]]) -> Fleet:
    fleet = Fleet()
    fleet.apply(
        DiscoveredBackend(Backend(name, f"http://10.0.0.{i}:8000", role, models=models))
        for i, (name, role, models) in enumerate(pods, 1)
    )
    return fleet


def decodes(count: int) -> Fleet:
    return fleet_of(*((f"d{i}", Role.DECODE, ("m",)) for i in range(count)))


def fail(fleet: Fleet, pod: Pod, now: float = NOW) -> None:
    for _ in range(EJECT_IN_A_ROW):
        fleet.ejections.record(pod, Outcome.ERROR, now, now)


@pytest.mark.parametrize(("count", "limit"), [(1, 0), (2, 1), (3, 1), (4, 2), (10, 5)])
def test_at_most_half_of_the_pods_are_ejected_and_never_the_only_one(
    count: int, limit: int
) -> None:
    fleet = decodes(count)
    for pod in fleet:
        fail(fleet, pod)
    assert sum(pod.health.is_ejected for pod in fleet) == limit
    assert len(fleet.ready_pods("m")) == count - limit


def test_the_limit_is_per_role_and_model() -> None:
    names = [("a", Role.DECODE, ("m",)), ("b", Role.DECODE, ("m",)), ("c", Role.DECODE, ("n",))]
    fleet = fleet_of(*names, ("p", Role.PREFILL, ("m",)), ("q", Role.PREFILL, ("m",)))
    for pod in fleet:
        fail(fleet, pod)
    assert [pod.name for pod in fleet if pod.health.is_ejected] == ["a", "p"]


def test_pods_that_are_not_ready_stand_in_for_no_other() -> None:
    fleet = decodes(2)
    first, second = fleet
    first.record_failed_check()
    fail(fleet, second)
    assert not second.health.is_ejected


def test_an_ejected_pod_leaves_the_views_at_once_and_returns_for_a_probe() -> None:
    fleet = decodes(2)
    bad, good = fleet
    assert fleet.ready_pods("m") == (bad, good)
    fail(fleet, bad)
    assert fleet.ready_pods("m") == (good,)
    fleet.ejections.advance(bad.health.until - 0.01)
    assert fleet.ready_pods("m") == (good,)
    now = bad.health.until
    fleet.ejections.advance(now)
    assert fleet.ready_pods("m") == (bad, good)
    fleet.ejections.place(bad, now)
    assert fleet.ready_pods("m") == (good,), "one request is the probe"
    fleet.ejections.record(bad, Outcome.ANSWERED, now + 1, now)
    assert fleet.ready_pods("m") == (bad, good)


def test_a_failed_probe_ejects_again_whatever_the_share() -> None:
    fleet = decodes(2)
    bad, _ = fleet
    fail(fleet, bad)
    now = bad.health.until
    fleet.ejections.advance(now)
    fleet.ejections.place(bad, now)
    fleet.ejections.record(bad, Outcome.ERROR, now, now)
    assert bad.health.ejections == 2
    assert bad not in fleet.ready_pods("m")


def test_when_only_ejected_pods_are_left_they_are_used() -> None:
    fleet = decodes(2)
    bad, good = fleet
    fail(fleet, bad)
    good.record_failed_check()
    fleet.invalidate_views()
    assert fleet.ready_pods("m") == (bad,)


def test_an_ejected_prefill_pod_stays_if_no_other_can_prefill() -> None:
    fleet = fleet_of(("d", Role.DECODE, ()), ("p", Role.PREFILL, ()), ("q", Role.PREFILL, ()))
    d, p, q = fleet
    fail(fleet, p)
    assert fleet.ready_pods(None) == (d, q)
    q.record_failed_check()
    fleet.invalidate_views()
    assert fleet.ready_pods(None) == (d, p)


def test_a_failure_and_its_fading_renew_the_scores_but_not_the_views() -> None:
    fleet = decodes(2)
    bad, good = fleet
    view = fleet.ready_pods("m")
    fleet.ejections.record(good, Outcome.ANSWERED, NOW, NOW)
    assert fleet.ready_pods("m") is view, "an answer of a healthy pod changes nothing"
    fleet.ejections.record(bad, Outcome.ERROR, NOW, NOW)
    renewed = fleet.ready_pods("m")
    assert renewed is not view
    rate = bad.health.failure_rate
    fleet.ejections.advance(NOW + UPKEEP_SECONDS)
    assert fleet.ready_pods("m") is not renewed
    assert bad.health.failure_rate < rate


def test_a_restarted_pod_serves_at_once() -> None:
    fleet = decodes(2)
    bad, _ = fleet
    bad.apply_scrape(ScrapeResult(Gauges(), b"one"))
    fail(fleet, bad)
    bad.apply_scrape(ScrapeResult(Gauges(), b"one"))
    assert not bad.health.is_available, "the same process stays ejected"
    bad.apply_scrape(ScrapeResult(Gauges(), b"two"))
    assert bad.health.is_available


def test_a_removed_pod_is_forgotten() -> None:
    fleet = decodes(2)
    bad, good = fleet
    fail(fleet, bad)
    fleet.apply([DiscoveredBackend(good.backend)])
    fleet.ejections.advance(NOW + 1e6)
    view = fleet.ready_pods("m")
    fleet.ejections.advance(NOW + 2e6)
    assert fleet.ready_pods("m") is view, "nothing is left to watch"


def test_a_pod_without_a_model_list_is_like_any_of_its_role() -> None:
    fleet = fleet_of(("a", Role.DECODE, ()), ("b", Role.DECODE, ("m",)), ("c", Role.PREFILL, ()))
    a, b, c = fleet
    assert is_alike(a, b)
    assert not is_alike(a, c)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(list(Outcome)), st.floats(0, 20))))
def test_some_pod_may_always_be_chosen(events: list[tuple[int, Outcome, float]]) -> None:
    fleet, now = decodes(6), NOW
    pods = list(fleet)
    for index, outcome, wait in events:
        placed, now = now, now + wait
        fleet.ejections.advance(now)
        fleet.ejections.place(pods[index], placed)
        fleet.ejections.record(pods[index], outcome, now, placed)
        assert fleet.ready_pods("m")
        assert sum(pod.health.is_ejected for pod in pods) <= MAX_SHARE * len(pods)


def test_the_log_says_whose_decision_an_ejection_is(caplog: pytest.LogCaptureFixture) -> None:
    fleet = decodes(2)
    a, _ = fleet
    fleet.ejections.adopt(a, NOW, NOW + 5)
    assert "ejected for 5 s: as another replica decided" in caplog.text
    assert "0%" not in caplog.text


def test_the_log_says_why_an_ejection_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fleet = decodes(4)
    answers, restarts, stays, _ = fleet
    for pod in (answers, restarts):
        fail(fleet, pod)
    restarts.apply_scrape(ScrapeResult(Gauges(), incarnation=b"1"), NOW)
    fleet.ejections.record(answers, Outcome.ANSWERED, NOW, NOW - 1)
    restarts.apply_scrape(ScrapeResult(Gauges(), incarnation=b"2"), NOW + 1)
    stays.apply_scrape(ScrapeResult(Gauges(), incarnation=b"1"), NOW)
    stays.apply_scrape(ScrapeResult(Gauges(), incarnation=b"2"), NOW + 1)
    due = answers.health.until
    fleet.ejections.advance(due)
    fleet.ejections.place(answers, due)
    fleet.ejections.record(answers, Outcome.ANSWERED, due + 1, due)
    returns = [text for text in caplog.messages if "serves again" in text]
    assert returns == [
        "backend d1 serves again: another process answers",
        "backend d0 serves again: it answered the probe",
    ]


def test_outcomes_of_other_pods_do_not_put_off_the_end_of_a_pause() -> None:
    fleet = decodes(2)
    busy, failing = fleet
    fleet.ejections.record(busy, Outcome.BUSY, NOW, NOW, 1.0)
    fleet.ejections.advance(NOW)
    for tenth in range(1, 20):
        now = NOW + tenth / 10
        # Between two decisions, and just before each.
        fleet.ejections.record(failing, Outcome.ERROR, now, now)
        fleet.ejections.advance(now)
    assert busy.health.state is HealthState.SERVING
