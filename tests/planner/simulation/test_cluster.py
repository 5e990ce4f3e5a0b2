"""Deployments of simulated pods: queues that are known, hand-offs, prefix caches, determinism."""

from random import Random

import pytest

from tandem_planner.kv_size import KvSize
from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.cluster import Request, colocated, split
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.link import Link
from tandem_planner.simulation.measures import Slo, measure, percentile
from tandem_planner.step_cost import LinearStep
from tandem_planner.transfer import TransferCost

from .queues import md1, mmc

STEP = LinearStep(0.008, 1e-4, 2e-8, 1e-4, 2.5e-10)


def pods(count: int, link: Link | None = None, noise: float = 0.0) -> list[Engine]:
    return [Engine(STEP, cache_tokens=10**6, seed=i, link=link, noise=noise) for i in range(count)]


def requests(count: int, rate: float, seed: int = 1) -> list[Request]:
    random, at, made = Random(seed), 0.0, []
    for _ in range(count):
        at += random.expovariate(rate)
        made.append(Request(at, random.randrange(50, 4000), random.randrange(1, 200)))
    return made


def test_prompts_one_by_one_wait_as_in_md1() -> None:
    wait = md1(0.5, count=20_000)
    assert wait.simulated == pytest.approx(wait.exact, rel=1e-9)
    assert wait.simulated == pytest.approx(wait.expected, rel=0.02)


@pytest.mark.parametrize(("servers", "utilization"), [(1, 0.7), (4, 0.8), (16, 0.9)])
def test_answers_wait_as_in_mmc(servers: int, utilization: float) -> None:
    # The formula's mean needs a million requests: benchmarks/plan.py. The queue's recursion does
    # not.
    wait = mmc(servers, utilization, count=5000)
    assert wait.simulated == pytest.approx(wait.exact, rel=0.01)


def test_the_same_requests_give_the_same_outcomes_bit_by_bit() -> None:
    def outcomes(seed: int) -> list[tuple[float, float]]:
        found = colocated(requests(300, 20.0, seed), pods(3, noise=0.1))
        return [(outcome.first_token, outcome.ended) for outcome in found]

    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)


def test_a_split_request_has_its_first_token_after_prefill_handoff_and_transfer() -> None:
    link = Link(TransferCost(0.002, 1e-9), KvSize(1e5))
    (outcome,) = split([Request(1.0, 1000, 11)], pods(1), pods(1, link), handoff=0.01)
    prefill = STEP.seconds(0, 0, 1000, 1e6)
    last = STEP.seconds(0, 0, 1, 2 * 999 + 1)
    assert outcome.ttft == pytest.approx(prefill + 0.01 + link.cost.seconds(1e8) + last)
    assert outcome.itl == pytest.approx(STEP.seconds(1, 1004.5), rel=1e-3)
    assert outcome.e2e == pytest.approx(outcome.ttft + 10 * (outcome.itl or 0.0))


def test_a_long_prefill_delays_no_answer_of_separate_pools() -> None:
    answer = Request(0.0, 100, 400)
    long = Request(0.5, 30_000, 1)
    link = Link(TransferCost(0.002, 1e-12), KvSize(1e5))
    apart = split([answer, long], pods(1), pods(1, link), handoff=0.01)[0]
    alone = split([answer], pods(1), pods(1, link), handoff=0.01)[0]
    together = colocated([answer, long], pods(1))[0]
    assert apart.itl is not None
    assert alone.itl is not None
    assert together.itl is not None
    assert apart.itl == pytest.approx(alone.itl, rel=0.02)
    assert together.itl > 1.4 * alone.itl


def test_alike_prompts_go_where_their_prefix_is_cached() -> None:
    shared = tuple(range(10))
    made = [Request(10.0 * i, 10 * BLOCK + 50, 2, shared) for i in range(4)]
    outcomes = colocated(made, pods(3))
    assert [outcome.hit_tokens for outcome in outcomes] == [0] + 3 * [10 * BLOCK]


def test_measures_count_what_misses() -> None:
    made = requests(200, 5.0)
    served = pods(2)
    outcomes = colocated(made, served)
    ttfts = sorted(outcome.ttft for outcome in outcomes)
    measures = measure(outcomes, served, Slo(ttft=ttfts[149]))
    assert measures.attainment == 0.75
    assert measures.late_first == 0.25
    assert measures.ttft_p50 == ttfts[99]
    assert measures.gap_p99 >= measures.itl_p50
    assert percentile([1.0, 2.0, 3.0], 100) == 3.0
