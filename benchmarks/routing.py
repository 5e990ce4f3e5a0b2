"""How well the picker routes, over simulated pods (tests/epp/simulation), beside other policies.

    python -m benchmarks.routing [--trace FILE] [--speed 1] [--seeds 5] [--only NAME] [--json FILE]
    python -m benchmarks.routing --only rivals [--policy NAME] [--regime NAME] [--requests N] …

Ten pods of about 10,000 prompt tokens per second (±30 %) that each hold 1,000,000 tokens of KV get
the same requests from each router: the picker with its default configuration, the picker with
llm-d's older default weights, the pod with the fewest requests, one pod after the other, and the
picker's own cost with perfect knowledge of rates, queues and caches ("exact cost"). *Waiting* is
TTFT less the time that the request's own uncached prefill takes on its pod while nothing else runs,
since no router can shorten that. Only decisions are real; time is not. A decision takes the
simulated time that it really takes, one after the other in each replica of the EPP, and what one
places is known to the others after the time that benchmarks/exchange.py measures.

`--only rivals` prints a row for each rebuilt router of another project (routing_rivals.py) over the
unified pods, `--only pools` over six pods for prefill and four for decode; `--regime NAME` with
other loads and pods (tests/epp/simulation/regimes.py). `--policy clairvoyant` gives a bound.
`--only slo` and `--only slo-pools` compare the picker that knows an objective with itself.
`--only grants` takes away what the simulation grants the picker (routing_grants.py), and
`--only llmd-real` has llm-d's own EPP choose (routing_llmd.py).
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple, TypeVar

import click
from tests.epp.simulation import scenarios
from tests.epp.simulation.pods import CACHE_TOKENS, engines
from tests.epp.simulation.policies import ExactCost
from tests.epp.simulation.real_picker import LLMD_DEFAULT, PickerSettings, RealPicker, Reports
from tests.epp.simulation.regimes import PLAIN, REGIMES
from tests.epp.simulation.replicas import ReplicatedPicker
from tests.epp.simulation.scenarios import PODS, NewRouter

from tandem_planner.simulation.loop import simulate
from tandem_planner.simulation.routers import LeastLoaded, RoundRobin

from .figures import Figure, at_least, at_most, progress, report, without_target
from .routing_grants import compare_grants
from .routing_llmd import compare_with_real
from .routing_load import ROUNDED, Load
from .routing_rivals import SEPARATE, UNIFIED, compare
from .routing_slo import gains

T = TypeVar("T")
_ROUTERS: Final[Mapping[str, NewRouter]] = {
    "picker": RealPicker,
    "llm-d's older weights": partial(RealPicker, settings=PickerSettings(LLMD_DEFAULT)),
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "exact cost": ExactCost,
    "three replicas": ReplicatedPicker,
    "exact caches": partial(RealPicker, settings=PickerSettings(has_exact_caches=True)),
    "sidecars of vLLM": partial(RealPicker, settings=PickerSettings(reports=Reports.SIDECAR)),
    "no sidecars": partial(RealPicker, settings=PickerSettings(reports=Reports.NOTHING)),
}
_TARGETS: Final = {"llm-d's older weights": 0.35, "least-loaded": 0.35, "round-robin": 0.25}
"""Policy → largest p99 waiting of the picker as a multiple of the policy's."""


class Runs:
    """Runs trials in processes, on a trace or on conversations that are made up."""

    def __init__(
        self, load: Load, seeds: int, pool: ProcessPoolExecutor, policies: Sequence[str] = ()
    ) -> None:
        """`policies`: which rivals to run; none: all."""
        self.load, self.seeds, self.pool, self.policies = load, seeds, pool, policies
        self._routers: dict[tuple[str, Load], list[Future[Trial]]] = {}

    def each(self, trial: Callable[..., T], *args: object) -> list[T]:
        """`trial(seed, *args)` for every seed."""
        futures = [self.pool.submit(trial, seed, *args) for seed in range(self.seeds)]
        return [future.result() for future in futures]

    def start(self, routers: Sequence[str], speed: float, *, is_spread: bool = False) -> None:
        """Begin to run the routers at this speed, unless they were already."""
        load = self.load.times(speed, is_spread=is_spread)
        for router in routers:
            if (router, load) not in self._routers:
                self._routers[router, load] = [
                    self.pool.submit(_trial, seed, load, router) for seed in range(self.seeds)
                ]

    def router(self, name: str, speed: float, *, is_spread: bool = False) -> list["Trial"]:
        """The results of a router on the requests at `speed`, one per seed."""
        self.start([name], speed, is_spread=is_spread)
        load = self.load.times(speed, is_spread=is_spread)
        return [future.result() for future in self._routers[name, load]]


class Trial(NamedTuple):
    """How a router did."""

    waiting: float
    """p99, in seconds."""
    hit_tokens: int
    """Prompt tokens found in caches."""
    hit_ratio: float
    mean_waiting: float
    """In seconds."""


def _trial(seed: int, load: Load, router: str) -> Trial:
    pods = engines(PODS, seed)
    result = simulate(load.requests(seed), pods, _ROUTERS[router](pods, seed))
    return Trial(
        result.waiting_percentile(99),
        result.hit_tokens(),
        result.hit_ratio(),
        fmean(result.waiting()),
    )


def _half_speed_trial(seed: int, load: Load, router: str) -> scenarios.HalfSpeed:
    return scenarios.half_speed(load.requests(seed), seed, _ROUTERS[router])


def _steady(runs: Runs) -> list[Figure]:
    """Every router on the same requests."""
    figures = []
    for speed in (1.0, 2.0):
        progress(f"requests at {speed:g} times their speed, {runs.seeds} seeds")
        runs.start(["picker", "exact cost", *_TARGETS], speed)
        picker, exact = runs.router("picker", speed), runs.router("exact cost", speed)
        for policy, target in _TARGETS.items():
            name = f"p99 waiting at {speed:g} ×, over that with {policy}"
            ratios = _waiting_ratios(picker, runs.router(policy, speed))
            figures.append(at_most(name, ratios, "ratio", target))
        # A trace without prefix blocks has no hits.
        if all(trial.hit_tokens for trial in exact):
            hits = [
                own.hit_tokens / other.hit_tokens for own, other in zip(picker, exact, strict=True)
            ]
            name = f"hit tokens at {speed:g} ×, over those with exact costs"
            figures.append(at_least(name, hits, "ratio", 0.95))
        name = f"p99 waiting at {speed:g} ×, over that with exact costs"
        figures.append(without_target(name, _waiting_ratios(picker, exact), "ratio"))
    return figures


def _waiting_ratios(trials: Sequence[Trial], others: Sequence[Trial]) -> list[float]:
    return [trial.waiting / other.waiting for trial, other in zip(trials, others, strict=True)]


def _mean_ratios(trials: Sequence[Trial], others: Sequence[Trial]) -> list[float]:
    return [
        trial.mean_waiting / other.mean_waiting for trial, other in zip(trials, others, strict=True)
    ]


def _hit_points(trials: Sequence[Trial], others: Sequence[Trial]) -> list[float]:
    """By how many points the hit ratio is lower than that of the others."""
    pairs = zip(trials, others, strict=True)
    return [100 * (other.hit_ratio - trial.hit_ratio) for trial, other in pairs]


def _knowledge(runs: Runs) -> list[Figure]:
    """Less or more knowledge than that of one picker which infers what pods cache."""
    progress("exact caches, and less exact reports of prefills")
    names = ("exact caches", "sidecars of vLLM", "no sidecars")
    runs.start(["picker", *names], 2.0)
    picker, exact, vllm, bare = (runs.router(n, 2.0) for n in ("picker", *names))
    waiting = "{}: p99 waiting at 2 ×, over that with {}".format
    hits = "{}: points of hit ratio at 2 × below {}".format
    reports = "exact reports"
    return [
        at_most(hits("inferred caches", "exact ones"), _hit_points(picker, exact), "points", 3.0),
        without_target(
            waiting("inferred caches", "exact ones"), _waiting_ratios(picker, exact), "ratio"
        ),
        without_target(waiting("vLLM's usage", reports), _waiting_ratios(vllm, picker), "ratio"),
        without_target(waiting("no sidecars", reports), _waiting_ratios(bare, picker), "ratio"),
    ]


def _replicas(runs: Runs) -> list[Figure]:
    """Three replicas that share what they know, for one."""
    # Made-up conversations have no rounded times.
    spreads = (False, True) if runs.load.trace is not None else (False,)
    figures = []
    for is_spread in spreads:
        for speed in (1.0, 2.0):
            how = f"spread over {ROUNDED / speed:g} s" if is_spread else "as recorded"
            progress(f"three replicas at {speed:g} times the speed, {how}")
            runs.start(["picker", "three replicas"], speed, is_spread=is_spread)
            one, three = (
                runs.router(name, speed, is_spread=is_spread)
                for name in ("picker", "three replicas")
            )
            name = f"three replicas at {speed:g} ×, {how}: {{}}".format
            figures += [
                at_most(name("points of hit ratio lost"), _hit_points(three, one), "points", 1.0),
                at_most(name("p99 waiting"), _waiting_ratios(three, one), "ratio", 1.05),
                without_target(name("mean waiting"), _mean_ratios(three, one), "ratio"),
            ]
    return figures


def _rivals(runs: Runs) -> list[Figure]:
    return compare(UNIFIED, runs.load, runs.seeds, runs.pool, runs.policies)


def _pools(runs: Runs) -> list[Figure]:
    return compare(SEPARATE, runs.load, runs.seeds, runs.pool, runs.policies)


def _slo(runs: Runs) -> list[Figure]:
    return gains(UNIFIED, runs.load, runs.seeds, runs.pool)


def _slo_pools(runs: Runs) -> list[Figure]:
    return gains(SEPARATE, runs.load, runs.seeds, runs.pool)


def _grants(runs: Runs) -> list[Figure]:
    return compare_grants(runs.load, runs.seeds, runs.pool)


def _llmd_real(runs: Runs) -> list[Figure]:
    return compare_with_real(runs.load)


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
    figures = []
    for speed in (1.0, 2.0, 3.0):
        progress(f"one pod at half of its speed, requests at {speed:g} times theirs")
        trials, exacts = (
            runs.each(_half_speed_trial, runs.load.times(speed), router)
            for router in ("picker", "exact cost")
        )
        work = [trial.work for trial in trials]
        over_without = [trial.waiting_over_without for trial in trials]
        name = f"a pod at half speed, {speed:g} ×: {{}}".format
        figures += [
            at_most(name("its work over that at full speed"), work, "ratio", 0.7),
            at_least(name("its work over that at full speed"), work, "ratio", 0.3),
            without_target(name("the same with exact costs"), [o.work for o in exacts], "ratio"),
            without_target(
                name("its requests over the mean of all"), [t.requests for t in trials], "ratio"
            ),
            at_most(name("p99 waiting over that without the pod"), over_without, "ratio", 1.2),
            without_target(
                name("p99 waiting over that at full speed"),
                [trial.waiting_over_full for trial in trials],
                "ratio",
            ),
        ]
    return figures


_EXPERIMENTS: Final[Mapping[str, Callable[[Runs], list[Figure]]]] = {
    "steady": _steady,
    "knowledge": _knowledge,
    "replicas": _replicas,
    "shared": _shared,
    "long": _long_prompts,
    "failing": _failing,
    "half-speed": _half_speed,
    "rivals": _rivals,
    "pools": _pools,
    "slo": _slo,
    "slo-pools": _slo_pools,
    "grants": _grants,
    "llmd-real": _llmd_real,
}


@click.command()
@click.option("--trace", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--speed", default=1.0, show_default=True, help="how much faster 1 × is than FILE")
@click.option("--seeds", default=2, show_default=True, help="runs of each simulation")
@click.option("--processes", default=2, show_default=True, help="simulations at once")
@click.option("--only", type=click.Choice(list(_EXPERIMENTS)), help="run this experiment alone")
@click.option(
    "--policy", "policies", multiple=True, help="rivals to run beside the picker; none: all"
)
@click.option(
    "--regime", default=PLAIN, type=click.Choice(list(REGIMES)), help="other requests and pods"
)
@click.option("--requests", type=int, help="only so many requests, from the first on")
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
def main(
    *,
    trace: Path | None,
    speed: float,
    seeds: int,
    processes: int,
    only: str | None,
    policies: tuple[str, ...],
    regime: str,
    requests: int | None,
    file: Path | None,
) -> None:
    """Simulate routers; without --trace, on conversations that it makes up."""
    progress(f"{PODS} pods of 10,000 tokens/s, {CACHE_TOKENS:g} tokens of KV each")
    with ProcessPoolExecutor(processes) as pool:
        runs = Runs(Load(trace, speed, requests, regime), seeds, pool, policies)
        names = [only] if only else list(_EXPERIMENTS)
        report([figure for name in names for figure in _EXPERIMENTS[name](runs)], file)


if __name__ == "__main__":
    main()
