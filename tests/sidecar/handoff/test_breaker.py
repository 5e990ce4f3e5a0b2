"""When the circuit breaker of a prefill pod opens, probes and closes."""

import pytest

from tandem_contract.commandline import HostPort
from tandem_sidecar.handoff.breaker import MAX_WAIT, Breakers, BreakerState
from tandem_sidecar.settings import Breaker

POD, OTHER = HostPort("10.0.0.1", 8000), HostPort("10.0.0.2", 8000)


def opened(at: float = 0.0) -> Breakers:
    breakers = Breakers(Breaker(failures=3, cooldown=5.0))
    for _ in range(3):
        assert breakers.admit(POD, at) == 0
        breakers.record_failure(POD, at)
    return breakers


def condition(breakers: Breakers, now: float) -> BreakerState:
    return breakers.snapshot(now)[str(POD)].condition


def test_only_failures_in_a_row_open_the_circuit() -> None:
    breakers = Breakers(Breaker(failures=3, cooldown=5.0))
    for _ in range(4):
        breakers.record_failure(POD, 0)
        breakers.record_failure(POD, 0)
        breakers.record_success(POD, 0)
    assert breakers.admit(POD, 0) == 0
    assert condition(breakers, 0) is BreakerState.CLOSED


def test_an_open_circuit_refuses_requests_for_the_cooldown_to_that_pod_only() -> None:
    breakers = opened()
    assert breakers.admit(POD, 1.0) == 4.0
    assert condition(breakers, 1.0) is BreakerState.OPEN
    assert breakers.admit(OTHER, 1.0) == 0


def test_half_open_lets_exactly_one_probe_through() -> None:
    breakers = opened()
    assert condition(breakers, 5.0) is BreakerState.HALF_OPEN
    assert breakers.admit(POD, 5.0) == 0
    assert breakers.admit(POD, 5.0) > 0
    assert breakers.admit(POD, 9.0) > 0


def test_a_successful_probe_closes_the_circuit() -> None:
    breakers = opened()
    assert breakers.admit(POD, 5.0) == 0
    breakers.record_success(POD, 6.0)
    assert [breakers.admit(POD, 6.0) for _ in range(3)] == [0, 0, 0]
    assert condition(breakers, 6.0) is BreakerState.CLOSED


def test_a_failed_probe_opens_the_circuit_again_at_once() -> None:
    breakers = opened()
    assert breakers.admit(POD, 5.0) == 0
    breakers.record_failure(POD, 6.0)
    assert breakers.admit(POD, 6.0) == 5.0


def test_a_cancelled_probe_allows_the_next_one() -> None:
    breakers = opened()
    assert breakers.admit(POD, 5.0) == 0
    breakers.cancel(POD)
    assert breakers.admit(POD, 5.0) == 0


def test_a_hung_pod_opens_its_circuit_at_once() -> None:
    breakers = Breakers(Breaker(failures=3, cooldown=5.0))
    breakers.record_failure(POD, 0, hung=True)
    assert breakers.admit(POD, 0) == 5.0


@pytest.mark.parametrize(("retry_after", "wait"), [(0.0, 0.0), (7.0, 7.0), (3600.0, MAX_WAIT)])
def test_a_retry_after_is_honoured_and_is_not_a_failure(retry_after: float, wait: float) -> None:
    breakers = Breakers(Breaker(failures=1, cooldown=5.0))
    breakers.record_busy(POD, 100.0, retry_after)
    assert breakers.admit(POD, 100.0) == wait
    assert breakers.admit(POD, 100.0 + wait) == 0
    assert breakers.admit(POD, 100.0 + wait) == 0, "no probe: it did not fail"


def test_pods_that_are_not_used_for_long_are_evicted() -> None:
    breakers = Breakers(Breaker())
    for i in range(1000):
        breakers.record_failure(HostPort("10.0.0.9", i), float(i))
    assert 500 < len(breakers.snapshot(1000.0)) < 800
    assert breakers.snapshot(5000.0) == {}


def test_pods_that_never_failed_are_not_remembered() -> None:
    breakers = Breakers(Breaker())
    assert breakers.admit(POD, 0) == 0
    breakers.record_success(POD, 0)
    assert breakers.snapshot(0) == {}
