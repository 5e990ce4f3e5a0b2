"""How busy a pod is by what was placed on it lately."""

import pytest

from tandem_epp.estimates.pod_estimates import WINDOW_SECONDS, Utilization


def test_a_pod_without_placements_is_idle() -> None:
    assert Utilization(WINDOW_SECONDS).share == 0.0


def test_steady_placements_are_their_share_of_the_time() -> None:
    utilization, now = Utilization(WINDOW_SECONDS), 1000.0
    for _ in range(1000):
        now += 1.0
        utilization.add(0.25, now)
    assert utilization.share == pytest.approx(0.25, rel=0.02)


def test_more_than_a_pod_can_do_is_more_than_one() -> None:
    utilization = Utilization(WINDOW_SECONDS)
    for _ in range(100):
        utilization.add(3.0, 1000.0)
    assert utilization.share == pytest.approx(300.0 / WINDOW_SECONDS)


def test_a_quiet_pod_is_idle_again() -> None:
    utilization = Utilization(WINDOW_SECONDS)
    utilization.add(30.0, 1000.0)
    before = utilization.share
    utilization.fade(1000.0 + WINDOW_SECONDS)
    assert utilization.share == pytest.approx(before / 2.718, rel=1e-3)


def test_a_placement_that_a_replica_reports_late_counts_at_once() -> None:
    utilization = Utilization(WINDOW_SECONDS)
    utilization.add(1.0, 1000.0)
    utilization.add(1.0, 990.0)
    assert utilization.share == pytest.approx(2.0 / WINDOW_SECONDS)
