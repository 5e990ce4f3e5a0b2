"""Replicas that share what they know, in simulated time."""

from .real_picker import PickerSettings
from .replicas import ReplicatedPicker
from .run import Result, engines, simulate
from .workload import conversations

LEAST_IN_FLIGHT = PickerSettings("plugins: [{type: active-request-scorer}]")


def run(replicas: int, delay: float = 0.02) -> tuple[Result, ReplicatedPicker]:
    pods = engines(4, seed=1)
    router = ReplicatedPicker(pods, 1, LEAST_IN_FLIGHT, replicas=replicas, delay=delay)
    return simulate(conversations(150, rate=8.0, seed=1), pods, router), router


def test_every_count_is_returned_everywhere() -> None:
    _, router = run(replicas=3)
    router.mesh.advance(1e9)
    for picker in router.pickers:
        assert [(pod.in_flight, pod.remote_in_flight) for pod in picker.fleet] == [(0, 0)] * 4


def test_three_replicas_without_delay_see_one_fleet() -> None:
    """With sharing, requests are spread like those of one picker; in a partition they are not."""

    def spread(replicas: int, delay: float) -> float:
        result, _ = run(replicas, delay)
        return result.waiting_percentile(99)

    alone = spread(1, 0.0)
    assert spread(3, 0.0) <= 1.2 * alone
    assert spread(3, float("inf")) > spread(3, 0.0)
