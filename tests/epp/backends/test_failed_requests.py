"""A client's fault is no pod's fault: failures that follow a request count at no pod."""

import sys

import pytest

from tandem_contract.paths import Role
from tandem_epp.backends.ejections import SHARED_RATE
from tandem_epp.backends.failed_requests import MAX_REQUESTS, MEMORY, FailedRequests, RequestPart
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.health import EJECT_IN_A_ROW, MIN_VOLUME, Health
from tandem_epp.backends.outcomes import Outcome
from tandem_epp.backends.pods import Pod

from .test_ejections import NOW, decodes, fleet_of

BAD = 7
"""Fingerprint of a request that every engine fails on."""
REQUESTS_FAULTS = pytest.mark.parametrize(
    "outcome", [outcome for outcome in Outcome if outcome.may_be_requests]
)


def fail(
    fleet: Fleet, pod: Pod, *fingerprints: int, outcome: Outcome = Outcome.ERROR, now: float = NOW
) -> None:
    for fingerprint in fingerprints:
        fleet.ejections.record(pod, outcome, now, now, fingerprint=fingerprint)


def answer(fleet: Fleet, pod: Pod, fingerprint: int, now: float) -> None:
    fleet.ejections.record(pod, Outcome.ANSWERED, now, now, fingerprint=fingerprint)


@REQUESTS_FAULTS
def test_one_request_ejects_no_pod_however_often_it_is_sent(outcome: Outcome) -> None:
    fleet = decodes(2)
    pod, _ = fleet
    fail(fleet, pod, *[BAD] * 14, outcome=outcome)
    assert not pod.health.is_ejected
    assert pod.health.outcomes[outcome] == 14
    assert pod.health.failure_rate > 0.5, "the next choice avoids the pod"


@REQUESTS_FAULTS
def test_a_request_that_fails_on_a_second_pod_counts_at_neither(outcome: Outcome) -> None:
    fleet = decodes(2)
    first, second = fleet
    fail(fleet, first, *[BAD] * 5, outcome=outcome)
    fail(fleet, second, BAD, outcome=outcome, now=NOW + 3)
    assert first.health.failure_rate == second.health.failure_rate == 0
    for pod in (first, second, first, second):
        fail(fleet, pod, *[BAD] * 14, outcome=outcome, now=NOW + 4)
        assert pod.health.failure_rate == 0
        assert not pod.health.is_ejected
    assert first.health.outcomes[outcome] == 33, "the metric shows every failure"


def test_failures_of_several_requests_eject_as_before() -> None:
    fleet = decodes(2)
    pod, _ = fleet
    fail(fleet, pod, *range(1, EJECT_IN_A_ROW))
    assert not pod.health.is_ejected
    fail(fleet, pod, EJECT_IN_A_ROW)
    assert pod.health.is_ejected


def test_a_request_that_another_pod_answers_shows_that_the_pod_fails() -> None:
    fleet = decodes(3)
    failing, good, other = fleet
    fail(fleet, failing, BAD, BAD)
    fleet.ejections.record(good, Outcome.ANSWERED, NOW, NOW, fingerprint=BAD)
    fail(fleet, other, BAD)
    assert failing.health.failure_rate > 0
    assert other.health.failure_rate > 0
    fail(fleet, failing, 8)
    assert failing.health.is_ejected


@pytest.mark.parametrize("outcome", [Outcome.RESET, Outcome.UNREACHABLE, Outcome.BROKEN])
def test_a_pod_that_ends_connections_is_ejected_whatever_the_requests_are(outcome: Outcome) -> None:
    fleet = decodes(2)
    pod, other = fleet
    fail(fleet, other, BAD, outcome=outcome)
    fail(fleet, pod, *[BAD] * EJECT_IN_A_ROW, outcome=outcome)
    assert pod.health.is_ejected


def test_an_ejection_ends_when_all_its_requests_fail_elsewhere_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    fleet = decodes(2)
    first, second = fleet
    fail(fleet, first, 1, 2, 3)
    assert first.health.is_ejected
    assert fleet.ready_pods("m") == (second,)
    fail(fleet, second, 1, 2)
    assert first.health.is_ejected, "one failure still counts"
    fail(fleet, second, 3)
    assert fleet.ready_pods("m") == (first, second)
    assert "d0 serves again: the requests that failed there fail elsewhere too" in caplog.text


def test_failures_that_all_pods_have_eject_none() -> None:
    """A client whose requests all differ and all fail, beside one whose requests are answered."""
    fleet = decodes(3)
    for number in range(60):
        for pod in fleet:
            fail(fleet, pod, 1000 + 3 * number + list(fleet).index(pod), now=NOW + number)
            fleet.ejections.record(pod, Outcome.ANSWERED, NOW + number, NOW + number)
    assert not any(pod.health.is_ejected for pod in fleet)
    assert all(pod.health.failure_rate > SHARED_RATE for pod in fleet)
    healthy, failing, _ = fleet
    for number in range(60, 200):
        fleet.ejections.record(healthy, Outcome.ANSWERED, NOW + number, NOW + number)
    fail(fleet, failing, 8, 9, 10, now=NOW + 200)
    assert failing.health.is_ejected, "another pod answers its requests"


def test_a_joining_replica_learns_whether_failures_are_of_one_request() -> None:
    told, joining = decodes(2), decodes(2)
    for fingerprints, is_ejected in (((BAD, BAD), False), ((8, 9), True)):
        source, target = next(iter(told)), next(iter(joining))
        fail(told, source, *fingerprints)
        counts = source.health.counts(NOW)
        assert counts is not None
        joining.ejections.take_over(target, counts, NOW)
        fail(joining, target, BAD)
        assert target.health.is_ejected is is_ejected


def test_pods_that_fail_requests_which_a_third_answers_are_ejected() -> None:
    """Each request fails at one, its retry at another; the next retry is answered."""
    fleet = decodes(4)
    first, second, good, _ = fleet
    for fingerprint in range(1, EJECT_IN_A_ROW + 2):
        now = NOW + fingerprint
        for pod in (first, second) if fingerprint % 2 else (second, first):
            fail(fleet, pod, fingerprint, now=now)
        for _ in range(2):
            answer(fleet, good, fingerprint, now)
    assert first.health.is_ejected
    assert second.health.is_ejected
    assert good.health.failure_rate == 0


def test_an_answer_counts_each_failure_once_and_makes_its_pod_decay_again() -> None:
    fleet = decodes(3)
    first, second, good = fleet
    fail(fleet, first, BAD, BAD)
    fail(fleet, second, BAD)
    assert first.health.failure_rate == second.health.failure_rate == 0
    answer(fleet, good, BAD, NOW)
    answer(fleet, good, BAD, NOW)
    assert first.health.failure_rate == pytest.approx(2 / MIN_VOLUME)
    assert second.health.failure_rate == pytest.approx(1 / MIN_VOLUME)
    fleet.ejections.advance(NOW + 1000)
    assert first.health.failure_rate == second.health.failure_rate == 0


def test_an_answer_tells_nothing_of_a_process_that_came_after_the_failure() -> None:
    fleet = decodes(3)
    first, second, good = fleet
    fail(fleet, first, BAD)
    fail(fleet, second, BAD)
    first.health.on_new_process(NOW + 1)
    answer(fleet, good, BAD, NOW + 2)
    assert first.health.failure_rate == 0
    assert second.health.failure_rate > 0
    fail(fleet, first, *[8] * EJECT_IN_A_ROW, now=NOW + 2)
    assert not first.health.is_ejected, "it failed one request"


def test_the_two_parts_of_a_request_are_not_compared() -> None:
    fleet = fleet_of(*(("p", Role.PREFILL, ()), ("d", Role.DECODE, ()), ("e", Role.DECODE, ())))
    prefill, decode, other = fleet

    def end(pod: Pod, handoff: Outcome) -> None:
        fleet.ejections.record(pod, Outcome.ERROR, NOW, NOW, fingerprint=BAD)
        fleet.ejections.record(prefill, handoff, NOW, NOW, fingerprint=BAD, is_prefill=True)

    end(decode, Outcome.HANDOFF)
    assert decode.health.failure_rate > 0
    assert prefill.health.failure_rate > 0
    end(decode, Outcome.ANSWERED)
    end(other, Outcome.ANSWERED)
    assert decode.health.failure_rate == other.health.failure_rate == 0


def test_failures_that_are_forgotten_are_not_withdrawn() -> None:
    fleet = decodes(3)
    first, second, _ = fleet
    fail(fleet, first, 1)
    first.health.on_new_process(NOW + 1)
    fail(fleet, first, 2, 3, now=NOW + 2)
    rate = first.health.failure_rate
    fail(fleet, second, 1, now=NOW + 2)
    assert first.health.failure_rate == rate
    fail(fleet, first, 4, now=NOW + 2)
    assert first.health.is_ejected, "three in a row"


def test_failures_before_an_answer_are_not_withdrawn_from_those_in_a_row() -> None:
    health = Health()
    for outcome, fingerprint, at in (
        (Outcome.ERROR, 1, NOW),
        (Outcome.ANSWERED, 0, NOW + 1),
        (Outcome.ERROR, 2, NOW + 2),
        (Outcome.ERROR, 3, NOW + 2),
    ):
        health.record(outcome, at, at, fingerprint=fingerprint)
    health.withdraw([NOW], NOW + 2)
    health.record(Outcome.ERROR, NOW + 2, NOW + 2, fingerprint=4)
    assert health.should_eject


def test_memory_of_requests_is_bounded_in_number_and_time() -> None:
    requests: FailedRequests[str] = FailedRequests()
    for fingerprint in range(1, 3 * MAX_REQUESTS):
        assert requests.on_failure(RequestPart(fingerprint), "a", NOW) is None
    assert requests.on_failure(RequestPart(1), "b", NOW) is None, "forgotten: the oldest"
    newest = 3 * MAX_REQUESTS - 1
    assert requests.on_failure(RequestPart(newest), "b", NOW) == [("a", NOW)]
    assert requests.on_failure(RequestPart(newest), "a", NOW + MEMORY) == []
    assert requests.on_failure(RequestPart(newest), "a", NOW + 2 * MEMORY + 1) is None, (
        "forgotten: by time"
    )


def test_a_request_that_is_remembered_makes_room_of_those_that_expired() -> None:
    """Their pods may have left the fleet."""
    requests: FailedRequests[Health] = FailedRequests()
    gone = Health()
    # Compiled objects take no weak reference.
    alone = sys.getrefcount(gone)
    requests.on_failure(RequestPart(1), gone, NOW)
    requests.on_failure(RequestPart(2), gone, NOW)
    requests.on_failure(RequestPart(2), Health(), NOW)
    requests.on_failure(RequestPart(3), Health(), NOW + MEMORY)
    assert sys.getrefcount(gone) > alone
    requests.on_failure(RequestPart(3), Health(), NOW + MEMORY + 1)
    assert sys.getrefcount(gone) == alone
