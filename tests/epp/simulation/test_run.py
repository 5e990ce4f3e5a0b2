"""Simulations end to end: nothing is lost, and better routers measure better."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tandem_contract.paths import Role
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.request.inference import RequestKind, parse_request
from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.work import Work

from .policies import Choice, ExactCost, LeastLoaded, Policy, RoundRobin
from .real_picker import LLMD_DEFAULT, PickerSettings, RealPicker
from .run import DECISION_SECONDS, Simulation, Slo, Timing, engines, simulate
from .workload import Request, body, conversations, shared_prompts

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


class Listener(RoundRobin):
    """Notes what it hears, and when."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heard: list[tuple[str, float]] = []

    def on_response(self, work: Work, status: int, now: float) -> None:
        self.heard.append(("response", now))

    def on_end(self, work: Work, now: float) -> None:
        self.heard.append(("end", now))

    def on_scrape(self, pages: Sequence[ScrapeResult], now: float) -> None:
        self.heard.append(("scrape", now))


def test_a_router_hears_of_what_happens_as_late_as_said() -> None:
    pods = engines(1, seed=1)
    listener = Listener(pods, 1)
    simulation = Simulation(pods, listener, timing=Timing(2.0, 1.0, 10.0, 0.5))
    simulation.send(Request(0.0, BLOCK, 2, (0,)), 0.0)
    simulation.send(Request(9.0, BLOCK, 2, (0,)), 9.0)
    first, _ = simulation.run().served
    assert first.first_token is not None
    assert first.ended is not None
    assert first.work.arrived == pytest.approx(10 * (DECISION_SECONDS + BLOCK * 7e-8))
    assert ("response", first.first_token + 0.5) in listener.heard
    assert ("end", first.ended + 0.5) in listener.heard
    scrapes = [at for name, at in listener.heard if name == "scrape"]
    assert scrapes == [0.0, 1.0, 3.0, 5.0, 7.0, 9.0]


class AlwaysSplit(Policy):
    """Pod 0 prefills, pod 1 decodes."""

    def choose(self, work: Work, now: float, replica: int = 0) -> Choice:
        return Choice(1, 0)


def test_a_split_request_is_computed_on_one_pod_and_answered_on_the_other() -> None:
    pods = engines(2, seed=1)
    simulation = Simulation(pods, AlwaysSplit(pods, 1))
    simulation.send(Request(0.0, 8 * BLOCK, 50, tuple(range(8))), 0.0)
    served = simulation.run(tick=0.01).served[0]
    assert pods[0].totals["computed_tokens"] == 8 * BLOCK
    assert pods[1].totals["computed_tokens"] == 1
    assert pods[1].totals["generated_tokens"] == 50
    assert served.answer is not None
    assert served.work.first_token is not None
    # Half a gigabyte of KV at 5 GB/s.
    assert served.first_token is not None
    assert 0.1 < served.first_token - served.work.first_token < 0.2


def test_the_picker_splits_over_simulated_pods() -> None:
    pods = engines(4, seed=1)
    roles: Sequence[Role] = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
    picker = RealPicker(pods, 1, PickerSettings(roles=roles))
    simulation = Simulation(pods, picker)
    for request in conversations(40, rate=1.0, seed=4):
        simulation.send(request, request.at)
    served = simulation.run(tick=0.05).served
    assert any(s.choice.prefill in (0, 1) for s in served)
    assert {s.choice.decode for s in served} <= {2, 3}
    assert [pod.in_flight for pod in picker.fleet] == [0] * 4


def test_goodput_counts_requests_that_meet_both_targets() -> None:
    pods = engines(2, seed=1)
    simulation = Simulation(pods, RoundRobin(pods, 1), failing={0})
    simulation.send(Request(0.0, 100, 20, (0,)), 0.0)
    simulation.send(Request(0.0, 100, 20, (1,)), 1.0)
    result = simulation.run()
    served = result.served[0]
    assert served.itl is not None
    ttft, itl = served.ttft, served.itl
    assert result.ttft_mean() == ttft
    assert result.goodput(Slo(ttft, itl)) == 0.5, "the second one failed"
    assert result.goodput(Slo(0.99 * ttft, itl)) == 0
    assert result.goodput(Slo(ttft, 0.99 * itl)) == 0
    assert result.split() == 0


def test_a_failing_pod_answers_500() -> None:
    pods = engines(2, seed=1)
    simulation = Simulation(pods, RoundRobin(pods, 1), failing={0})
    for i in range(4):
        simulation.send(Request(0.0, 100, 2, (i,)), float(i))
    result = simulation.run()
    assert [s.status for s in result.served] == [200, 500, 200, 500]
    assert len(result.waiting()) == 2


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
