"""Pods without samples start from those of alike pods, and can learn from there."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract.fabric_classes import FabricClass
from tandem_epp.estimates.kinds import STALE_SECONDS, fill_in
from tandem_epp.estimates.pod_estimates import PodEstimates
from tandem_planner.cost import OWN_STEP
from tandem_planner.prefill_fit import PrefillCost, prefill_sample
from tandem_planner.transfer import TRANSFERS_PRIOR

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
            fabric = random.choice(list(FabricClass))
            donor.add_transfers((1, length, seconds), float(number), fabric)
    fill_in([("kind", pod), *(("kind", donor) for donor in donors)])
    for cost in (pod.prefill.cost, pod.decode.cost, pod.transfer.cost, *pod.fabrics.costs):
        assert min(cost) > 0


NODE, DOMAIN, ELSEWHERE = FabricClass


def received(**classes: tuple[float, float]) -> PodEstimates:
    """Per class, bytes per second and the time of ten transfers of 1 GB."""
    pod = PodEstimates()
    for name, (rate, at) in classes.items():
        for _ in range(10):
            pod.add_transfers((1.0, 1e9, 1e9 / rate), at, FabricClass[name])
    return pod


def rates(pod: PodEstimates) -> list[float]:
    return [1e9 / cost.seconds(1e9) for cost in pod.fabrics.costs]


def test_a_fabric_class_is_taken_over_from_alike_pods() -> None:
    donor, pod = received(SAME_NODE=(4e10, 1.0), ELSEWHERE=(1e9, 1.0)), PodEstimates()
    fill_in([("kind", donor), ("kind", pod)])
    assert rates(pod)[NODE] == pytest.approx(4e10, rel=0.1)
    assert rates(pod)[ELSEWHERE] == pytest.approx(1e9, rel=0.1)
    assert [pod.fabrics.fit(fabric).count for fabric in FabricClass] == [0, 0, 0]
    other = PodEstimates()
    fill_in([("kind", donor), ("other kind", other)])
    assert other.fabrics.costs == TRANSFERS_PRIOR


def test_an_own_measurement_of_a_class_counts_more_than_alike_pods() -> None:
    donor, pod = received(SAME_NODE=(4e10, 1.0)), received(SAME_NODE=(2e9, 1.0))
    fill_in([("kind", donor), ("kind", pod)])
    assert rates(pod)[NODE] == pytest.approx(2e9, rel=0.1)


def test_a_class_that_is_not_chosen_any_more_is_tried_again() -> None:
    late = 1.0 + STALE_SECONDS + 1
    pods = [received(SAME_NODE=(4e10, late), ELSEWHERE=(1e7, 1.0)) for _ in range(2)]
    pods.append(received(ELSEWHERE=(1e7, 1.0)))
    alike = [("kind", pod) for pod in pods]
    fill_in(alike)
    assert all(rates(pod)[ELSEWHERE] < 2e7 for pod in pods)
    fill_in(alike, is_same_role=True)
    assert not any(pod.fabrics.is_known(ELSEWHERE) for pod in pods)
    assert all(pod.fabrics.costs[ELSEWHERE] == pod.transfer.best for pod in pods)


def test_what_pods_of_another_role_know_of_a_class_is_kept() -> None:
    other, pod = received(ELSEWHERE=(1e9, 1.0)), received(SAME_NODE=(4e10, 1e6))
    for _ in range(2):
        fill_in([("any role", other), ("any role", pod)])
        fill_in([("a role", other), ("another", pod)], is_same_role=True)
    assert rates(pod) == pytest.approx([4e10, 4e10, 1e9], rel=0.1)


def test_a_pod_that_learned_long_ago_takes_over_what_alike_pods_know_of_a_class() -> None:
    late = 1.0 + STALE_SECONDS + 1
    new, old = received(ELSEWHERE=(1e9, late)), received(ELSEWHERE=(1e7, 1.0))
    fill_in([("kind", new), ("kind", old)], is_same_role=True)
    assert rates(old)[ELSEWHERE] == pytest.approx(1e9, rel=0.1)


def measured(speed: float, samples: int, seed: int, noise: float = 0.2) -> PodEstimates:
    """A pod that is `speed` times as fast as TRUTH, by `samples` measurements with noise."""
    random, pod = Random(seed), PodEstimates()
    pod.prefill.end_cold_start()
    for number in range(samples):
        length = random.choice([500, 1000, 2000])
        seconds = TRUTH.seconds(length) / speed * random.uniform(1 - noise, 1 + noise)
        pod.prefill.add(prefill_sample([(length, 0)], seconds), float(number))
        pod.add_transfers(
            (1.0, 1e6, 1e-3 / speed * random.uniform(1 - noise, 1 + noise)), 1.0, ELSEWHERE
        )
    pod.learned()
    return pod


def figures(pod: PodEstimates) -> tuple[object, ...]:
    own = pod.figures(0.0)
    return own.fixed, own.per_token, own.per_pair, own.transfers


@pytest.mark.parametrize("samples", [(3, 3), (1, 30), (40, 40)])
def test_pods_that_samples_do_not_tell_apart_have_the_same_figures(
    samples: tuple[int, int],
) -> None:
    equal = 0
    for seed in range(40):
        pods = [measured(1.0, count, 100 * seed + i) for i, count in enumerate(samples)]
        assert figures(pods[0]) != figures(pods[1])
        fill_in([("kind", pod) for pod in pods], is_same_role=True)
        equal += figures(pods[0]) == figures(pods[1])
    # By chance, samples of equal pods differ too: one in twenty of each figure is expected.
    assert equal >= 35


def test_pods_that_samples_tell_apart_keep_their_own_figures() -> None:
    pods = [measured(speed, 40, seed) for seed, speed in enumerate([0.7, 1.0, 1.0, 1.0, 1.4])]
    fill_in([("kind", pod) for pod in pods], is_same_role=True)
    for pod, speed in zip(pods, [0.7, 1.0, 1.0, 1.0, 1.4], strict=True):
        expected = TRUTH.seconds(1000) / speed
        assert pod.prefill.best.seconds(1000) == pytest.approx(expected, rel=0.15)
    assert len({figures(pod)[:3] for pod in pods}) == 3


def test_a_pod_that_turns_out_to_differ_leaves_the_shared_figures() -> None:
    pods = [measured(1.0, 40, seed) for seed in range(3)]
    for round_ in range(64):
        seconds = 2 * TRUTH.seconds(1000)
        pods[0].prefill.add(prefill_sample([(1000, 0)], seconds), 100.0 + round_)
        fill_in([("kind", pod) for pod in pods], is_same_role=True)
    for pod, factor in zip(pods, (2, 1, 1), strict=True):
        expected = factor * TRUTH.seconds(1000)
        assert pod.prefill.best.seconds(1000) == pytest.approx(expected, rel=0.15)


def test_the_first_sample_after_a_start_does_not_count_where_alike_pods_have_more() -> None:
    """It has compilations in it: a pod that seems slow because of that would never get another."""
    warm, cold = measured(1.0, 20, 0), PodEstimates()
    cold.prefill.add(prefill_sample([(1000, 0)], 10 * TRUTH.seconds(1000)), 1.0)
    fill_in([("kind", warm), ("kind", cold)], is_same_role=True)
    assert cold.prefill.best == warm.prefill.best
    assert warm.prefill.best.seconds(1000) == pytest.approx(TRUTH.seconds(1000), rel=0.15)


def test_pods_of_different_kinds_share_nothing() -> None:
    pods = [measured(1.0, 3, seed) for seed in range(2)]
    fill_in([(seed, pod) for seed, pod in enumerate(pods)], is_same_role=True)
    assert [pod.prefill.shared for pod in pods] == [None, None]
    assert figures(pods[0]) != figures(pods[1])


def test_decode_pods_whose_steps_samples_tell_apart_keep_their_own() -> None:
    slow, fast = PodEstimates(), PodEstimates()
    for pod, step in ((slow, 0.012), (fast, 0.008)):
        for number in range(40):
            decodes = 1.0 + number % 20
            pod.decode.add(decodes, step + 1e-4 * decodes, float(number))
    fill_in([("kind", slow), ("kind", fast)], is_same_role=True)
    assert slow.best_decode == fast.best_decode
    for pod in (slow, fast):
        pod.is_decode = True
        pod.learned()
    assert slow.best_decode.step == pytest.approx(0.012, rel=0.05)
    assert fast.best_decode.step == pytest.approx(0.008, rel=0.05)
    # A token of the slow one costs more, for the request's own sake.
    costs = [pod.figures(100.0).itl_harm for pod in (slow, fast)]
    assert costs[0] - costs[1] == pytest.approx(OWN_STEP * 0.004, rel=0.1)
