"""A client's fault is no pod's fault: failures that follow a request count at no pod."""

import pytest

from tandem_epp.backends.ejections import SHARED_RATE
from tandem_epp.backends.failed_requests import MAX_REQUESTS, MEMORY, FailedRequests
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.health import EJECT_IN_A_ROW
from tandem_epp.backends.pods import Pod
from tandem_epp.outcomes import Outcome

from .test_ejections import NOW, decodes

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


def test_memory_of_requests_is_bounded_in_number_and_time() -> None:
    requests: FailedRequests[str] = FailedRequests()
    for fingerprint in range(1, 3 * MAX_REQUESTS):
        assert requests.on_failure(fingerprint, "a", NOW) is None
    assert requests.on_failure(1, "b", NOW) is None, "forgotten: the oldest"
    newest = 3 * MAX_REQUESTS - 1
    assert requests.on_failure(newest, "b", NOW) == [("a", NOW)]
    assert requests.on_failure(newest, "a", NOW + MEMORY) == []
    assert requests.on_failure(newest, "a", NOW + 2 * MEMORY + 1) is None, "forgotten: by time"
