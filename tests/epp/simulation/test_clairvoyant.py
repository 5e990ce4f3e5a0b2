"""The bound: forked engines do what theirs do, and knowing all is worth something."""

from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.loop import simulate
from tandem_planner.simulation.measures import Slo
from tandem_planner.simulation.routers import RoundRobin
from tandem_planner.simulation.work import Request, Work

from .clairvoyant import Clairvoyant
from .pods import CACHE_TOKENS, SPEED, engines
from .workload import conversations

SLO = Slo(2.0, 0.05)


def test_a_fork_goes_on_without_its_engine() -> None:
    engine = Engine(SPEED, cache_tokens=CACHE_TOKENS, seed=1)
    first, second = Work(0, 0.0, 5000, 50, range(9)), Work(1, 0.1, 3000, 20, range(5))
    engine.add(first)
    engine.add(second)
    engine.advance(0.2)
    before = (dict(engine.totals), engine.pool.used, first.done, second.done)
    fork = engine.fork()
    copies = list(fork.works())
    fork.advance(1e6)
    assert {work.index for work in copies} == {0, 1}
    assert all(work.ended is not None for work in copies)
    assert (dict(engine.totals), engine.pool.used, first.done, second.done) == before
    engine.advance(1e6)
    ends = sorted((work.index, work.ended or 0.0) for work in copies)
    for (_, end), work in zip(ends, (first, second), strict=True):
        assert work.ended is not None
        assert abs(end - work.ended) < 0.1 * work.ended


def test_a_coming_request_is_kept_apart_from_a_long_one() -> None:
    """Two pods: the first of them would be free sooner for the short prompt alone."""
    requests = [
        Request(0.0, 1000, 5, (0, 1)),
        Request(1.0, 60_000, 5, tuple(range(100, 218))),
        Request(1.1, 1000, 5, (0, 2)),
    ]
    pods = [Engine(SPEED, cache_tokens=CACHE_TOKENS, seed=i) for i in range(2)]
    served = simulate(requests, pods, Clairvoyant(pods, 1, requests=requests, slo=SLO)).served
    assert served[1].route.decode != served[2].route.decode


def test_more_targets_are_met_than_by_a_blind_router() -> None:
    requests = conversations(120, rate=8.0, seed=7)

    def goodput(is_bound: bool) -> float:
        pods = engines(4, seed=3)
        router = (
            Clairvoyant(pods, 3, requests=requests, slo=SLO) if is_bound else RoundRobin(pods, 3)
        )
        return simulate(requests, pods, router).goodput(SLO)

    assert goodput(True) > goodput(False)
