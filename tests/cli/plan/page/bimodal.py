"""The workload of the page and its simulation, in Python: what kernel.js must agree with."""

from collections.abc import Callable, Iterator
from typing import Any

from tandem_planner.kv_size import KvSize
from tandem_planner.simulation.engine import Batching, Engine
from tandem_planner.simulation.link import Link
from tandem_planner.simulation.loop import AT_ONCE, simulate
from tandem_planner.simulation.measures import Result
from tandem_planner.simulation.routers import LeastWork, Pools
from tandem_planner.simulation.work import Request
from tandem_planner.transfer import TransferCost

from .cases import step_of

Json = dict[str, Any]
_MASK = 0xFFFFFFFF


def uniforms(seed: int) -> Iterator[float]:
    """Numbers in [0, 1) from 32 bits: Mulberry32."""
    state = seed & _MASK
    while True:
        state = (state + 0x6D2B79F5) & _MASK
        bits = (state ^ state >> 15) * (state | 1) & _MASK
        bits ^= (bits + (bits ^ bits >> 7) * (bits | 61)) & _MASK
        yield ((bits ^ bits >> 14) & _MASK) / 2**32


def exponential(uniform: Callable[[], float]) -> float:
    """An exponential variate with mean 1, by von Neumann's comparisons."""
    whole = 0
    while True:
        first = last = uniform()
        count = 1
        while (following := uniform()) < last:
            last, count = following, count + 1
        if count % 2:
            return whole + first
        whole += 1


def workload(settings: Json) -> list[Request]:
    """As `Kernel.workload`."""
    seed, rate, tokens = settings["seed"], settings["rate"], settings["longTokens"]
    gaps, lengths = uniforms(seed).__next__, uniforms(seed ^ 0x9E3779B9).__next__
    least, half = max(1, 2 * tokens // 3), settings["outputTokens"] // 2
    requests, at = [], 0.0
    for _ in range(settings["count"]):
        at += exponential(gaps) / rate
        is_long, length, answer = lengths() < settings["long"], lengths(), lengths()
        prompt = least + int(length * (least + 1)) if is_long else 50 + int(length * 151)
        requests.append(Request(at, prompt, max(1, half + int(answer * (2 * half + 1)))))
    return requests


def served(deployment: Json, requests: list[Request]) -> Json:
    """What becomes of requests, as `SERVED` in the browser says it."""
    result = simulated(deployment, requests)
    pods = result.pods
    return {
        "requests": [[s.work.started, s.first_token, s.ended, s.itl or 0.0] for s in result.served],
        "routes": [[s.route.prefill, s.route.decode] for s in result.served],
        "busy": [pod.busy for pod in pods],
        "links": [pod.link.busy for pod in pods if pod.link is not None],
        "preemptions": sum(int(pod.totals["preemptions"]) for pod in pods),
        "gap99": result.gap_percentile(99),
    }


def simulated(deployment: Json, requests: list[Request]) -> Result:
    """Requests on the pods of a deployment, as `Kernel.simulate` takes it."""
    prefills = _pods(deployment["prefill"], None)
    decodes = _pods(deployment["decode"], deployment["link"] if prefills else None)
    pods = [*prefills, *decodes]
    numbers = range(len(pods))
    pools = Pools(numbers[: len(prefills)], numbers[len(prefills) :]) if prefills else None
    return simulate(requests, pods, LeastWork(pods, pools), timing=AT_ONCE, is_lazy=True)


def _pods(pool: Json | None, link: Json | None) -> list[Engine]:
    if pool is None:
        return []
    return [
        Engine(
            step_of(pool),
            cache_tokens=pool["tokens"],
            seed=0,
            batching=Batching(pool["budget"], pool["requests"], pool["isChunked"]),
            link=_link(link) if link else None,
            noise=0.0,
        )
        for _ in range(pool["replicas"])
    ]


def _link(link: Json) -> Link:
    cost = TransferCost(link["latency"], link["perByte"])
    return Link(cost, KvSize(*link["kv"]), streamed=link["streamed"])
