"""What other replicas may have placed unseen."""

import pytest

from tandem_contract.config import Backend
from tandem_epp.backends.fleet_figures import FleetFigures
from tandem_epp.backends.pods import Pod
from tandem_epp.backends.replica_order import ReplicaOrder
from tandem_epp.scheduling.unseen import WINDOW, UnseenPlacements, with_unseen
from tandem_planner.cost import PodFigures
from tandem_planner.figure_table import FigureTable

ROWS = (0, 1, 2, 3, 4, 5)


def fleet_figures() -> FleetFigures:
    figures = FleetFigures()
    figures.set_pods(Pod(Backend(name=f"pod-{i}", url="http://10.0.0.1:8000")) for i in ROWS)
    figures.at(0.0)
    return figures


def test_decisions_of_a_burst_are_counted_until_the_others_know_of_them() -> None:
    unseen = UnseenPlacements()
    assert [unseen.count_decision(10.0 + i * 1e-4) for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert unseen.count_decision(20.0) < 1.0


def test_the_first_of_a_burst_expects_what_earlier_bursts_had() -> None:
    unseen = UnseenPlacements()
    for burst in range(100):
        for i in range(10):
            unseen.count_decision(burst * 3.0 + i * WINDOW / 20)
    assert unseen.count_decision(1000.0) == pytest.approx(4.5, abs=0.5)


def test_pods_of_other_replicas_cost_more_in_a_burst() -> None:
    before = FigureTable([PodFigures(stall=0.5, queued=1.0)] * 6)
    figures = fleet_figures()
    after = with_unseen(before, figures, ROWS, ROWS, ReplicaOrder(1, 3), 4.0).pods
    mean = figures.pods[0].estimates.mean_prefill
    # Each of the others placed 4 requests on 2 pods.
    other = PodFigures(stall=0.5 + 2.0, queued=1.0 + 2.0 * mean)
    assert after == [other, before.pods[1], other, other, before.pods[4], other]
    assert before.pods == [PodFigures(stall=0.5, queued=1.0)] * 6


def test_every_pod_belongs_to_one_replica() -> None:
    before, figures = FigureTable([PodFigures()] * 6), fleet_figures()
    orders = [ReplicaOrder(rank, 4) for rank in range(4)]
    results = [with_unseen(before, figures, ROWS, ROWS, order, 4.0).pods for order in orders]
    assert [sum(result[i] == before.pods[i] for result in results) for i in range(6)] == [1] * 6


def test_nothing_changes_while_requests_are_far_apart() -> None:
    before = FigureTable([PodFigures()] * 6)
    assert with_unseen(before, fleet_figures(), ROWS, ROWS, ReplicaOrder(0, 3), 0.001) is before
