"""The loop of events: queues that are known, hand-offs, prefix caches, determinism."""

from collections.abc import Sequence
from random import Random

import pytest

from tandem_planner.cost import HANDOFF_SECONDS
from tandem_planner.kv_size import KvSize
from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.link import Link
from tandem_planner.simulation.loop import (
    AT_ONCE,
    DECISION_SECONDS,
    Arrival,
    Simulation,
    Timing,
    simulate,
)
from tandem_planner.simulation.measures import Result, Slo, measure, percentile
from tandem_planner.simulation.routers import LeastWork, Page, Policy, Pools, RoundRobin, Route
from tandem_planner.simulation.work import Request, Work
from tandem_planner.step_cost import LinearStep
from tandem_planner.transfer import TransferCost

from .queues import md1, mmc

STEP = LinearStep(0.008, 1e-4, 2e-8, 1e-4, 2.5e-10)


def pods(count: int, *, noise: float = 0.0, fabric: TransferCost | None = None) -> list[Engine]:
    """With a `fabric` the last one gets the KV of the others."""
    made = [Engine(STEP, cache_tokens=10**6, seed=i, noise=noise) for i in range(count)]
    if fabric is not None:
        made[-1].link = Link(fabric, KvSize(1e5))
    return made


def colocated(requests: Sequence[Request], pods: Sequence[Engine]) -> Result:
    return simulate(requests, pods, LeastWork(pods), timing=AT_ONCE, is_lazy=True)


def split(requests: Sequence[Request], pods: Sequence[Engine], *, is_lazy: bool = True) -> Result:
    """The last pod answers."""
    last = len(pods) - 1
    router = LeastWork(pods, Pools(range(last), [last]))
    return simulate(requests, pods, router, timing=AT_ONCE, is_lazy=is_lazy)


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
    def outcomes(seed: int) -> list[tuple[float | None, float | None]]:
        result = colocated(requests(300, 20.0, seed), pods(3, noise=0.1))
        return [(served.first_token, served.ended) for served in result.served]

    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)


def test_a_split_request_has_its_first_token_after_prefill_handoff_and_transfer() -> None:
    fabric = TransferCost(0.002, 1e-9)
    pair = pods(2, fabric=fabric)
    result = split([Request(1.0, 1000, 11)], pair)
    (served,) = result.served
    assert [pod.totals["computed_tokens"] for pod in pair] == [1000, 1]
    assert [pod.totals["generated_tokens"] for pod in pair] == [1, 11]
    assert result.split() == 1.0
    prefill = STEP.seconds(0, 0, 1000, 1e6)
    last = STEP.seconds(0, 0, 1, 2 * 999 + 1)
    assert served.ttft == pytest.approx(prefill + HANDOFF_SECONDS + fabric.seconds(1e8) + last)
    assert served.itl == pytest.approx(STEP.seconds(1, 1004.5), rel=1e-3)
    assert served.e2e == pytest.approx(served.ttft + 10 * (served.itl or 0.0))


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_handoff_comes_at_its_own_time_whenever_the_next_event_is(*, is_lazy: bool) -> None:
    def first_tokens(later: list[Request]) -> list[float]:
        made = [*requests(20, 5.0), *later]
        served = split(made, pods(3, fabric=TransferCost(0.0, 1e-11)), is_lazy=is_lazy).served
        return [each.ttft for each in served[:20]]

    assert first_tokens([]) == pytest.approx(first_tokens([Request(500.0, 10, 1)]), rel=1e-9)


def test_only_a_pod_with_a_link_gets_kv() -> None:
    with pytest.raises(ValueError, match="hand-off"):
        split([Request(0.0, 100, 2)], pods(2))


def test_a_long_prefill_delays_no_answer_of_separate_pools() -> None:
    answer = Request(0.0, 100, 400)
    long = Request(0.5, 30_000, 1)
    fabric = TransferCost(0.002, 1e-12)
    apart = split([answer, long], pods(2, fabric=fabric)).served[0].itl
    alone = split([answer], pods(2, fabric=fabric)).served[0].itl
    together = colocated([answer, long], pods(1)).served[0].itl
    assert apart is not None
    assert alone is not None
    assert together is not None
    assert apart == pytest.approx(alone, rel=0.02)
    assert together > 1.4 * alone


def test_alike_prompts_go_where_their_prefix_is_cached() -> None:
    shared = tuple(range(10))
    made = [Request(10.0 * i, 10 * BLOCK + 50, 2, shared) for i in range(4)]
    served = colocated(made, pods(3)).served
    assert [each.work.hit_tokens for each in served] == [0] + 3 * [10 * BLOCK]


def test_the_router_does_not_know_the_end_of_a_step_that_has_begun() -> None:
    """The second prompt comes while the first is in its last step, which ends after it."""
    prompt = STEP.seconds(0, 0, 1000, 1e6)
    made = [Request(0.0, 1000, 1), Request(0.5 * prompt, 1000, 1)]
    assert [each.route for each in colocated(made, pods(2)).served] == [Route(0), Route(1)]


def test_a_computed_prompt_costs_its_last_token() -> None:
    made = Request(0.0, 1000, 3, is_computed=True)
    pod = pods(1)
    (served,) = colocated([made], pod).served
    assert pod[0].totals["computed_tokens"] == 1
    assert served.ttft == pytest.approx(STEP.seconds(0, 0, 1, 2 * 999 + 1))


class Listener(Policy):
    """Notes what it hears, and when."""

    def __init__(self, pods: Sequence[Engine]) -> None:
        super().__init__(pods, seed=0)
        self.heard: list[tuple[str, float]] = []

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        self.heard.append(("choose", now))
        return Route(0)

    def on_response(self, work: Work, status: int, now: float) -> None:
        self.heard.append(("response", now))

    def on_end(self, work: Work, now: float) -> None:
        self.heard.append(("end", now))

    def on_scrape(self, pages: Sequence[Page], now: float) -> None:
        self.heard.append(("scrape", now))


def test_a_router_hears_of_what_happens_as_late_as_said() -> None:
    pod = pods(1)
    listener = Listener(pod)
    made = [Request(0.0, BLOCK, 2, (0,)), Request(9.0, BLOCK, 2, (0,))]
    first = simulate(made, pod, listener, timing=Timing(2.0, 1.0, 10.0, 0.5)).served[0]
    assert first.first_token is not None
    assert first.ended is not None
    assert first.work.arrived == pytest.approx(10 * (DECISION_SECONDS + BLOCK * 7e-8))
    assert ("response", first.first_token + 0.5) in listener.heard
    assert ("end", first.ended + 0.5) in listener.heard
    scrapes = [at for name, at in listener.heard if name == "scrape"]
    assert scrapes == [0.0, 1.0, 3.0, 5.0, 7.0, 9.0]


def test_a_router_hears_of_what_happens_in_order_of_time() -> None:
    pod = pods(1)
    listener = Listener(pod)
    served = simulate(requests(50, 20.0), pod, listener, timing=AT_ONCE, is_lazy=True).served
    times = [at for _, at in listener.heard]
    assert times == sorted(times)
    assert len(times) == 3 * len(served)


class Minute:
    """Holds each request for a minute, and refuses the first."""

    def start(self, simulation: Simulation) -> None:
        self._simulation, self.met = simulation, 0

    def meet(self, arrival: Arrival, now: float) -> None:
        self.met += 1
        if self.met == 1:
            self._simulation.refuse()
        else:
            self._simulation.at(now + 60.0, lambda: self._pass(arrival, now + 60.0))

    def _pass(self, arrival: Arrival, now: float) -> None:
        self._simulation.place(arrival, now)


def test_a_gate_holds_requests_after_the_decisions_turn() -> None:
    pod = pods(1)
    simulation = Simulation(pod, LeastWork(pod), gate=Minute(), timing=Timing(decision=1000.0))
    (served,) = simulation.run([Request(0.0, 1, 1), Request(0.0, 1, 1)]).served
    # The second decision begins after the first.
    assert served.work.arrived == pytest.approx(60.0 + 2000 * DECISION_SECONDS, rel=1e-3)
    assert served.ttft > 60.0


def test_a_failing_pod_answers_500_which_is_no_goodput() -> None:
    pair = pods(2)
    simulation = Simulation(pair, RoundRobin(pair, 1), failing={0})
    result = simulation.run(Request(float(i), 100, 20) for i in range(4))
    served = result.served[0]
    assert served.itl is not None
    ttft, itl = served.ttft, served.itl
    assert [each.status for each in result.served] == [200, 500, 200, 500]
    assert len(result.waiting()) == 2
    assert result.ttft_mean() == pytest.approx(ttft)
    assert result.goodput(Slo(1.01 * ttft, 1.01 * itl)) == 0.5
    assert result.goodput(Slo(0.99 * ttft, itl)) == 0
    assert result.goodput(Slo(ttft, 0.99 * itl)) == 0
    assert result.split() == 0


def test_measures_count_what_misses() -> None:
    result = colocated(requests(200, 5.0), pods(2))
    ttfts = sorted(each.ttft for each in result.served)
    measures = measure(result, Slo(ttft=ttfts[149]))
    assert measures.attainment == 0.75
    assert measures.late_first == 0.25
    assert measures.ttft_p50 == (ttfts[99] + ttfts[100]) / 2
    assert measures.gap_p99 >= measures.itl_p50
    assert percentile([3.0, 1.0, 2.0], 100) == 3.0
    assert percentile([3.0, 1.0, 2.0], 25) == 1.5
