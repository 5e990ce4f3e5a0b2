"""Samples that one replica gives to another."""

from tandem_contract.fabric_classes import FabricClass
from tandem_epp.estimates.pod_estimates import PodEstimates
from tandem_epp.estimates.shared_samples import (
    LEAST_SAMPLES,
    MOST_SAMPLES,
    SNAPSHOT_SAMPLES,
    add_samples,
    most_samples,
    samples_of,
)
from tandem_planner.prefill_fit import prefill_sample


def measured(seconds_per_token: float, samples: int = 20) -> PodEstimates:
    estimates = PodEstimates()
    for i in range(samples):
        tokens = 500.0 + 100 * i
        prefill = prefill_sample([(tokens, 0.0)], tokens * seconds_per_token)
        estimates.prefill.add(prefill, now=float(i))
        estimates.decode.add(1.0 + i, 0.02 + 0.001 * i, now=float(i))
        sample = (1.0, 1e9 + 1e8 * i, 0.3 + 0.03 * i)
        estimates.add_transfers(sample, float(i), FabricClass.SAME_DOMAIN)
    return estimates


def test_another_replica_gets_the_same_fits() -> None:
    here, there = measured(2e-4), PodEstimates()
    add_samples(there, samples_of(here), now=50.0)
    assert there.prefill.cost == here.prefill.cost
    assert there.decode.cost == here.decode.cost
    assert there.transfer.cost == here.transfer.cost
    assert there.fabrics.costs == here.fabrics.costs
    assert [there.fabrics.fit(fabric).count for fabric in FabricClass] == [0, 20, 0]
    assert there.prefill.updated_at == 19.0, "no younger than where it was measured"
    late = PodEstimates()
    add_samples(late, samples_of(here), now=5.0)
    assert late.prefill.updated_at == 5.0, "the other clock is ahead"


def test_samples_of_another_replica_outlive_the_first_own_one() -> None:
    there = PodEstimates()
    add_samples(there, samples_of(measured(2e-4)), now=50.0)
    taken = there.prefill.count
    there.prefill.add(prefill_sample([(500.0, 0.0)], 0.1), now=51.0)
    assert there.prefill.count == taken + 1


def test_a_fit_that_has_samples_keeps_them() -> None:
    there = measured(1e-4)
    before = there.prefill.cost
    add_samples(there, samples_of(measured(9e-4)), now=50.0)
    assert there.prefill.cost == before


def test_samples_are_bounded_and_odd_ones_ignored() -> None:
    samples = samples_of(measured(2e-4, samples=100))
    assert {len(rows) for rows in samples.values()} == {MOST_SAMPLES}
    assert samples_of(PodEstimates()) == {}
    there = PodEstimates()
    odd = {"prefill": [[1.0], [1.0, 2.0, 3.0, -1.0, 0.0], [1.0] * 6], "later": [[1.0, 2.0]]}
    add_samples(there, odd, now=1.0)
    assert there.prefill.count == 0


def test_the_pods_of_a_large_fleet_give_fewer_samples() -> None:
    most = {pods: most_samples(pods) for pods in (0, 1, 512, 1000, 1_000_000)}
    assert list(most.values()) == [MOST_SAMPLES, MOST_SAMPLES, MOST_SAMPLES, 16, LEAST_SAMPLES]
    assert 1000 * most[1000] <= SNAPSHOT_SAMPLES
    here = measured(2e-4, samples=40)
    few = samples_of(here, 16)
    assert {len(rows) for rows in few.values()} == {16}
    assert few["prefill"][-1] == samples_of(here)["prefill"][-1], "the latest ones"
