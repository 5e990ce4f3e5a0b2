"""`tandem bench compare A.json B.json`."""

from pathlib import Path
from typing import Final

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem_contract.commandline import fail
from tandem_loadtest.figures.compare import Comparison, Difference
from tandem_loadtest.figures.compare import compare as compare_reports
from tandem_loadtest.figures.files import ReportError, load_report

from ..options import SETTINGS

_FILE: Final = click.Path(path_type=Path, dir_okay=False)


@click.command("compare", context_settings=SETTINGS)
@click.argument("a", type=_FILE)
@click.argument("b", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
@click.option(
    "--fail-if-worse", is_flag=True, help="Exit with 1 if a figure of B is worse beyond noise."
)
def compare(a: Path, b: Path, as_json: bool, fail_if_worse: bool) -> None:
    """Tell what differs beyond noise between the reports A and B of `tandem bench --json`.

    B is compared with A: give the older report first.
    """
    try:
        comparison = compare_reports(load_report(a), load_report(b))
    except ReportError as err:
        raise click.UsageError(str(err)) from err
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(comparison)))
    else:
        _show(comparison)
    worse = [entry.name for entry in comparison.differences if entry.improves is False]
    if fail_if_worse and worse:
        fail(f"worse beyond noise: {', '.join(worse)}")


def _show(comparison: Comparison) -> None:
    console = Console()
    console.print(_counts(comparison))
    table = Table("figure", box=None, collapse_padding=True)
    for heading in ("A", "B", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for entry in comparison.differences:
        percent = "" if entry.percent is None else f"{entry.percent:+.1f} %"
        table.add_row(
            # The name comes from a file: its square brackets are no markup.
            Text(entry.name.replace("_", " ")),
            Text(_value(entry.a, entry.unit)),
            Text(_value(entry.b, entry.unit)),
            percent,
            _verdict(entry),
        )
    console.print(table)
    for line in (*comparison.warnings, *comparison.notes):
        console.print(line, style="yellow" if line in comparison.warnings else "", markup=False)


def _counts(comparison: Comparison) -> str:
    """`2 better, 1 worse, 20 within noise, 4 without a verdict`."""
    entries = comparison.differences
    counts = {
        "better": sum(entry.improves is True for entry in entries),
        "worse": sum(entry.improves is False for entry in entries),
        "within noise": sum(entry.beyond_noise is False for entry in entries),
        "without a verdict": sum(entry.beyond_noise is None for entry in entries),
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _value(value: float, unit: str) -> str:
    """Seconds in milliseconds and shares in percent, everything else in its own unit."""
    if unit == "share":
        return f"{value:.2%}"
    value, unit = (value * 1000, "ms") if unit == "s" else (value, unit)
    # Four digits, and no exponent.
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def _verdict(entry: Difference) -> Text:
    if entry.beyond_noise is None:
        # The lines below the table have the reasons.
        return Text("invalid" if entry.basis.startswith("invalid") else "no verdict")
    if not entry.beyond_noise:
        return Text("within noise")
    if entry.improves is None:
        return Text("differs")
    return Text("better", "green") if entry.improves else Text("worse", "red")
