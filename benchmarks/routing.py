"""How well the picker routes, over simulated pods (tests/epp/simulation), beside other policies.

    python -m benchmarks.routing [--trace mooncake.jsonl] [--seeds 5] [--only NAME] [--json FILE]

Ten pods of about 10,000 prompt tokens per second (±30 %) that each hold 1,000,000 tokens of KV get
the same requests from each router: the picker with its default configuration, the picker with
llm-d's default weights, the pod with the fewest requests, one pod after the other, and an oracle
that minimises the picker's cost with perfect knowledge of rates, queues and caches. *Waiting* is
TTFT less the time that the request's own uncached prefill takes on its pod while nothing else runs,
since no router can shorten that. Only decisions are real; time is not.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import click
from tests.epp.simulation import scenarios
from tests.epp.simulation.policies import LeastLoaded, Oracle, RoundRobin
from tests.epp.simulation.real_picker import LLMD_DEFAULT, PickerSettings, RealPicker, Reports
from tests.epp.simulation.replicas import ReplicatedPicker
from tests.epp.simulation.run import CACHE_TOKENS, engines, simulate
from tests.epp.simulation.scenarios import PODS, NewRouter
from tests.epp.simulation.workload import Request, conversations, from_trace

from .figures import Figure, at_least, at_most, progress, report, without_target

T = TypeVar("T")
_CONVERSATIONS: Final = 3000
"""Requests without a trace."""
_CONVERSATION_RATE: Final = 10.0
"""Requests per second without a trace, at speed 1: about half of what the pods can compute."""
_ROUTERS: Final[Mapping[str, NewRouter]] = {
    "picker": RealPicker,
    "llm-d weights": partial(RealPicker, settings=PickerSettings(LLMD_DEFAULT)),
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "oracle": Oracle,
    "three replicas": ReplicatedPicker,
    "exact caches": partial(RealPicker, settings=PickerSettings(has_exact_caches=True)),
    "sidecars of vLLM": partial(RealPicker, settings=PickerSettings(reports=Reports.SIDECAR)),
    "no sidecars": partial(RealPicker, settings=PickerSettings(reports=Reports.NOTHING)),
}
_SCORERS: Final = "{type: prefix-cache-scorer}, {type: active-request-scorer}"
_DECIDERS: Final[Mapping[str, str]] = {
    "by cost": "{}",
    "always": f"plugins: [{{type: always-disagg-pd-decider}}, {_SCORERS}]",
    "from 512 uncached tokens": (
        "plugins: [{type: prefix-based-pd-decider, parameters: {nonCachedTokens: 512}}, "
        f"{_SCORERS}]"
    ),
}
"""Configurations that split requests differently."""
_TARGETS: Final = {"llm-d weights": 0.35, "least-loaded": 0.35, "round-robin": 0.25}
"""Policy → largest p99 waiting of the picker as a multiple of the policy's."""


class Runs:
    """Runs trials in processes, on a trace or on conversations that are made up."""

    def __init__(self, trace: Path | None, seeds: int, pool: ProcessPoolExecutor) -> None:
        self.trace, self.seeds, self._pool = trace, seeds, pool
        self._routers: dict[tuple[str, float], list[Future[Trial]]] = {}

    def each(self, trial: Callable[..., T], *args: object) -> list[T]:
        """`trial(seed, *args)` for every seed."""
        futures = [self._pool.submit(trial, seed, *args) for seed in range(self.seeds)]
        return [future.result() for future in futures]

    def start(self, routers: Sequence[str], speed: float) -> None:
        """Begin to run the routers at this speed, unless they were already."""
        for router in routers:
            if (router, speed) not in self._routers:
                self._routers[router, speed] = [
                    self._pool.submit(_trial, seed, self.trace, speed, router)
                    for seed in range(self.seeds)
                ]

    def router(self, name: str, speed: float) -> list["Trial"]:
        """The results of a router on the requests at `speed`, one per seed."""
        self.start([name], speed)
        return [future.result() for future in self._routers[name, speed]]


def _requests(trace: Path | None, speed: float, seed: int) -> list[Request]:
    if trace is None:
        return conversations(_CONVERSATIONS, rate=_CONVERSATION_RATE * speed, seed=seed)
    return from_trace(trace, speed=speed)


class Trial(NamedTuple):
    """How a router did."""

    waiting: float
    """p99, in seconds."""
    hit_tokens: int
    """Prompt tokens found in caches."""
    hit_ratio: float


def _trial(seed: int, trace: Path | None, speed: float, router: str) -> Trial:
    pods = engines(PODS, seed)
    result = simulate(_requests(trace, speed, seed), pods, _ROUTERS[router](pods, seed))
    return Trial(result.waiting_percentile(99), result.hit_tokens(), result.hit_ratio())


def _half_speed_trial(seed: int, trace: Path | None) -> tuple[float, float, float]:
    return scenarios.half_speed(_requests(trace, 1.0, seed), seed)


def _split_trial(seed: int, trace: Path | None, scheduling: str) -> scenarios.Latency:
    return scenarios.split_latency(_requests(trace, 1.0, seed), seed, scheduling)


def _steady(runs: Runs) -> list[Figure]:
    """Every router on the same requests."""
    figures = []
    for speed in (1.0, 2.0):
        progress(f"requests at {speed:g} times their speed, {runs.seeds} seeds")
        runs.start(["picker", "oracle", *_TARGETS], speed)
        picker, oracle = runs.router("picker", speed), runs.router("oracle", speed)
        for policy, target in _TARGETS.items():
            name = f"p99 waiting at {speed:g} ×, over that with {policy}"
            ratios = _waiting_ratios(picker, runs.router(policy, speed))
            figures.append(at_most(name, ratios, "ratio", target))
        hits = [
            own.hit_tokens / other.hit_tokens for own, other in zip(picker, oracle, strict=True)
        ]
        name = f"hit tokens at {speed:g} ×, over those with the oracle"
        figures.append(at_least(name, hits, "ratio", 0.95))
        name = f"p99 waiting at {speed:g} ×, over that with the oracle"
        figures.append(without_target(name, _waiting_ratios(picker, oracle), "ratio"))
    return figures


def _waiting_ratios(trials: Sequence[Trial], others: Sequence[Trial]) -> list[float]:
    return [trial.waiting / other.waiting for trial, other in zip(trials, others, strict=True)]


def _hit_points(trials: Sequence[Trial], others: Sequence[Trial]) -> list[float]:
    """By how many points the hit ratio is lower than that of the others."""
    pairs = zip(trials, others, strict=True)
    return [100 * (other.hit_ratio - trial.hit_ratio) for trial, other in pairs]


def _knowledge(runs: Runs) -> list[Figure]:
    """Less or more knowledge than that of one picker which infers what pods cache."""
    progress("three replicas, exact caches, and less exact reports of prefills")
    names = ("three replicas", "exact caches", "sidecars of vLLM", "no sidecars")
    runs.start(["picker", *names], 2.0)
    picker, replicas, exact, vllm, bare = (runs.router(n, 2.0) for n in ("picker", *names))
    waiting = "{}: p99 waiting at 2 ×, over that with {}".format
    hits = "{}: points of hit ratio at 2 × below {}".format
    one, reports = "one", "exact reports"
    return [
        at_most(hits("three replicas", one), _hit_points(replicas, picker), "points", 1.0),
        at_most(waiting("three replicas", one), _waiting_ratios(replicas, picker), "ratio", 1.05),
        at_most(hits("inferred caches", "exact ones"), _hit_points(picker, exact), "points", 3.0),
        without_target(
            waiting("inferred caches", "exact ones"), _waiting_ratios(picker, exact), "ratio"
        ),
        without_target(waiting("vLLM's usage", reports), _waiting_ratios(vllm, picker), "ratio"),
        without_target(waiting("no sidecars", reports), _waiting_ratios(bare, picker), "ratio"),
    ]


def _split(runs: Runs) -> list[Figure]:
    """When to split, over six prefill and four decode pods."""
    progress("splitting by cost, always, and by a threshold")
    figures = []
    for name, scheduling in _DECIDERS.items():
        trials = runs.each(_split_trial, runs.trace, scheduling)
        figures += [
            without_target(f"split {name}: p99 TTFT", [t.ttft for t in trials], "s"),
            without_target(f"split {name}: p99 ITL", [1e3 * t.itl for t in trials], "ms"),
            without_target(f"split {name}: share of requests", [t.split for t in trials], "share"),
        ]
    return figures


def _shared(runs: Runs) -> list[Figure]:
    progress("a shared system prompt, 200 requests at once")
    burst = runs.each(scenarios.burst_imbalance)
    loop = runs.each(scenarios.loop_imbalance)
    name = "shared prompt, 200 {}: most in flight over the mean"
    return [
        at_most(name.format("within 20 ms"), burst, "ratio", 1.3),
        at_most(name.format("in a closed loop"), loop, "ratio", 1.3),
    ]


def _long_prompts(runs: Runs) -> list[Figure]:
    progress("a long prompt whose cache is on a pod with one running stream, or with a queue")
    idle = [trial.went_to_cache for trial in runs.each(scenarios.long_prompt, 0)]
    busy = [trial.went_to_cache for trial in runs.each(scenarios.long_prompt, 10)]
    return [
        at_least("long prompts sent to their cache beside one stream", _share(idle), "share", 1.0),
        at_most("long prompts sent to their cache behind 20 s of work", _share(busy), "share", 0.0),
    ]


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def _failing(runs: Runs) -> list[Figure]:
    progress("a pod that answers 500")
    met = runs.each(scenarios.retries_that_meet_the_failing_pod)
    return [at_most("retries of 50 that meet a pod that answers 500", met, "requests", 2)]


def _half_speed(runs: Runs) -> list[Figure]:
    progress("one pod at half of its speed")
    trials = runs.each(_half_speed_trial, runs.trace)
    share, over_all, over_others = ([trial[i] for trial in trials] for i in range(3))
    name = "a pod at half speed: {}"
    return [
        at_most(name.format("its work over that at full speed"), share, "ratio", 0.7),
        at_least(name.format("its work over that at full speed"), share, "ratio", 0.3),
        at_most(name.format("p99 waiting over that at full speed"), over_all, "ratio", 1.2),
        at_most(name.format("p99 waiting over that without the pod"), over_others, "ratio", 1.2),
    ]


_EXPERIMENTS: Final[Mapping[str, Callable[[Runs], list[Figure]]]] = {
    "steady": _steady,
    "knowledge": _knowledge,
    "shared": _shared,
    "long": _long_prompts,
    "failing": _failing,
    "half-speed": _half_speed,
    "split": _split,
}


@click.command()
@click.option("--trace", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--seeds", default=2, show_default=True, help="runs of each simulation")
@click.option("--processes", default=2, show_default=True, help="simulations at once")
@click.option("--only", type=click.Choice(list(_EXPERIMENTS)), help="run this experiment alone")
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
def main(
    trace: Path | None, seeds: int, processes: int, only: str | None, file: Path | None
) -> None:
    """Simulate routers; without --trace, on conversations that it makes up."""
    progress(f"{PODS} pods of 10,000 tokens/s, {CACHE_TOKENS:g} tokens of KV each")
    with ProcessPoolExecutor(processes) as pool:
        runs = Runs(trace, seeds, pool)
        names = [only] if only else list(_EXPERIMENTS)
        report([figure for name in names for figure in _EXPERIMENTS[name](runs)], file)


if __name__ == "__main__":
    main()
