"""What first tokens take beyond the terms of the cost."""

import pytest

from tandem_contract.paths import RoutingPath
from tandem_contract.timing import UNKNOWN, Timing
from tandem_epp.estimates.overheads import FirstTokenOverheads, beyond_terms
from tandem_planner.cost import HANDOFF_SECONDS

SPLIT, UNIFIED = RoutingPath.PREFILL_THEN_DECODE, RoutingPath.UNIFIED
CACHED = RoutingPath.FAST_DECODE
NOW = 1e9


def learned(**paths: list[float]) -> FirstTokenOverheads:
    overheads = FirstTokenOverheads()
    for path, seconds in paths.items():
        for each in seconds:
            overheads.learn(RoutingPath(path), each, NOW)
    return overheads


def test_the_median_of_a_path_is_learned_for_that_path() -> None:
    overheads = learned(unified=[0.01, 0.02, 0.03, 0.02, 9.0])
    assert overheads.seconds(UNIFIED) == 0.02
    assert overheads.seconds(SPLIT) == HANDOFF_SECONDS
    assert overheads.seconds(CACHED) == 0.0


def test_the_engines_report_tells_what_is_beyond_whatever_was_predicted() -> None:
    unified = beyond_terms(0.5, 9.0, 0.0, Timing(queue=0.1, compute=0.3))
    assert unified == pytest.approx(0.1)
    split = beyond_terms(0.5, 9.0, 0.02, Timing(queue=0.1, compute=0.3, transfer=0.05))
    assert split == pytest.approx(0.03)
    # Of the transfer of a streamed hand-off a tenth is waited for, if the sidecar does not say.
    streamed = Timing(queue=0.1, compute=0.3, transfer=0.05, streamed=1)
    assert beyond_terms(0.5, 9.0, 0.02, streamed) == pytest.approx(0.075)
    measured = Timing(queue=0.1, compute=0.3, transfer=0.05, streamed=1, waited=0.03)
    assert beyond_terms(0.5, 9.0, 0.02, measured) == pytest.approx(0.05)
    # Beyond the transfer, it waited for something else.
    longer = Timing(queue=0.1, compute=0.3, transfer=0.05, streamed=1, waited=0.5)
    assert beyond_terms(0.5, 9.0, 0.02, longer) == pytest.approx(0.03)


@pytest.mark.parametrize("report", [UNKNOWN, Timing(compute=0.3), Timing(leg=0.4)])
def test_without_a_report_it_is_the_difference_from_the_terms(report: Timing) -> None:
    assert beyond_terms(0.5, 0.4, 0.02, report) == pytest.approx(0.1)


def test_few_requests_say_nothing() -> None:
    assert learned(unified=[0.5, 0.5, 0.5]).seconds(UNIFIED) == 0.0


def test_a_prediction_that_was_too_high_is_no_overhead() -> None:
    assert learned(unified=[-0.5] * 8).seconds(UNIFIED) == 0.0


def test_old_requests_are_forgotten() -> None:
    assert learned(unified=[0.5] * 100 + [0.1] * 32).seconds(UNIFIED) == 0.1


@pytest.mark.parametrize(("path", "seconds"), [("later path", 0.5), ("unified", float("nan"))])
def test_what_a_newer_or_broken_replica_tells_is_ignored(path: str, seconds: float) -> None:
    overheads = FirstTokenOverheads()
    for _ in range(4):
        overheads.learn(path, seconds, NOW)
    assert list(overheads.latest) == []
    assert overheads.seconds(UNIFIED) == 0.0


def test_what_another_replica_learned_replaces_nothing() -> None:
    overheads = learned(unified=[0.5] * 4)
    overheads.take_over("unified", [0.1] * 8, NOW)
    overheads.take_over("fast_decode", [0.1] * 8, NOW)
    assert (overheads.seconds(UNIFIED), overheads.seconds(CACHED)) == (0.5, 0.1)


@pytest.mark.parametrize("alone", ["unified", "fast_decode"])
def test_a_hand_off_takes_what_splits_take_more_than_one_engine(alone: str) -> None:
    overheads = learned(prefill_then_decode=[0.05] * 4, **{alone: [0.02] * 4})
    assert overheads.handoff(NOW) == pytest.approx(0.03)
    assert overheads.seconds(SPLIT) == 0.05


@pytest.mark.parametrize(
    "paths", [{}, {"prefill_then_decode": [0.05] * 4}, {"unified": [0.05] * 4}]
)
def test_a_hand_off_is_assumed_until_both_are_measured(paths: dict[str, list[float]]) -> None:
    assert learned(**paths).handoff(NOW) == HANDOFF_SECONDS


def test_no_hand_off_is_so_long_that_splits_are_never_tried_again() -> None:
    slow = learned(prefill_then_decode=[9.0] * 8, unified=[0.0] * 8)
    assert slow.handoff(NOW) == pytest.approx(0.1)
    assert slow.handoff(NOW + 3600) == HANDOFF_SECONDS
    quick = learned(prefill_then_decode=[0.001] * 8, unified=[0.02] * 8)
    assert quick.handoff(NOW) == 0.0
    assert learned(prefill_then_decode=[0.001] * 8).handoff(NOW) == 0.001
