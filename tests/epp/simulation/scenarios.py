"""Whole experiments on simulated pods, each with the figures that its target is about."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean

from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.loop import TICK, Simulation, simulate
from tandem_planner.simulation.measures import Outcome
from tandem_planner.simulation.routers import Router
from tandem_planner.simulation.work import Request

from .pods import CACHE_TOKENS, SPEED, engines, speed_of
from .real_picker import RealPicker
from .workload import shared_prompts

Pods = Sequence[Engine]
NewRouter = Callable[[Pods, int], Router]
"""Makes a router for pods, with a seed."""
PODS = 10
_SAMPLED = 20
"""A closed loop is sampled at each request whose number is a multiple of this."""
_LONG_BLOCKS = 196
"""Blocks of a prompt of about 100,000 tokens."""
_CACHED_BLOCKS = 117
"""Blocks of it that one pod holds: 60 %."""


def burst_imbalance(seed: int, new_router: NewRouter = RealPicker) -> float:
    """200 requests within 20 ms that share 95 % of their prompts, which one pod has cached: most
    requests of a pod over the mean of all pods."""
    pods = engines(PODS, seed)
    # One request before the others, so that the shared part is cached on one pod.
    first, *others = shared_prompts(201, prompt_tokens=8192, shared=0.95, output_tokens=200)
    simulation = Simulation(pods, new_router(pods, seed))
    simulation.send(first, 0.0)
    for i, request in enumerate(others):
        simulation.send(request, 10.0 + i * 1e-4)
    served = simulation.run().served
    return _most_over_mean([s.route.decode for s in served[1:]])


def loop_imbalance(
    seed: int, new_router: NewRouter = RealPicker, *, requests: int = 2000, clients: int = 200
) -> float:
    """`clients` that each send the next request when their last one has ended, with 95 % of each
    prompt shared: most requests in flight on a pod over the mean of all pods, averaged over the
    second half of the run."""
    pods = engines(PODS, seed)
    prompts = iter(shared_prompts(requests, prompt_tokens=8192, shared=0.95, output_tokens=200))
    ratios = []

    def on_end(served: Outcome, now: float) -> None:
        if (request := next(prompts, None)) is None:
            return
        simulation.send(request, now)
        number = len(simulation.served)
        if number > requests // 2 and number % _SAMPLED == 0:
            active = [s.route.decode for s in simulation.served if s.ended is None]
            ratios.append(_most_over_mean(active))

    simulation = Simulation(pods, new_router(pods, seed), on_end)
    for i in range(clients):
        # Arrivals of real clients are a few milliseconds apart.
        simulation.send(next(prompts), i * 1e-3)
    simulation.run(tick=TICK)
    return fmean(ratios)


def least_share(seed: int, new_router: NewRouter = RealPicker) -> float:
    """Requests at low load, without a common prefix, to two pods of one speed: the share of the pod
    that gets fewer."""
    pods = [Engine(SPEED, cache_tokens=CACHE_TOKENS, seed=2 * seed + i) for i in range(2)]
    requests = [Request(2.0 * i, 1000, 20, (2 * i, 2 * i + 1)) for i in range(100)]
    served = simulate(requests, pods, new_router(pods, seed)).served
    first = sum(each.route.decode == 0 for each in served)
    return min(first, len(served) - first) / len(served)


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """What happened to a prompt of 100,000 tokens of which one pod has 60 % cached."""

    went_to_cache: bool
    ttft: float
    """Seconds."""


def long_prompt(seed: int, queued: int) -> LongPrompt:
    """Low load: the pod with the cache streams one answer, and has `queued` prompts of 20,000
    tokens in its queue, which the gateway's subset hint sends there."""
    pods, ids = engines(PODS, seed), count(10_000)
    cached = tuple(range(_CACHED_BLOCKS))
    simulation = Simulation(pods, RealPicker(pods, seed))
    first = Request(0.0, BLOCK * len(cached), 6000, cached, only=0)
    simulation.send(first, 0.0)
    for _ in range(queued):
        blocks = tuple(next(ids) for _ in range(39))
        simulation.send(Request(0.0, 20_000, 10, blocks, only=0), 20.0)
    own = tuple(next(ids) for _ in range(_LONG_BLOCKS - _CACHED_BLOCKS))
    simulation.send(Request(0.0, BLOCK * _LONG_BLOCKS, 10, (*cached, *own)), 20.01)
    served = simulation.run().served[-1]
    return LongPrompt(served.route.decode == 0, served.ttft)


def retries_that_meet_the_failing_pod(
    seed: int, retries: int = 50, new_router: NewRouter = RealPicker
) -> int:
    """A pod that has answered a client's prompt begins to answer 500: how many of the client's
    `retries`, one after the other, reach it after the first failure."""
    pods = engines(PODS, seed)
    prompt = Request(0.0, 8192, 20, tuple(range(16)))
    pinned = prompt._replace(only=0)
    attempts = iter([pinned, *[prompt] * retries])

    def on_end(served: Outcome, now: float) -> None:
        simulation.failing.add(0)
        if (attempt := next(attempts, None)) is not None:
            simulation.send(attempt, now + 0.1)

    simulation = Simulation(pods, new_router(pods, seed), on_end)
    simulation.send(pinned, 0.0)
    _answered, failed, *retried = simulation.run(tick=TICK).served
    if failed.status != 500:
        raise ValueError("the failing pod answered")
    return sum(served.status == 500 for served in retried)


@dataclass(frozen=True, slots=True)
class HalfSpeed:
    """What became of a pod that is slower than it was, and of the requests."""

    work: float
    """Prompt tokens that the pod computed, over those that it computed at its own speed: speeds
    differ anyway."""
    requests: float
    """Requests that it served, over the mean of all pods."""
    waiting_over_full: float
    """p99 waiting over that of the same pods, all at their speed."""
    waiting_over_without: float
    """p99 waiting over that of the others alone."""


def half_speed(
    requests: Sequence[Request], seed: int, new_router: NewRouter = RealPicker
) -> HalfSpeed:
    """One of ten pods at half of its speed."""
    pods = engines(PODS, seed)
    slow = engines(PODS, seed)
    slow[0].speed = speed_of(slow[0]).times(0.5)
    others = engines(PODS, seed)[1:]
    results = [simulate(requests, p, new_router(p, seed)) for p in (slow, pods, others)]
    work = [each[0].totals["computed_tokens"] for each in (slow, pods)]
    waiting = [result.waiting_percentile(99) for result in results]
    served = sum(served.route.decode == 0 for served in results[0].served)
    return HalfSpeed(
        work[0] / work[1],
        served * PODS / len(requests),
        waiting[0] / waiting[1],
        waiting[0] / waiting[2],
    )


def _most_over_mean(chosen: Sequence[int]) -> float:
    """The largest number of requests of a pod over the mean of all pods."""
    return max(chosen.count(pod) for pod in range(PODS)) * PODS / len(chosen)
