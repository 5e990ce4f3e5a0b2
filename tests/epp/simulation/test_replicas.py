"""Replicas that share what they know, in simulated time."""

from statistics import fmean

import pytest

from tandem_planner.simulation.loop import simulate
from tandem_planner.simulation.measures import Result
from tandem_planner.simulation.work import Request

from .pods import engines
from .real_picker import PickerSettings
from .replicas import ReplicatedPicker
from .workload import conversations

# The simulation gives the picker an index of its own, derived from PrefixTree.
pytestmark = [pytest.mark.interpreted, pytest.mark.long]
LEAST_IN_FLIGHT = PickerSettings("plugins: [{type: active-request-scorer}]")


def run(replicas: int, delay: float = 0.02, seed: int = 1) -> tuple[Result, ReplicatedPicker]:
    pods = engines(4, seed=seed)
    router = ReplicatedPicker(pods, seed, LEAST_IN_FLIGHT, replicas=replicas, delay=delay)
    return simulate(conversations(150, rate=8.0, seed=seed), pods, router), router


def test_requests_of_one_instant_that_meet_several_replicas_are_spread() -> None:
    """Six prompts of 10,000 tokens each 3 s: one second of work for each pod."""
    requests = [
        Request(3.0 * (n // 6), 10_000, 20, tuple(range(20 * n, 20 * n + 20))) for n in range(180)
    ]

    def waiting(replicas: int) -> float:
        pods = engines(6, seed=1)
        router = ReplicatedPicker(pods, 1, replicas=replicas)
        return fmean(simulate(requests, pods, router).waiting()[60:])

    # 0.46 s if every replica chooses for itself, and 0.02 s with one.
    assert waiting(3) < 0.3


def test_every_count_is_returned_everywhere() -> None:
    _, router = run(replicas=3)
    router.mesh.advance(1e9)
    for picker in router.pickers:
        assert [(pod.in_flight, pod.remote_in_flight) for pod in picker.fleet] == [(0, 0)] * 4


def test_three_replicas_without_delay_see_one_fleet() -> None:
    """With sharing, requests are spread like those of one picker; in a partition they are not."""

    def spread(replicas: int, delay: float) -> float:
        return fmean(fmean(run(replicas, delay, seed)[0].waiting()) for seed in (1, 2))

    alone, together = spread(1, 0.0), spread(3, 0.0)
    assert together <= 1.1 * alone
    assert spread(3, float("inf")) > 1.5 * together
