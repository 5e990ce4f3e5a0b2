"""What it costs the requests if a pod at half of its speed gets more work than the cost gives it.

    python -m benchmarks.drawn_work [--trace FILE] [--seeds 2] [--json FILE]

The simulation of `benchmarks.routing`, in which one of ten pods has half of its speed. Oracles,
which minimise the picker's cost with perfect knowledge, choose as if a token took a share less
there than it does. So that pod gets more work, and always what costs the least to give it. All
ratios are to the oracle that does not.
"""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import click
from tests.epp.simulation import scenarios

from .figures import Figure, progress, report, without_target
from .routing import Load, Runs

DISCOUNTS: Final = (0.0, 0.3, 0.6, 0.8)
"""Shares by which the slow pod's tokens seem to take less than they do."""
SPEEDS: Final = (1.0, 2.0)


def trial(seed: int, load: Load) -> list[scenarios.DrawnWork]:
    """One seed, by each of DISCOUNTS."""
    return scenarios.drawn_work(load.requests(seed), seed, DISCOUNTS)


def measure(runs: Runs) -> list[Figure]:
    """The figures for each of SPEEDS."""
    figures = []
    for speed in SPEEDS:
        progress(f"requests at {speed:g} times their speed")
        trials = runs.each(trial, runs.load.times(speed))
        for discount, drawn in zip(DISCOUNTS, zip(*trials, strict=True), strict=True):
            for what, values in {
                "its work, over that at full speed": [d.work for d in drawn],
                "p99 waiting": [d.waiting for d in drawn],
                "mean waiting": [d.mean_waiting for d in drawn],
                "mean TTFT": [d.ttft for d in drawn],
            }.items():
                name = f"{speed:g} ×, tokens of the slow pod {discount:.0%} cheaper: {what}"
                figures.append(without_target(name, values, "ratio"))
    return figures


@click.command()
@click.option("--trace", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--seeds", default=2, show_default=True, help="runs of each simulation")
@click.option("--processes", default=2, show_default=True, help="simulations at once")
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
def main(*, trace: Path | None, seeds: int, processes: int, file: Path | None) -> None:
    """Draw work to a slow pod; without --trace, with conversations that are made up."""
    with ProcessPoolExecutor(processes) as pool:
        report(measure(Runs(Load(trace, 1.0), seeds, pool)), file)


if __name__ == "__main__":
    main()
