"""What stating an objective is worth: the picker's goodput with `slo` set, over that without."""

from collections.abc import Sequence
from concurrent.futures import Executor
from statistics import median
from typing import Final

from rich.console import Console
from rich.table import Table
from tests.epp.simulation.real_picker import RealPicker
from tests.epp.simulation.regimes import REGIMES
from tests.epp.simulation.replicas import ReplicatedPicker

from tandem_contract.slo import Slo as StatedSlo
from tandem_planner.simulation.measures import Result, Slo

from .figures import Figure, at_least, progress
from .routing_load import Load
from .routing_rivals import PICKER, Comparison, simulated

SPEEDS: Final = (1.0, 2.0)


def gains(comparison: Comparison, load: Load, seeds: int, pool: Executor) -> list[Figure]:
    """Print a row for each objective and speed, and give the ratios with their targets."""
    stated: list[Slo | None] = [None, *comparison.slos]
    futures = {
        (speed, slo, seed): pool.submit(_goodputs, comparison, load.times(speed), slo, seed)
        for speed in SPEEDS
        for seed in range(seeds)
        for slo in stated
    }
    title = f"{comparison.name}, {load.regime}, median of {seeds} seeds"
    table = Table("speed", "objective", "goodput without it", "with it", "ratio", title=title)
    ratios, figures = list[float](), list[Figure]()
    for speed in SPEEDS:
        for i, slo in enumerate(comparison.slos):
            bare = [futures[speed, None, seed].result()[i] for seed in range(seeds)]
            aware = [futures[speed, slo, seed].result()[i] for seed in range(seeds)]
            ratio = [a / b if b else 1.0 for a, b in zip(aware, bare, strict=True)]
            table.add_row(
                f"{load.speed * speed:g} ×", slo.text,
                f"{median(bare):.3f}", f"{median(aware):.3f}", f"{median(ratio):.3f}",
            )  # fmt: skip
            progress(f"  {speed:g} ×, {slo.text}: {median(bare):.3f} to {median(aware):.3f}")
            ratios.append(median(ratio))
            name = f"{slo.text} goodput at {load.speed * speed:g} × with slo, over that without"
            figures.append(at_least(name, ratio, "ratio", 1.0))
    Console(width=max(110, Console().width)).print(table)
    share = sum(ratio >= 1.05 for ratio in ratios) / len(ratios)
    return [*figures, at_least("rows of at least 1.05", share, "share", 0.5)]


def _goodputs(comparison: Comparison, load: Load, slo: Slo | None, seed: int) -> Sequence[float]:
    """For each of the comparison's objectives."""
    pods = REGIMES[load.regime].pods(seed)
    make = comparison.routers[PICKER] if comparison.always else REGIMES[load.regime].picker
    router = make(pods, seed)
    assert isinstance(router, RealPicker | ReplicatedPicker)
    if slo is not None:
        router.meet(StatedSlo(slo.ttft, slo.itl))
    result: Result = simulated(comparison, load, pods, router, seed)
    return [result.goodput(each) for each in comparison.slos]
