"""What the picker must do, over simulated pods that it does not know. Margins are wide: the figures
are those of benchmarks/routing.py."""

from dataclasses import dataclass

import pytest

from tandem_planner.simulation.loop import simulate
from tandem_planner.simulation.routers import LeastLoaded, RoundRobin
from tandem_planner.simulation.work import Request

from . import scenarios
from .pods import engines
from .policies import ExactCost
from .real_picker import LLMD_DEFAULT, PickerSettings, RealPicker, Reports
from .replicas import ReplicatedPicker
from .scenarios import NewRouter
from .workload import conversations

# The simulation gives the picker an index of its own, derived from PrefixTree.
pytestmark = [pytest.mark.interpreted, pytest.mark.long]
REQUESTS = conversations(300, rate=8.0, seed=7)
"""Keep four pods half busy at first."""


@dataclass(frozen=True)
class Outcome:
    waiting: float
    hits: float


def outcome(new_router: NewRouter) -> Outcome:
    pods = engines(4, 3)
    result = simulate(REQUESTS, pods, new_router(pods, 3))
    return Outcome(result.waiting_percentile(99), result.hit_ratio())


def llmd(pods: scenarios.Pods, seed: int) -> RealPicker:
    return RealPicker(pods, seed, PickerSettings(LLMD_DEFAULT))


@pytest.fixture(scope="module")
def picker() -> Outcome:
    return outcome(RealPicker)


@pytest.mark.parametrize("policy", [llmd, LeastLoaded, RoundRobin])
def test_the_picker_waits_less_than_other_policies(picker: Outcome, policy: NewRouter) -> None:
    assert picker.waiting < 0.6 * outcome(policy).waiting


def test_the_picker_finds_about_as_much_in_caches_as_with_perfect_knowledge(
    picker: Outcome,
) -> None:
    assert picker.hits > 0.9 * outcome(ExactCost).hits


def test_three_replicas_route_about_as_well_as_one(picker: Outcome) -> None:
    replicas = outcome(ReplicatedPicker)
    assert replicas.hits > picker.hits - 0.03
    assert replicas.waiting < 2 * picker.waiting + 0.2


def test_inferred_caches_are_nearly_as_good_as_exact_ones(picker: Outcome) -> None:
    exact = outcome(
        lambda pods, seed: RealPicker(pods, seed, PickerSettings(has_exact_caches=True))
    )
    assert picker.hits > exact.hits - 0.05


def test_a_sidecars_reports_are_enough_to_learn_from(picker: Outcome) -> None:
    settings = PickerSettings(reports=Reports.SIDECAR)
    other = outcome(lambda pods, seed: RealPicker(pods, seed, settings))
    assert other.waiting < 2 * picker.waiting + 0.1


def test_counters_alone_are_enough_to_wait_less_than_other_policies(picker: Outcome) -> None:
    """Nothing tells of a first token: queues shrink as predicted."""
    settings = PickerSettings(reports=Reports.NOTHING)
    other = outcome(lambda pods, seed: RealPicker(pods, seed, settings))
    assert other.hits > picker.hits - 0.03
    for policy in (llmd, LeastLoaded):
        assert other.waiting < 0.8 * outcome(policy).waiting


def test_requests_at_once_that_share_a_prompt_spread() -> None:
    assert scenarios.burst_imbalance(1) < 1.5


def test_clients_that_share_a_prompt_spread() -> None:
    assert scenarios.loop_imbalance(1, requests=800) < 1.3


@pytest.mark.parametrize("reports", Reports)
def test_idle_pods_of_one_speed_share_the_requests(reports: Reports) -> None:
    """What they are measured to take differs by chance."""
    settings = PickerSettings(reports=reports)
    shares = [
        scenarios.least_share(seed, lambda pods, seed: RealPicker(pods, seed, settings))
        for seed in range(5)
    ]
    assert min(shares) > 0.3


def test_a_long_prompt_goes_to_its_cache_unless_the_queue_there_takes_longer() -> None:
    assert scenarios.long_prompt(1, queued=0).went_to_cache
    assert not scenarios.long_prompt(1, queued=10).went_to_cache


def test_a_long_prompt_does_not_follow_a_short_answer_to_its_pod() -> None:
    # Both prompts are computed at once, and the answer has no tokens yet.
    requests = []
    for number in range(20):
        short, long = (tuple(range(1000 * number + at, 1000 * number + 70)) for at in (68, 10))
        requests += [
            Request(5.0 * number, 800, 10, short),
            Request(5.0 * number + 0.01, 30_000, 10, long),
        ]
    pods = engines(2, 3)
    served = simulate(requests, pods, RealPicker(pods, 3)).served
    pairs = zip(served[::2], served[1::2], strict=True)
    together = [short.route == long.route for short, long in pairs]
    # Until the picker has seen how fast the pods are.
    assert not any(together[2:])


def test_retries_avoid_a_pod_that_fails() -> None:
    assert scenarios.retries_that_meet_the_failing_pod(1) <= 2


def test_a_pod_at_half_speed_gets_about_half_of_its_work() -> None:
    # Many short prompts without a common prefix keep all pods busy.
    requests = [Request(0.02 * i, 1024, 100, (2 * i, 2 * i + 1)) for i in range(700)]
    work = scenarios.half_speed(requests, 1).work
    assert 0.2 < work < 0.8
