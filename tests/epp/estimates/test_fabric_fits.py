"""What a fabric class takes, and which class the transfers between two scrapes had."""

import pytest

from tandem_contract.fabric_classes import FabricClass
from tandem_epp.estimates.fabric_fits import FabricFits, PlacedTransfers
from tandem_epp.estimates.pod_estimates import PodEstimates
from tandem_planner.transfer import TRANSFERS_PRIOR, TransferFit

NODE, DOMAIN, ELSEWHERE = FabricClass


def rates(pod: PodEstimates) -> list[float]:
    """Bytes per second in each class."""
    return [1e9 / cost.seconds(1e9) for cost in pod.fabrics.costs]


def test_each_class_starts_from_a_rate_of_its_own() -> None:
    assert rates(PodEstimates()) == pytest.approx([12.6e9, 10e9, 5e9], rel=0.05)


def test_the_first_transfer_of_an_unknown_class_counts_for_all() -> None:
    pod = PodEstimates()
    pod.add_transfers((1.0, 1e9, 0.5), 1.0, None)
    near, *others = pod.fabrics.costs
    assert all(other is near for other in others)
    assert rates(pod) == pytest.approx([2e9] * 3, rel=0.1)


def test_each_class_has_a_fit_of_its_own() -> None:
    pod = PodEstimates()
    for fabric, rate in ((NODE, 4e10), (DOMAIN, 1.5e10), (ELSEWHERE, 1e9)):
        pod.add_transfers((1.0, 1e9, 1e9 / rate), 1.0, fabric)
    assert rates(pod) == pytest.approx([4e10, 1.5e10, 1e9], rel=0.1)
    assert pod.transfer.count == 3, "the fit of all transfers goes on learning"
    pod.restart()
    assert pod.fabrics.costs == TRANSFERS_PRIOR


def test_a_slow_network_does_not_make_nearer_pairs_slow() -> None:
    pod = PodEstimates()
    pod.add_transfers((1.0, 1e9, 20.0), 1.0, ELSEWHERE)
    assert pod.fabrics.costs[:2] == TRANSFERS_PRIOR[:2]
    pod.add_transfers((1.0, 1e9, 10.0), 2.0, NODE)
    assert rates(pod)[NODE] == pytest.approx(1e8, rel=0.1), "it is measured now"


def test_pairs_that_are_farther_than_all_measured_are_as_fast_until_measured() -> None:
    pod = PodEstimates()
    pod.add_transfers((1.0, 1e9, 1e9 / 4e10), 1.0, NODE)
    assert rates(pod) == pytest.approx([4e10] * 3, rel=0.1)


def test_a_forgotten_class_is_not_known() -> None:
    fits = FabricFits(TransferFit())
    fits.fit(NODE).add(1.0, 1e9, 5.0, 1.0)
    assert fits.is_known(NODE)
    fits.forget(NODE)
    assert not fits.is_known(NODE)
    assert fits.costs == TRANSFERS_PRIOR


def test_transfers_of_one_class_are_known_to_be() -> None:
    placed = PlacedTransfers()
    assert placed.take()[0] is None, "of other routers, if any"
    placed.begin(NODE)
    placed.begin(NODE)
    placed.end(NODE)
    assert placed.take()[0] is NODE
    assert placed.take()[0] is NODE, "one is under way"
    placed.end(NODE)
    assert placed.take()[0] is NODE, "it may have been counted since"
    assert placed.take()[0] is None


@pytest.mark.parametrize("other", [ELSEWHERE, None])
def test_of_several_classes_none_is_known(other: FabricClass | None) -> None:
    placed = PlacedTransfers()
    placed.begin(NODE)
    placed.begin(other)
    placed.end(other)
    assert placed.take()[0] is None
    assert placed.take()[0] is NODE
    placed.add(ELSEWHERE)
    assert placed.take()[0] is None
