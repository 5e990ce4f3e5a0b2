"""What first tokens take beyond the terms of the cost."""

import pytest

from tandem_contract.paths import RoutingPath
from tandem_contract.timing import UNKNOWN, Timing
from tandem_epp.estimates.overheads import FirstTokenOverheads, overhead_of
from tandem_planner.cost import HANDOFF_SECONDS

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


def test_the_engines_report_tells_the_overhead_whatever_was_predicted() -> None:
    report = Timing(queue=0.1, compute=0.3, transfer=0.05)
    unified = overhead_of(0.5, 9.0, Timing(queue=0.1, compute=0.3), is_split=False)
    assert unified == pytest.approx(0.1)
    split = overhead_of(0.5, 9.0, report, is_split=True)
    assert split == pytest.approx(0.05 - HANDOFF_SECONDS)


@pytest.mark.parametrize("report", [UNKNOWN, Timing(compute=0.3), Timing(leg=0.4)])
def test_without_a_report_it_is_the_difference_from_the_terms(report: Timing) -> None:
    assert overhead_of(0.5, 0.4, report, is_split=True) == pytest.approx(0.1)


def test_few_requests_say_nothing() -> None:
    assert learned(0.5, 0.5, 0.5).seconds(UNIFIED) == 0.0


def test_a_prediction_that_was_too_high_is_no_overhead() -> None:
    assert learned(*([-0.5] * 8)).seconds(UNIFIED) == 0.0


def test_old_requests_are_forgotten() -> None:
    assert learned(*([0.5] * 100), *([0.1] * 32)).seconds(UNIFIED) == 0.1
