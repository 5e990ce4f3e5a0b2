"""All rows of the routers' comparison at once: each trace and regime, at 1 × and at 2 ×.

    python -m benchmarks.routing_rows --trace FILE [--trace FILE] [--seeds 5] [--keep FILE]
        [--picker FILE] [--row TEXT] [--router NAME]

Prints, for each row, the picker's medians over those of the best rival in each figure. What a
router did with one seed is appended to a file, if one is named, and not run again while it is
there: rivals (`--keep`) do not change with the picker's cost, the picker (`--picker`) does.

Goodput is at 2 s / 50 ms, 2 s / 25 ms and 5 s / 50 ms, over separate pools (6 + 4) at 2 s / 50 ms
and 5 s / 15 ms; `most`: what a router that serves all requests in time would have over the best
rival, and at 2 s / 50 ms the clairvoyant bound where all seeds of it were run (`--router
clairvoyant`, minutes each). p99 ITL is over the best of the rivals whose p99 TTFT is at most 10 %
longer than the picker's, over separate pools of those that split every request.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table
from tests.epp.simulation.regimes import PLAIN, REGIMES

from .figures import machine, progress
from .routing_load import Load
from .routing_rivals import (
    ALWAYS,
    BOUND,
    PICKER,
    SEPARATE,
    UNIFIED,
    Comparison,
    Row,
    medians,
    over_best,
    row_of,
    row_text,
)

SPEEDS: Final = (1.0, 2.0)
_RIVALS: Final = (
    "llm-d, default",
    "llm-d, 5 s",
    "llm-d, 1 s",
    "Dynamo",
    "Dynamo, for agents",
    "SGLang",
)
"""Over unified pods: the others are behind these in every table of docs/project/figures.md."""
_CONVERSATIONS: Final = 1500
"""Made-up requests: 75 seconds at 2 ×, so that what regimes plan for the 60th happens."""
_HUNDRED: Final = 300
"""The same of the regime that makes ten times as many."""
_TRACED: Final = 2000
"""Requests of a trace, from the first on."""
_RECORDED_ON_FEWER: Final = {"azure": 7.0}
"""How a trace's name begins → the speed that is 1 × here. It has no prefixes."""
_SAME_TO_RIVALS: Final = frozenset({"unknown max_tokens", "three replicas", "vLLM's reports"})
"""Regimes that only change what the picker knows."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    name: str
    comparison: Comparison
    load: Load

    @property
    def rivals(self) -> Sequence[str]:
        """The routers beside the picker."""
        if self.comparison.always:
            return [name for name in self.comparison.routers if name not in (PICKER, ALWAYS)]
        return _RIVALS

    def routers(self, named: Sequence[str]) -> Sequence[str]:
        """Those of the row that are `named`; none: all but the bound."""
        known = (PICKER, *self.rivals)
        if not named:
            return known
        # The bound is one for unified pods.
        known = known if self.comparison.always else (*known, BOUND)
        return [name for name in known if name in named]

    def trial(self, router: str, seed: int) -> str:
        """The name of what `router` does with `seed`; the same where that is the same."""
        name = self.name
        if router != PICKER and self.load.regime in _SAME_TO_RIVALS:
            name = name.replace(self.load.regime, PLAIN)
        return f"{name} · {router} · {seed}"


def cases(traces: Sequence[Path]) -> Iterator[Case]:
    """The rows, in order."""
    for trace in traces:
        recorded = [s for begin, s in _RECORDED_ON_FEWER.items() if trace.name.startswith(begin)]
        for speed in SPEEDS:
            load = Load(trace, (recorded or [1.0])[0] * speed, _TRACED)
            yield Case(f"{trace.stem} {speed:g} ×", UNIFIED, load)
            if not recorded:
                yield Case(f"{trace.stem} on 6 + 4 {speed:g} ×", SEPARATE, load)
    for regime in REGIMES:
        number = _HUNDRED if regime == "100 pods" else _CONVERSATIONS
        for speed in SPEEDS:
            yield Case(f"{regime} {speed:g} ×", UNIFIED, Load(None, speed, number, regime))


class Trials:
    """Rows by the name of their trial, kept in a file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.rows: dict[str, Row] = {}
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                row = json.loads(line)
                trial = row.pop("trial")
                self.rows[trial] = Row(**row)

    def add(self, trial: str, row: Row) -> None:
        """Keep the row."""
        self.rows[trial] = row
        if self._file is not None:
            with self._file.open("a") as out:
                out.write(json.dumps({"trial": trial, **asdict(row)}) + "\n")


def show(chosen: Sequence[Case], seeds: int, rivals: Trials, picker: Trials) -> None:
    """Print the rows, each by the seeds with which the picker and all of its rivals were run."""
    table = Table(
        "row", "seeds", "goodput over the best rival's", "most", "p99 ITL", "mean TTFT", "p99 TTFT",
        title=machine(),
    )  # fmt: skip
    for case in chosen:
        names = (PICKER, *case.rivals)
        of = {name: _by_seed(case, name, seeds, rivals, picker) for name in (*names, BOUND)}
        if common := [seed for seed in range(seeds) if all(seed in of[name] for name in names)]:
            rows = {
                name: medians([each[seed] for seed in common])
                for name, each in of.items()
                if all(seed in each for seed in common)
            }
            table.add_row(case.name, f"{len(common)}", *_cells(case, rows))
    Console(width=max(170, Console().width)).print(table)


def _by_seed(
    case: Case, router: str, seeds: int, rivals: Trials, picker: Trials
) -> Mapping[int, Row]:
    rows = (picker if router == PICKER else rivals).rows
    trials = {seed: case.trial(router, seed) for seed in range(seeds)}
    return {seed: rows[trial] for seed, trial in trials.items() if trial in rows}


def _cells(case: Case, medians_of: Mapping[str, Row]) -> Sequence[str]:
    rivals = {name: row for name, row in medians_of.items() if name not in (PICKER, BOUND)}
    ours, bound = medians_of[PICKER], medians_of.get(BOUND)
    best = over_best(case.comparison, ours, rivals)
    # No router serves more than all requests in time.
    most = [ratio / share for ratio, share in zip(best.goodput, ours.goodput, strict=True) if share]
    if bound is not None:
        most[0] *= bound.goodput[0]
    itl = best.itl if best.itl_of_always is None else best.itl_of_always
    return [
        " ".join(f"{ratio:.3f}" for ratio in best.goodput),
        " ".join(f"{ratio:.2f}" for ratio in most),
        ("none near" if itl is None else f"{itl:.2f}") + f" ({1e3 * ours.itl:.0f} ms)",
        f"{best.ttft_mean:.3f} ({ours.ttft_mean:.2f} s)",
        f"{best.ttft:.3f} ({ours.ttft:.2f} s)",
    ]


@click.command()
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
)
@click.option("--seeds", default=5, show_default=True)
@click.option("--processes", default=2, show_default=True, help="simulations at once")
@click.option("--keep", type=click.Path(path_type=Path), help="the rivals' trials")
@click.option("--picker", type=click.Path(path_type=Path), help="the picker's trials")
@click.option("--row", "names", multiple=True, help="rows whose name contains it; none: all")
@click.option("--router", "routers", multiple=True, help="run only these; none: all but the bound")
def main(
    *,
    traces: tuple[Path, ...],
    seeds: int,
    processes: int,
    keep: Path | None,
    picker: Path | None,
    names: tuple[str, ...],
    routers: tuple[str, ...],
) -> None:
    """Compare the picker with rivals in every row."""
    chosen = [c for c in cases(traces) if not names or any(name in c.name for name in names)]
    rivals, own = Trials(keep), Trials(picker)
    with ProcessPoolExecutor(processes) as pool:
        futures = {}
        # By seed first: a run that is stopped has the same seeds of all rows.
        for seed in range(seeds):
            for case in chosen:
                for router in case.routers(routers):
                    trial = case.trial(router, seed)
                    trials = own if router == PICKER else rivals
                    if trial in trials.rows or trial in futures.values():
                        continue
                    future = pool.submit(row_of, case.comparison, router, case.load, seed)
                    futures[future] = trial
        for future in as_completed(futures):
            trial, row = futures[future], future.result()
            (own if f" · {PICKER} · " in trial else rivals).add(trial, row)
            progress(f"  {trial}: {row_text(row)}")
    show(chosen, seeds, rivals, own)


if __name__ == "__main__":
    main()
