"""Pods without samples start from those of alike pods, and can learn from there."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_epp.estimates.kinds import fill_in
from tandem_epp.estimates.pod_estimates import PodEstimates
from tandem_planner.prefill_fit import PrefillCost, prefill_sample

TRUTH = PrefillCost(0.02, 2e-4, 2e-9)


def taught(lengths: list[int], cost: PrefillCost) -> PodEstimates:
    pod = PodEstimates()
    for number, length in enumerate(lengths):
        pod.prefill.add(prefill_sample([(length, 0)], cost.seconds(length)), float(number))
    return pod


@pytest.mark.parametrize(
    ("zeros", "error"), [((0,), 0.4), ((1,), 0.1), ((2,), 0.22), ((0, 2), 0.15)]
)
def test_a_coefficient_that_the_donor_does_not_see_can_be_learned(
    zeros: tuple[int, ...], error: float
) -> None:
    cost = PrefillCost._make(0.0 if i in zeros else c for i, c in enumerate(TRUTH))
    lengths = [100, 1000, 10_000, 50_000] * 20
    donor, pod = taught(lengths, cost), PodEstimates()
    fill_in([("kind", donor), ("kind", pod)])
    assert pod.prefill.cost.seconds(1000) == pytest.approx(cost.seconds(1000), rel=0.1)
    for number, length in enumerate(lengths):
        pod.prefill.add(prefill_sample([(length, 0)], TRUTH.seconds(length)), float(number))
    for length in lengths[:4]:
        assert pod.prefill.cost.seconds(length) == pytest.approx(TRUTH.seconds(length), rel=error)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(16, 60_000), min_size=1, max_size=20))
def test_every_prior_that_is_passed_on_is_positive(seed: int, lengths: list[int]) -> None:
    random, pod = Random(seed), PodEstimates()
    donors = [PodEstimates() for _ in range(3)]
    for donor in donors:
        for number, length in enumerate(lengths):
            seconds = TRUTH.seconds(length) * random.uniform(0.2, 5.0)
            donor.prefill.add(prefill_sample([(length, 0)], seconds), float(number))
            donor.decode.add(1 + length % 50, seconds, float(number))
            donor.transfer.add(1, length, seconds, float(number))
    fill_in([("kind", pod), *(("kind", donor) for donor in donors)])
    for cost in (pod.prefill.cost, pod.decode.cost, pod.transfer.cost):
        assert min(cost) > 0
