"""The picker beside the routers of other projects: a row of figures for each, and the targets.

Rivals are rebuilt from their sources, which the modules in tests/epp/simulation name. They see the
same requests and reports as the picker, but for what those modules say.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table
from tests.epp.simulation.clairvoyant import Clairvoyant
from tests.epp.simulation.dynamo_policy import DynamoCost, DynamoSettings
from tests.epp.simulation.llmd_policy import LlmdDefault, LlmdSettings
from tests.epp.simulation.pods import connect
from tests.epp.simulation.policies import LeastTokens
from tests.epp.simulation.real_picker import LLMD_DEFAULT, PickerSettings, RealPicker
from tests.epp.simulation.regimes import REGIMES
from tests.epp.simulation.scenarios import PODS, NewRouter
from tests.epp.simulation.sglang_policy import SglangCacheAware

from tandem_contract.paths import Role
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.loop import Simulation
from tandem_planner.simulation.measures import Result, Slo
from tandem_planner.simulation.routers import LeastLoaded, Pools, RoundRobin, Router

from .figures import Figure, at_least, at_most, progress
from .routing_load import Load

PICKER: Final = "picker"
ALWAYS: Final = "picker, split: always"
BOUND: Final = "clairvoyant"
"""No rival: it knows what no router can. It takes minutes, so that it runs only if it is named."""
_POOLS: Final = Pools(prefills=range(6), decodes=range(6, PODS))
_ROLES: Final = [Role.PREFILL] * len(_POOLS.prefills) + [Role.DECODE] * len(_POOLS.decodes)
_SCORERS: Final = "{type: prefix-cache-scorer}, {type: active-request-scorer}"
_ALWAYS: Final = f"plugins: [{{type: always-disagg-pd-decider}}, {_SCORERS}]"
_FROM_512: Final = (
    "plugins: [{type: prefix-based-pd-decider, parameters: {nonCachedTokens: 512}}, "
    f"{_SCORERS}]"
)
_AGENTS: Final = DynamoSettings(predicted=5.0, decay=1.0)
"""What Dynamo's page on tuning names for agents' bursts and for busy workers with warm caches."""


def _separate_picker(scheduling: str = "{}") -> NewRouter:
    return partial(RealPicker, settings=PickerSettings(scheduling, _ROLES))


@dataclass(frozen=True)
class Comparison:
    """Routers to compare, over unified pods or over six for prefill and four for decode."""

    name: str
    routers: Mapping[str, NewRouter]
    """The picker first."""
    slos: Sequence[Slo]
    always: frozenset[str] = frozenset()
    """Routers that split every request."""


UNIFIED: Final = Comparison(
    "unified pods",
    {
        PICKER: RealPicker,
        "llm-d, default": LlmdDefault,
        "llm-d, 5 s": partial(LlmdDefault, settings=LlmdSettings(penalty=5.0)),
        "llm-d, 1 s": partial(LlmdDefault, settings=LlmdSettings(penalty=1.0)),
        "llm-d, older weights": partial(RealPicker, settings=PickerSettings(LLMD_DEFAULT)),
        "Dynamo": DynamoCost,
        "Dynamo, for agents": partial(DynamoCost, settings=_AGENTS),
        "SGLang": SglangCacheAware,
        "least requests": LeastLoaded,
        "least tokens": LeastTokens,
        "round-robin": RoundRobin,
    },
    (Slo(2.0, 0.050), Slo(2.0, 0.025), Slo(5.0, 0.050)),
)
SEPARATE: Final = Comparison(
    "6 prefill pods and 4 decode pods",
    {
        PICKER: _separate_picker(),
        ALWAYS: _separate_picker("plugins: [{type: predicted-cost, parameters: {split: always}}]"),
        "llm-d, default": partial(LlmdDefault, pools=_POOLS),
        "llm-d, from 512": partial(
            LlmdDefault, settings=LlmdSettings(min_uncached=512), pools=_POOLS
        ),
        "llm-d, older scorers": _separate_picker(_ALWAYS),
        "older, from 512": _separate_picker(_FROM_512),
        "Dynamo": partial(DynamoCost, pools=_POOLS),
        "Dynamo, conditional": partial(
            DynamoCost, settings=DynamoSettings(is_conditional=True), pools=_POOLS
        ),
        "SGLang": partial(SglangCacheAware, pools=_POOLS),
    },
    (Slo(2.0, 0.050), Slo(5.0, 0.015)),
    frozenset({"llm-d, default", "llm-d, older scorers", "Dynamo", "SGLang"}),
)


@dataclass(frozen=True, slots=True)
class Row:
    """How a router did; seconds, and shares of the requests."""

    ttft_mean: float
    ttft: float
    """p99, as the next two."""
    waiting: float
    itl: float
    goodput: Sequence[float]
    """For each of the comparison's targets."""
    split: float
    hits: float
    """Share of the prompt tokens that were in a cache."""


def compare(
    comparison: Comparison, load: Load, seeds: int, pool: Executor, only: Sequence[str]
) -> list[Figure]:
    """Print a row of medians for each router, and give the figures that have targets. `only`:
    routers to run, beside the picker; none: all but the bound."""
    title = f"{comparison.name}, {load.regime}, at {load.speed:g} ×, median of {seeds} seeds"
    progress(title)
    names = [n for n in comparison.routers if not only or n == PICKER or n in only]
    names += [BOUND] if BOUND in only else []
    # By seed first, so that two processes are never left with the slowest router alone.
    futures = [
        (name, pool.submit(row_of, comparison, name, load, seed))
        for seed in range(seeds)
        for name in names
    ]
    trials: dict[str, list[Row]] = {name: [] for name in names}
    for name, future in futures:
        trials[name].append(future.result())
        progress(f"  {name}: {row_text(trials[name][-1])}")
    rows = {name: medians(trials[name]) for name in names}
    show(comparison, title, rows)
    return targets(comparison, rows)


def row_of(comparison: Comparison, name: str, load: Load, seed: int) -> Row:
    """Run one router."""
    regime = REGIMES[load.regime]
    pods = regime.pods(seed)
    if name == BOUND:
        requests = load.requests(seed)
        router: Router = Clairvoyant(pods, seed, requests=requests, slo=comparison.slos[0])
    elif name == PICKER and not comparison.always:
        router = regime.picker(pods, seed)
    else:
        router = comparison.routers[name](pods, seed)
    return summarize(simulated(comparison, load, pods, router, seed), comparison.slos)


def simulated(
    comparison: Comparison, load: Load, pods: Sequence[Engine], router: Router, seed: int
) -> Result:
    """What becomes of the requests of `load` behind `router`."""
    if comparison.always:
        connect(pods, _POOLS.decodes)
    simulation = Simulation(pods, router)
    REGIMES[load.regime].begin(simulation)
    return simulation.run(load.requests(seed))


def summarize(result: Result, slos: Sequence[Slo]) -> Row:
    """How a router did, by what happened; `slos` are the targets of goodput."""
    return Row(
        result.ttft_mean(),
        result.ttft_percentile(99),
        result.waiting_percentile(99),
        result.itl_percentile(99),
        [result.goodput(slo) for slo in slos],
        result.split(),
        result.hit_ratio(),
    )


def medians(rows: Sequence[Row]) -> Row:
    """The median of each figure."""
    return Row(
        median(row.ttft_mean for row in rows),
        median(row.ttft for row in rows),
        median(row.waiting for row in rows),
        median(row.itl for row in rows),
        [median(values) for values in zip(*(row.goodput for row in rows), strict=True)],
        median(row.split for row in rows),
        median(row.hits for row in rows),
    )


def row_text(row: Row) -> str:
    """The row on a line."""
    goodput = " ".join(f"{share:.3f}" for share in row.goodput)
    return (
        f"TTFT {row.ttft_mean:.2f} / {row.ttft:.1f} s, waiting {row.waiting:.2f} s, "
        f"ITL {1e3 * row.itl:.0f} ms, goodput {goodput}"
    )


def show(comparison: Comparison, title: str, rows: Mapping[str, Row]) -> None:
    """Print a line for each router."""
    goodputs = [slo.text for slo in comparison.slos]
    table = Table("router", "TTFT mean", "p99 s", "p99 waiting", "p99 ITL ms", *goodputs)
    table.title = title
    table.add_column("split")
    table.add_column("hits")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row.ttft_mean:.2f}",
            f"{row.ttft:.1f}",
            f"{row.waiting:.2f}",
            f"{1e3 * row.itl:.0f}",
            *(f"{share:.3f}" for share in row.goodput),
            f"{row.split:.2f}",
            f"{row.hits:.3f}",
        )
    Console(width=max(130, Console().width)).print(table)


class Ratios(NamedTuple):
    """The picker's figures over those of the best rival in each."""

    goodput: Sequence[float]
    itl: float | None
    """p99, over the best of the rivals whose p99 TTFT is at most 10 % longer; None: no rival's."""
    itl_of_always: float | None
    """The same over the best of those that split every request."""
    ttft_mean: float
    ttft: float
    """p99."""


def over_best(comparison: Comparison, ours: Row, rivals: Mapping[str, Row]) -> Ratios:
    """`ours` over the best of `rivals`, of which there is at least one."""
    near = [row.itl for row in rivals.values() if row.ttft <= 1.1 * ours.ttft]
    always = [row.itl for name, row in rivals.items() if name in comparison.always]
    return Ratios(
        [
            own / max(row.goodput[i] for row in rivals.values())
            for i, own in enumerate(ours.goodput)
        ],
        ours.itl / min(near) if near else None,
        ours.itl / min(always) if always else None,
        ours.ttft_mean / min(row.ttft_mean for row in rivals.values()),
        ours.ttft / min(row.ttft for row in rivals.values()),
    )


def targets(comparison: Comparison, rows: Mapping[str, Row]) -> list[Figure]:
    """The picker's figures over those of the best rival in each; empty without rivals."""
    ours = rows[PICKER]
    rivals = {name: row for name, row in rows.items() if name not in (PICKER, ALWAYS, BOUND)}
    figures = []
    if (bound := rows.get(BOUND)) is not None:
        name = f"{comparison.slos[0].text} goodput, over the clairvoyant's"
        figures.append(at_least(name, ours.goodput[0] / bound.goodput[0], "ratio", 0.9))
    if not rivals:
        return figures
    best, is_separate = over_best(comparison, ours, rivals), bool(comparison.always)
    for i, slo in enumerate(comparison.slos):
        name = f"{slo.text} goodput, over the best rival's"
        floor = 1.1 if is_separate and not i else 1.0
        figures.append(at_least(name, best.goodput[i], "ratio", floor))
    if best.itl_of_always is not None:
        name = "p99 ITL, over the best of those that split every request"
        figures.append(at_most(name, best.itl_of_always, "ratio", 1.1))
    if best.itl is not None:
        name = "p99 ITL, over the best rival's with p99 TTFT within 10 %"
        figures.append(at_most(name, best.itl, "ratio", 1.0))
    ceiling = 0.95 if is_separate else 1.0
    figures.append(at_most("p99 TTFT, over the best rival's", best.ttft, "ratio", ceiling))
    figures.append(at_most("mean TTFT, over the best rival's", best.ttft_mean, "ratio", 1.0))
    return figures
