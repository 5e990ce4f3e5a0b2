"""How well the picker routes, over simulated pods (tests/epp/simulation), beside other policies.

    python -m benchmarks.routing [--trace mooncake.jsonl] [--seeds 5] [--json FILE]

Ten pods of about 10,000 prompt tokens per second (±30 %) with caches of 1,000,000 tokens get the
same requests from each router: the picker with its default configuration, the picker with llm-d's
default weights, the pod with the fewest requests, one pod after the other, and an oracle that knows
rates, queues and caches exactly. *Waiting* is TTFT less the time that the request's own uncached
prefill takes on its pod, since no router can shorten that. Only decisions are real; time is not.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Final

import click
from tests.epp.simulation.engine import Engine
from tests.epp.simulation.routers import (
    LLMD_DEFAULT,
    LeastLoaded,
    Oracle,
    RealPicker,
    RoundRobin,
    Router,
)
from tests.epp.simulation.run import CACHE_TOKENS, RATE, Result, engines, simulate
from tests.epp.simulation.workload import Request, conversations, from_trace, shared_prompt

from .figures import Figure, at_least, at_most, progress, report

PODS: Final = 10
_CONVERSATIONS: Final = 3000
"""Requests without a trace."""
_CONVERSATION_RATE: Final = 10.0
"""Requests per second without a trace, at speed 1: about half of what the pods can compute."""
_ROUTERS: Final[Mapping[str, Callable[[Sequence[Engine], int], Router]]] = {
    "picker": lambda pods, seed: RealPicker(pods, "{}", seed),
    "llm-d weights": lambda pods, seed: RealPicker(pods, LLMD_DEFAULT, seed),
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "oracle": Oracle,
}
_TARGETS: Final = {"llm-d weights": 0.35, "least-loaded": 0.35, "round-robin": 0.25}
"""Policy → largest p99 waiting of the picker as a multiple of the policy's."""


def _requests(trace: Path | None, speed: float, seed: int) -> list[Request]:
    if trace is None:
        return conversations(_CONVERSATIONS, rate=_CONVERSATION_RATE * speed, seed=seed)
    return from_trace(trace, speed=speed)


def _trial(trace: Path | None, speed: float, seed: int, router: str) -> tuple[float, int]:
    """p99 waiting in seconds, and prompt tokens found in caches."""
    pods = engines(PODS, seed)
    result = simulate(_requests(trace, speed, seed), pods, _ROUTERS[router](pods, seed))
    return result.waiting_percentile(99), result.hit_tokens()


def _steady(trace: Path | None, seeds: int, pool: ProcessPoolExecutor) -> list[Figure]:
    """Every router on the same requests."""
    figures = []
    for speed in (1.0, 2.0):
        progress(f"requests at {speed:g} times their speed, {seeds} seeds, {len(_ROUTERS)} routers")
        trials = {
            router: [pool.submit(_trial, trace, speed, seed, router) for seed in range(seeds)]
            for router in _ROUTERS
        }
        waiting = {name: [t.result()[0] for t in futures] for name, futures in trials.items()}
        hits = {name: [t.result()[1] for t in futures] for name, futures in trials.items()}
        for policy, target in _TARGETS.items():
            ratios = _ratios(waiting["picker"], waiting[policy])
            name = f"p99 waiting at {speed:g} ×, over that with {policy}"
            figures.append(at_most(name, ratios, "ratio", target))
        ratios = _ratios(hits["picker"], hits["oracle"])
        name = f"hit tokens at {speed:g} ×, over those with the oracle"
        figures.append(at_least(name, ratios, "ratio", 0.95))
    return figures


def _ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]


def _shared(seeds: int) -> Figure:
    """200 requests at once, of which 95 % of every prompt is the same."""
    progress("a shared system prompt, 200 requests at once")
    spreads = []
    for seed in range(seeds):
        pods = engines(PODS, seed)
        # One request before the others, so that the shared part is cached on one pod.
        first, *others = shared_prompt(201, prompt_tokens=8192, shared=0.95, output_tokens=200)
        later = [Request(10.0, r.prompt_tokens, r.output_tokens, r.blocks) for r in others]
        result = simulate([first, *later], pods, RealPicker(pods, "{}", seed))
        spreads.append(_imbalance(result))
    return at_most("shared prompt: most in flight over the mean", spreads, "ratio", 1.3)


def _imbalance(result: Result) -> float:
    """Most requests of a pod over the mean of all pods, without the first request."""
    counts = [result.chosen[1:].count(pod) for pod in range(PODS)]
    return max(counts) / fmean(counts)


def _long_prompt(seeds: int) -> Figure:
    """A prompt of 100,000 tokens, 60,000 of them cached on a pod that streams one answer."""
    progress("a long prompt whose cache is on a pod with one running stream")
    rights = 0
    for seed in range(seeds):
        pods = engines(PODS, seed)
        first = Request(0.0, 60_000, 2000, tuple(range(118)))
        long = Request(15.0, 100_000, 10, (*range(117), *range(1000, 1079)))
        result = simulate([first, long], pods, RealPicker(pods, "{}", seed))
        rights += result.chosen[0] == result.chosen[1]
    return at_least("long prompts sent to their cache", rights / seeds, "share", 1.0)


@click.command()
@click.option("--trace", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--seeds", default=2, show_default=True, help="runs of each simulation")
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
def main(trace: Path | None, seeds: int, file: Path | None) -> None:
    """Simulate routers; without --trace, on conversations that it makes up."""
    progress(f"{PODS} pods of {RATE:g} tokens/s, {CACHE_TOKENS:g} cached tokens each")
    with ProcessPoolExecutor() as pool:
        figures = _steady(trace, seeds, pool)
    report([*figures, _shared(seeds), _long_prompt(seeds)], file)


if __name__ == "__main__":
    main()
