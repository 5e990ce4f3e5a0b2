"""Requests of a burst with one prompt go to one pod, up to a number."""

from typing import Any

import msgspec
import pytest

from tandem_epp.backends.pods import Pod
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.estimates.engine_figures import Gauges
from tandem_epp.llmd.plugins.burst_prefix import BurstPrefix
from tandem_epp.llmd.plugins.llmd_parameters import BurstParameters
from tandem_epp.request.inference import InferenceRequest

from .pods import make_pod

PODS = [make_pod(name) for name in "abc"]
NAMES = "abc"


class Burst:
    """Requests, one after the other."""

    def __init__(self, **parameters: Any) -> None:
        self._burst = BurstPrefix(msgspec.convert(parameters, BurstParameters))

    def send(
        self, prompt: bytes, placed: str, *, pods: list[Pod] | None = None, now: float = 10.0
    ) -> str | None:
        """The pod that the burst wants for the request, which then goes to `placed`."""
        context = ChoiceContext(InferenceRequest("m", prompt * 4 * 64), now=now)
        pods = PODS if pods is None else pods
        scores = self._burst.score(pods, context)
        assert sorted(scores)[:-1] == [0.0] * (len(pods) - 1)
        self._burst.on_placed(context, PODS[NAMES.index(placed)], None)
        return next((p.name for p, score in zip(pods, scores, strict=True) if score), None)


def test_the_first_request_is_free_and_others_follow_it() -> None:
    burst = Burst()
    assert [burst.send(b"x", "b") for _ in range(3)] == [None, "b", "b"]
    assert [burst.send(b"y", "a") for _ in range(2)] == [None, "a"]


def test_a_window_ends() -> None:
    burst = Burst(windowDurationMs=100)
    assert burst.send(b"x", "b", now=10.0) is None
    assert burst.send(b"x", "b", now=10.09) == "b"
    assert burst.send(b"x", "a", now=10.11) is None
    assert burst.send(b"x", "a", now=10.2) == "a", "the next window began with a request"


def test_a_full_pod_is_left_for_the_one_with_the_least_load() -> None:
    burst = Burst(maxPerReplica=2)
    burst.send(b"y", "a")
    wanted = []
    for placed in "bbccaa":
        wanted.append(burst.send(b"x", placed))
    assert wanted == [None, "b", "c", "c", "a", "a"]
    # Every pod is full: the one with the least load takes more.
    assert burst.send(b"x", "b") == "b"


def test_a_pod_that_is_no_candidate_is_not_wanted() -> None:
    burst = Burst()
    burst.send(b"x", "b")
    assert burst.send(b"x", "c", pods=[PODS[0], PODS[2]]) == "a"
    assert burst.send(b"x", "c") == "c", "filled last"


def test_running_requests_decide_between_pods_with_the_same_load() -> None:
    busy, idle = make_pod("a", gauges=Gauges(running=1)), make_pod("z")
    burst = Burst(maxPerReplica=1)
    burst.send(b"x", "c")
    assert burst.send(b"x", "b", pods=[busy, idle]) == "z"


def test_prompts_that_begin_alike_stay_together_within_their_share() -> None:
    burst = Burst(minColocateBlocks=1, blockSizeTokens=16)
    # Three prompts with the same first 16 tokens.
    first, second, third = (b"x" * 64 + bytes([i]) * 192 for i in (1, 2, 3))

    def send(prompt: bytes, placed: str) -> str | None:
        context = ChoiceContext(InferenceRequest("m", prompt), now=10.0)
        scores = burst._burst.score(PODS, context)
        burst._burst.on_placed(context, PODS[NAMES.index(placed)], None)
        return next((p.name for p, score in zip(PODS, scores, strict=True) if score), None)

    assert send(first, "b") is None
    assert send(second, "a") == "a", "b has its share"
    assert send(third, "c") == "c"
    assert send(b"y" * 256, "c") is None


def test_load_may_count_blocks_of_prompts() -> None:
    burst = Burst(balanceBy="tokens", maxPerReplica=2)
    burst.send(b"y", "a")
    for _ in range(2):
        burst.send(b"x", "b")
    # By requests, c (0) is before a (1) and b (2); a prompt counts once for a pod.
    assert burst.send(b"x", "c") == "c"
    burst.send(b"z", "c")
    assert burst.send(b"x", "c") == "c"
    assert burst.send(b"x", "a") == "a"


@pytest.mark.parametrize("limit", [1, -1])
def test_a_window_may_be_full(limit: int) -> None:
    burst = Burst(maxBatchSize=limit)
    wanted = [burst.send(b"x", "b") for _ in range(3)]
    assert wanted == ([None, None, None] if limit == 1 else [None, "b", "b"])


@pytest.mark.parametrize(
    "parameters",
    [
        {"windowDurationMs": 0},
        {"windowDurationMs": 10_001},
        {"maxPerReplica": 0},
        {"maxBatchSize": 0},
        {"maxPrefixTokensToMatch": 63},
        {"balanceBy": "luck"},
    ],
)
def test_parameters_are_checked(parameters: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(parameters, BurstParameters)


def test_prompts_without_a_whole_block_are_free() -> None:
    burst = BurstPrefix(BurstParameters())
    context = ChoiceContext(None)
    burst.on_placed(context, PODS[0], None)
    assert burst.score(PODS, context) == [0, 0, 0]
    assert burst.score([], context) == []
