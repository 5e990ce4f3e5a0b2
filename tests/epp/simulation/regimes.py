"""Loads and pods with which routers break, beside the plain ones: what differs in each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from math import ceil
from random import Random
from typing import Final

from tandem_cli.plan.inputs import read_model
from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.loop import Simulation
from tandem_planner.simulation.work import Request
from tandem_planner.sizing.gpus import GPUS
from tandem_planner.sizing.roofline import RooflineStep

from .pods import CACHE_TOKENS, engines, speed_of
from .real_picker import PickerSettings, RealPicker, Reports
from .replicas import ReplicatedPicker
from .scenarios import PODS, NewRouter, Pods
from .workload import conversations, shared_prompts

_AGENTS: Final = 5
"""Kinds of agents, each with instructions and tools of its own."""
_AGENT_BLOCKS: Final = 12
_AGENT_TURNS: Final = 12
_AGENT_ADDED: Final = 1500
"""Tokens that a turn adds, on average."""
_AGENT_OUTPUT: Final = 150
_TOOL_SECONDS: Final = 4.0
_ABSENT_SECONDS: Final = 90.0
_ABSENT_SHARE: Final = 0.1
"""Share of the turns before which the user is away."""
_BURST: Final = 40
"""Requests within 20 ms."""
_LONGER: Final = 6
"""How much longer than usual long answers are."""
_TINY_CACHE: Final = 200_000
_THROTTLED: Final = 60.0
"""Seconds after which one pod computes at a third of its speed."""


def agent_sessions(number: int, *, rate: float, seed: int) -> list[Request]:
    """About `number` requests of agents, `rate` per second on average: many short turns over a
    growing prompt, with a tool's time between them, and sometimes a user's."""
    random, ids, start = Random(seed), count(_AGENTS * _AGENT_BLOCKS), 0.0
    requests: list[Request] = []
    while len(requests) < number:
        start += random.expovariate(rate / _AGENT_TURNS)
        at, first = start, random.randrange(_AGENTS) * _AGENT_BLOCKS
        blocks = list(range(first, first + _AGENT_BLOCKS))
        tokens = _AGENT_BLOCKS * BLOCK
        while True:
            tokens += 1 + int(random.expovariate(1 / _AGENT_ADDED))
            blocks += [next(ids) for _ in range(ceil(tokens / BLOCK) - len(blocks))]
            output = 1 + int(random.expovariate(1 / _AGENT_OUTPUT))
            requests.append(Request(at, tokens, output, tuple(blocks)))
            if random.random() < 1 / _AGENT_TURNS:
                break
            is_absent = random.random() < _ABSENT_SHARE
            pause = _ABSENT_SECONDS if is_absent else _TOOL_SECONDS
            at += output * 0.015 + random.expovariate(1 / pause)
            # The last block is partial: the next turn fills it with other tokens.
            blocks.pop()
    return sorted(requests, key=lambda request: request.at)


def bursts(number: int, *, rate: float, seed: int) -> list[Request]:
    """Bursts of requests that share 95 % of a prompt of 8,192 tokens, each another one, among
    conversations that make up half of the `rate`."""
    requests = conversations(number // 2, rate=rate / 2, seed=seed)
    shift = 1 + max(block for request in requests for block in request.blocks)
    for i in range(number // 2 // _BURST):
        at = 2 * _BURST / rate * (i + 0.5)
        for j, each in enumerate(
            shared_prompts(_BURST, prompt_tokens=8192, shared=0.95, output_tokens=200)
        ):
            # Blocks of a burst are its own.
            blocks = tuple(shift + 1000 * i + block for block in each.blocks)
            requests.append(each._replace(at=at + j * 5e-4, blocks=blocks))
    return sorted(requests, key=lambda request: request.at)


def long_outputs(number: int, *, rate: float, seed: int) -> list[Request]:
    """Conversations with long answers."""
    return [
        request._replace(output_tokens=_LONGER * request.output_tokens)
        for request in conversations(number, rate=rate, seed=seed)
    ]


def _many(number: int, *, rate: float, seed: int) -> list[Request]:
    return conversations(10 * number, rate=10 * rate, seed=seed)


def _pods(seed: int) -> list[Engine]:
    return engines(PODS, seed)


def _hundred_pods(seed: int) -> list[Engine]:
    return engines(10 * PODS, seed)


def _tiny_caches(seed: int) -> list[Engine]:
    return engines(PODS, seed, cache_tokens=_TINY_CACHE)


def _two_speeds(seed: int) -> list[Engine]:
    pods = engines(PODS, seed, cache_tokens=CACHE_TOKENS)
    for pod in pods[::2]:
        pod.speed = speed_of(pod).times(2.0)
    return pods


def _rooflines(seed: int) -> list[Engine]:
    """Steps of another form than the one that the picker fits: A100s by their rooflines. Weights
    are read or computed with, whichever takes longer, so that the first hundred prompt tokens of a
    step with decodes cost nothing, and more decodes only the KV that they read."""
    model, _ = read_model("llama-3.1-8b")
    gpu, random = GPUS["a100"], Random(seed)
    pods = engines(PODS, seed)
    for pod in pods:
        bf16, bandwidth = (peak * random.uniform(0.7, 1.3) for peak in (gpu.bf16, gpu.bandwidth))
        pod.speed = RooflineStep(model, gpu._replace(bf16=bf16, bandwidth=bandwidth), 1)
    return pods


def _nothing(simulation: Simulation) -> None:
    """Nothing happens on the way."""


def _throttle(simulation: Simulation) -> None:
    pod = simulation.pods[0]

    def slow_down() -> None:
        pod.speed = speed_of(pod).times(1 / 3)

    simulation.at(_THROTTLED, slow_down)


def _empty_a_cache(simulation: Simulation) -> None:
    pod = simulation.pods[0]
    simulation.at(_THROTTLED, pod.pool.forget)


def _without_max_tokens(pods: Pods, seed: int) -> RealPicker:
    return RealPicker(pods, seed, PickerSettings(says_max_tokens=False))


def _with_vllm_reports(pods: Pods, seed: int) -> RealPicker:
    return RealPicker(pods, seed, PickerSettings(reports=Reports.SIDECAR))


@dataclass(frozen=True)
class Regime:
    """What differs from made-up conversations on ten pods."""

    requests: Callable[..., list[Request]] = conversations
    """As `workload.conversations`."""
    pods: Callable[[int], list[Engine]] = _pods
    begin: Callable[[Simulation], None] = _nothing
    """Plans what happens on the way."""
    picker: NewRouter = RealPicker
    """The picker, with what it does not know in this regime."""


PLAIN: Final = "plain"
REGIMES: Final[Mapping[str, Regime]] = {
    PLAIN: Regime(),
    "bursts": Regime(bursts),
    "agents": Regime(agent_sessions),
    "long outputs": Regime(long_outputs),
    "two speeds": Regime(pods=_two_speeds),
    "cold pod": Regime(begin=_empty_a_cache),
    "tiny caches": Regime(pods=_tiny_caches),
    "rooflines": Regime(pods=_rooflines),
    "throttled pod": Regime(begin=_throttle),
    "unknown max_tokens": Regime(picker=_without_max_tokens),
    "100 pods": Regime(_many, _hundred_pods),
    "three replicas": Regime(picker=ReplicatedPicker),
    "vLLM's reports": Regime(picker=_with_vllm_reports),
}
