"""Simulations end to end: nothing is lost, and better routers measure better."""

import json

import pytest

from .engine import BLOCK, Work
from .routers import LLMD_DEFAULT, LeastLoaded, Oracle, RealPicker, RoundRobin
from .run import engines, simulate
from .workload import conversations, prompt_ids, shared_prompt


def test_every_request_ends_once_with_the_real_picker() -> None:
    pods = engines(4, seed=1)
    requests = conversations(200, rate=4.0, seed=1)
    result = simulate(requests, pods, RealPicker(pods, LLMD_DEFAULT, seed=1))
    assert len(result.works) == len(requests)
    for work in result.works:
        assert work.first_token is not None
        assert work.ended is not None
        assert work.arrived < work.first_token <= work.ended


def test_the_picker_has_nothing_in_flight_afterwards() -> None:
    pods = engines(3, seed=1)
    picker = RealPicker(pods, "{}", seed=1)
    simulate(conversations(50, rate=4.0, seed=2), pods, picker)
    assert [pod.in_flight for pod in picker.fleet] == [0, 0, 0]


def test_the_same_seed_gives_the_same_result() -> None:
    def first_tokens() -> list[float | None]:
        pods = engines(3, seed=5)
        requests = conversations(60, rate=4.0, seed=5)
        result = simulate(requests, pods, RealPicker(pods, "{}", seed=5))
        return [work.first_token for work in result.works]

    assert first_tokens() == first_tokens()


def test_perfect_knowledge_waits_less_than_round_robin() -> None:
    requests = conversations(600, rate=12.0, seed=3)

    def waiting(router: type[Oracle | RoundRobin | LeastLoaded]) -> float:
        pods = engines(10, seed=3)
        return simulate(requests, pods, router(pods, 3)).waiting_percentile(99)

    assert waiting(Oracle) < min(waiting(RoundRobin), waiting(LeastLoaded))


def test_a_shared_prompt_has_common_and_own_blocks() -> None:
    first, second = shared_prompt(2, prompt_tokens=20 * BLOCK, shared=0.9, output_tokens=1)
    common = set(first.blocks) & set(second.blocks)
    assert common == set(range(18))
    assert len(first.blocks) == len(second.blocks) == 20


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_a_prompt_has_its_number_of_ids(tokens: int) -> None:
    ids = json.loads(prompt_ids(Work(3, 0.0, tokens, 1, (7, 8))))
    assert len(ids) == tokens
    assert ids[0] == 7
