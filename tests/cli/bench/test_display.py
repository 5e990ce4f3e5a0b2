"""The live display's words, and the tables at the end."""

from io import StringIO
from pathlib import Path

import msgspec
from rich.console import Console

from tandem_cli.bench.display import state_text, step_name
from tandem_cli.bench.tables import report_tables
from tandem_loadtest.run.options import BenchProgress
from tandem_loadtest.workload.presets import PRESETS
from tests.loadtest.figures.samples import sample_report


def test_steps_have_names() -> None:
    assert step_name(BenchProgress(phase="repeat", step=2, steps=3)) == "repeat 2 of 3"
    assert step_name(BenchProgress(phase="repeat", step=1, steps=1)) == "repeat"
    search = BenchProgress(phase="search", step=4, rate=12.5)
    assert step_name(search) == "search, step 4, 12.5/s"


def test_the_state_has_losses_by_outcome() -> None:
    progress = BenchProgress(phase="repeat", in_flight=3, outcomes={"ok": 9, "shed": 2})
    assert state_text(progress) == "3 in flight, 2 shed"


def test_the_tables_show_losses_invalid_figures_and_events() -> None:
    report = sample_report()
    console = Console(width=120, record=True, file=StringIO())
    console.print(report_tables(report))
    text = console.export_text()
    last = report.repeats[-1]
    for outcome in last.all.outcomes:
        assert outcome in text
    for event in last.events:
        assert event.command in text
    invalid = {d.invalid for d in (last.all.ttft, last.all.itl) if d and d.invalid}
    assert ("INVALID" in text) == bool(invalid)
    for path in last.paths:
        assert f"path {path}" in text


def test_goodput_is_marked_where_the_generator_was_too_late() -> None:
    console = Console(width=120, record=True, file=StringIO())
    console.print(report_tables(sample_report(read_lag=1.0)))
    lines = console.export_text().splitlines()
    assert all("INVALID" in line for line in lines if line.strip().startswith("goodput"))
    assert any(line.strip().startswith("goodput") for line in lines)


def test_names_from_a_server_are_no_markup() -> None:
    report = sample_report()
    last = report.repeats[-1]
    hostile = msgspec.structs.replace(last, decode_backends={"pod[/y][red]": last.all})
    console = Console(width=200, record=True, file=StringIO())
    console.print(report_tables(msgspec.structs.replace(report, repeats=[hostile])))
    assert "pod[/y][red]" in console.export_text()


def test_the_docs_list_every_workload() -> None:
    text = (Path(__file__).parents[3] / "docs" / "operate" / "load-tests.md").read_text()
    for name, preset in PRESETS.items():
        assert f"| `{name}` | {preset.help} |" in text
