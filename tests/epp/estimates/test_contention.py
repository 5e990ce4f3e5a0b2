"""Replicas that choose at once prefer pods of their own, as far as that happens."""

import pytest

from tandem_epp.estimates.contention import CONCURRENT_SECONDS, Contention


def test_pods_of_others_cost_what_meeting_a_request_there_costs_as_often_as_that_happens() -> None:
    contention = Contention()
    contention.rank, contention.replicas = 1, 3
    assert [contention.seconds(turn, 2.0) for turn in range(6)] == [0.0] * 6
    for i in range(100):
        contention.place(float(i))
        contention.follow(i + CONCURRENT_SECONDS / 2)
        contention.follow(i + 0.9)
    assert contention.share == pytest.approx(1.0, abs=0.01)
    costs = [contention.seconds(turn, 2.0) for turn in range(6)]
    assert costs == pytest.approx([2.0, 0.0, 2.0, 2.0, 0.0, 2.0], abs=0.01)
    contention.rank, contention.replicas = 0, 1
    assert contention.seconds(1, 2.0) == 0.0, "alone"


def test_requests_that_come_one_by_one_do_not_contend() -> None:
    contention = Contention()
    contention.follow(0.0)
    for i in range(100):
        contention.place(float(i))
        contention.follow(i + 10 * CONCURRENT_SECONDS)
    assert contention.share == 0.0
