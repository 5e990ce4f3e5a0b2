"""Queues whose waits are known, on simulated engines: how far the simulation is from them."""

import heapq
from collections.abc import Callable, Sequence
from math import factorial
from random import Random
from statistics import fmean
from typing import NamedTuple

from tandem_planner.simulation.engine import Batching, Engine
from tandem_planner.simulation.loop import AT_ONCE, simulate
from tandem_planner.simulation.routers import RoundRobin
from tandem_planner.simulation.work import Request
from tandem_planner.step_cost import LinearStep

_ROOM = 10**9
"""Tokens of KV: no request waits for room."""


class Wait(NamedTuple):
    """Mean seconds that requests waited."""

    simulated: float
    exact: float
    """Of the same arrivals and services, by the recursion of the queue."""
    expected: float
    """Of infinitely many, by the formula."""


def md1(utilization: float, *, count: int, seed: int = 1) -> Wait:
    """Prompts of one length, computed one by one. With services of s seconds,

    W = ρ s ÷ (2 (1 - ρ))                           (Pollaczek, 1930; Khinchine, 1932)
    """
    step = LinearStep(0.01, 0.0, 0.0, 1e-4, 0.0)
    tokens = 900
    service = step.seconds(0, 0, tokens)
    requests = _poisson(utilization / service, count, seed, lambda random: (tokens, 1))
    pod = Engine(step, cache_tokens=_ROOM, seed=0, batching=Batching(1000, 1), noise=0.0)
    waits = [ttft - service for ttft in _ttfts(requests, pod)]
    exact = _waits(requests, [service] * count, 1)
    return Wait(fmean(waits), exact, utilization * service / (2 * (1 - utilization)))


def mmc(servers: int, utilization: float, *, count: int, seed: int = 1) -> Wait:
    """Answers of exponential length, `servers` at a time. With Erlang's C (1917),

        W = C(c, ρ) ÷ (c μ - λ)

    An answer joins at the next step: steps are short beside answers."""
    seconds, mean = 0.001, 1000
    step = LinearStep(seconds, 0.0, 0.0, 0.0, 0.0)
    rate = utilization * servers / (mean * seconds)

    def lengths(random: Random) -> tuple[int, int]:
        return 1, max(1, round(random.expovariate(1 / mean)))

    requests = _poisson(rate, count, seed, lengths)
    pod = Engine(step, cache_tokens=_ROOM, seed=0, batching=Batching(4096, servers), noise=0.0)
    # The first token is there a step after the wait.
    waits = [ttft - seconds for ttft in _ttfts(requests, pod)]
    exact = _waits(requests, [seconds * request.output_tokens for request in requests], servers)
    expected = _erlang_c(servers, utilization) / (servers / (mean * seconds) - rate)
    return Wait(fmean(waits), exact, expected)


def _ttfts(requests: Sequence[Request], pod: Engine) -> list[float]:
    router = RoundRobin([pod], 0)
    served = simulate(requests, [pod], router, timing=AT_ONCE, is_lazy=True).served
    return [each.ttft for each in served]


def _waits(requests: Sequence[Request], services: Sequence[float], servers: int) -> float:
    """Mean wait in a queue with this many servers (Kiefer and Wolfowitz, 1955)."""
    free, total = [0.0] * servers, 0.0
    for request, service in zip(requests, services, strict=True):
        begin = max(request.at, free[0])
        total += begin - request.at
        heapq.heapreplace(free, begin + service)
    return total / len(requests)


Lengths = Callable[[Random], tuple[int, int]]


def _poisson(rate: float, count: int, seed: int, lengths: Lengths) -> list[Request]:
    random, at, requests = Random(seed), 0.0, []
    for _ in range(count):
        at += random.expovariate(rate)
        requests.append(Request(at, *lengths(random)))
    return requests


def _erlang_c(servers: int, utilization: float) -> float:
    load = servers * utilization
    last = load**servers / factorial(servers) / (1 - utilization)
    return last / (sum(load**k / factorial(k) for k in range(servers)) + last)
