"""The results of a benchmark: named figures with their targets, as a table and as JSON."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One result, with its target and the spread of its measurements."""

    name: str
    value: float
    """The median where there are several measurements, else the only one."""
    unit: str
    target: str
    """Such as `>= 8`."""
    holds: bool
    """Whether `value` meets the target."""
    low: float | None = None
    """The smallest measurement; None: there was only one."""
    high: float | None = None
    """The largest measurement; None likewise."""


Measured = float | Sequence[float]
"""One measurement, or those of all rounds."""


def at_least(name: str, measured: Measured, unit: str, floor: float) -> Figure:
    """A figure whose target is `floor` or more."""
    value, low, high = _median_and_spread(measured)
    return Figure(name, value, unit, f">= {floor:g}", value >= floor, low, high)


def at_most(name: str, measured: Measured, unit: str, ceiling: float) -> Figure:
    """A figure whose target is `ceiling` or less."""
    value, low, high = _median_and_spread(measured)
    return Figure(name, value, unit, f"<= {ceiling:g}", value <= ceiling, low, high)


def without_target(name: str, measured: Measured, unit: str) -> Figure:
    """A figure that is only shown."""
    value, low, high = _median_and_spread(measured)
    return Figure(name, value, unit, "", True, low, high)


def _median_and_spread(measured: Measured) -> tuple[float, float | None, float | None]:
    if isinstance(measured, int | float):
        return measured, None, None
    return statistics.median(measured), min(measured), max(measured)


def machine() -> str:
    """The machine that the benchmark runs on, in one line."""
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"


def show(figures: Sequence[Figure]) -> None:
    """Print the table."""
    table = Table("figure", "median", "min to max", "unit", "target", "holds", title=machine())
    for figure in figures:
        mark = "yes" if figure.holds else "[bold red]no"
        value, spread = f"{figure.value:.3g}", _spread_text(figure)
        table.add_row(figure.name, value, spread, figure.unit, figure.target, mark)
    Console(width=max(110, Console().width)).print(table)


def _spread_text(figure: Figure) -> str:
    if figure.low is None or figure.high is None:
        return ""
    return f"{figure.low:.3g} to {figure.high:.3g}"


def report(figures: Sequence[Figure], file: Path | None) -> None:
    """Print the figures and, if `file` is given, write them to it: `{"figures": [Figure, …]}`."""
    show(figures)
    if file is not None:
        file.write_text(json.dumps({"figures": [asdict(f) for f in figures]}, indent=1) + "\n")


def load(file: Path) -> list[Figure]:
    """The figures that `report` wrote."""
    return [Figure(**figure) for figure in json.loads(file.read_text())["figures"]]


def progress(text: str) -> None:
    """Print a line about the measurement that begins, to stderr."""
    print(text, file=sys.stderr, flush=True)
