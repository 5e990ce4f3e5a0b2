"""What a benchmark reports: named figures, each with its target, as a table and as JSON."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `target` reads like `>= 8`; `holds` says whether the value meets it."""

    name: str
    value: float
    unit: str
    target: str
    holds: bool


def at_least(name: str, value: float, unit: str, floor: float) -> Figure:
    """A figure that should not be below `floor`."""
    return Figure(name, value, unit, f">= {floor:g}", value >= floor)


def at_most(name: str, value: float, unit: str, ceiling: float) -> Figure:
    """A figure that should not be above `ceiling`."""
    return Figure(name, value, unit, f"<= {ceiling:g}", value <= ceiling)


def machine() -> str:
    """What this ran on, in a line."""
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"


def show(figures: Sequence[Figure]) -> None:
    """Print the table."""
    table = Table("figure", "value", "unit", "target", "holds", title=machine())
    for figure in figures:
        mark = "yes" if figure.holds else "[bold red]no"
        table.add_row(figure.name, f"{figure.value:.3g}", figure.unit, figure.target, mark)
    Console(width=max(100, Console().width)).print(table)


def report(figures: Sequence[Figure], file: Path | None) -> None:
    """Print the figures, and write them to `file` as DESIGN's JSON when one is given."""
    show(figures)
    if file is not None:
        file.write_text(json.dumps({"figures": [asdict(f) for f in figures]}, indent=1) + "\n")


def load(file: Path) -> list[Figure]:
    """The figures a script wrote."""
    return [Figure(**figure) for figure in json.loads(file.read_text())["figures"]]


def progress(text: str) -> None:
    """A line about what is being measured, on stderr."""
    print(text, file=sys.stderr, flush=True)
