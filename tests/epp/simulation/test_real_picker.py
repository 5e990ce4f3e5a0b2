"""Simulations end to end: nothing is lost, and better routers measure better."""

import json
from collections.abc import Sequence

import pytest

from tandem_contract.paths import Role
from tandem_epp.request.inference import RequestKind, parse_request
from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.loop import simulate
from tandem_planner.simulation.routers import LeastLoaded, RoundRobin
from tandem_planner.simulation.work import Work

from .pods import engines
from .policies import ExactCost
from .real_picker import LLMD_DEFAULT, PickerSettings, RealPicker
from .workload import body, conversations, shared_prompts

# The simulation gives the picker an index of its own, derived from PrefixTree.
pytestmark = [pytest.mark.interpreted, pytest.mark.long]


def test_every_request_ends_once_with_the_real_picker() -> None:
    pods = engines(4, seed=1)
    requests = conversations(200, rate=4.0, seed=1)
    result = simulate(requests, pods, RealPicker(pods, 1, PickerSettings(LLMD_DEFAULT)))
    assert len(result.served) == len(requests)
    for served in result.served:
        assert served.first_token is not None
        assert served.ended is not None
        assert served.work.arrived < served.first_token <= served.ended


def test_the_picker_has_nothing_in_flight_afterwards() -> None:
    pods = engines(3, seed=1)
    picker = RealPicker(pods, seed=1)
    simulate(conversations(50, rate=4.0, seed=2), pods, picker)
    assert [pod.in_flight for pod in picker.fleet] == [0, 0, 0]


def test_the_same_seed_gives_the_same_result() -> None:
    def first_tokens() -> list[float | None]:
        pods = engines(3, seed=5)
        requests = conversations(60, rate=4.0, seed=5)
        result = simulate(requests, pods, RealPicker(pods, seed=5))
        return [served.first_token for served in result.served]

    assert first_tokens() == first_tokens()


def test_perfect_knowledge_answers_sooner_than_blind_policies() -> None:
    requests = conversations(600, rate=24.0, seed=3)

    def ttft(router: type[ExactCost | RoundRobin | LeastLoaded]) -> float:
        pods = engines(10, seed=3)
        return simulate(requests, pods, router(pods, 3)).ttft_percentile(90)

    assert ttft(ExactCost) < 0.9 * min(ttft(RoundRobin), ttft(LeastLoaded))


def test_the_picker_splits_over_simulated_pods() -> None:
    pods = engines(4, seed=1, decodes=[2, 3])
    roles: Sequence[Role] = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
    picker = RealPicker(pods, 1, PickerSettings(roles=roles))
    served = simulate(conversations(40, rate=1.0, seed=4), pods, picker).served
    assert any(s.route.prefill in (0, 1) for s in served)
    assert {s.route.decode for s in served} <= {2, 3}
    assert [pod.in_flight for pod in picker.fleet] == [0] * 4


def test_a_shared_prompt_has_common_and_own_blocks() -> None:
    first, second = shared_prompts(2, prompt_tokens=20 * BLOCK, shared=0.9, output_tokens=1)
    common = set(first.blocks) & set(second.blocks)
    assert common == set(range(18))
    assert len(first.blocks) == len(second.blocks) == 20


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_a_body_has_about_four_bytes_per_token(tokens: int) -> None:
    data = body(Work(3, 0.0, tokens, 7, (7, 8)))
    assert json.loads(data)["max_tokens"] == 7
    parsed = parse_request(RequestKind.COMPLETIONS, data)
    assert 0.8 * tokens - 4 < parsed.prompt_tokens < 1.2 * tokens + 4


def test_equal_blocks_have_equal_text() -> None:
    longer = Work(1, 0.0, 4 * BLOCK, 1, (1, 2, 3, 4))
    shorter = Work(2, 0.0, 2 * BLOCK + 100, 1, (1, 2, 3))
    prompts = [json.loads(body(work))["prompt"] for work in (longer, shorter)]
    assert prompts[0].startswith(prompts[1][:-16])
