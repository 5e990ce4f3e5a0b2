"""What first tokens take beyond the terms of the cost."""

from tandem_contract.paths import RoutingPath
from tandem_epp.estimates.overheads import FirstTokenOverheads

SPLIT, UNIFIED = RoutingPath.PREFILL_THEN_DECODE, RoutingPath.UNIFIED


def learned(*seconds: float) -> FirstTokenOverheads:
    overheads = FirstTokenOverheads()
    for each in seconds:
        overheads.learn(UNIFIED, each)
    return overheads


def test_the_median_of_a_path_is_learned_for_that_path() -> None:
    overheads = learned(0.01, 0.02, 0.03, 0.02, 9.0)
    assert overheads.seconds(UNIFIED) == 0.02
    assert overheads.seconds(SPLIT) == 0.0


def test_few_requests_say_nothing() -> None:
    assert learned(0.5, 0.5, 0.5).seconds(UNIFIED) == 0.0


def test_a_prediction_that_was_too_high_is_no_overhead() -> None:
    assert learned(*([-0.5] * 8)).seconds(UNIFIED) == 0.0


def test_old_requests_are_forgotten() -> None:
    assert learned(*([0.5] * 100), *([0.1] * 32)).seconds(UNIFIED) == 0.1
