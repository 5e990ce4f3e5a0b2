"""`tandem bench URL`: run, show, write."""

import asyncio
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import msgspec
from click.shell_completion import CompletionItem
from rich.console import Console

from tandem_contract.commandline import config_option, fail
from tandem_loadtest.figures.model import Report
from tandem_loadtest.run.bench import BenchError, run_bench
from tandem_loadtest.run.options import BenchOptions

from ..options import SETTINGS
from .compare import compare
from .display import live_display
from .flags import SectionCommand, all_flags
from .request import Flags, bench_options
from .tables import report_tables


class _BenchCommand(SectionCommand):
    """`tandem bench URL …`, and `tandem bench compare A.json B.json`."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """A context of this command, or of `compare` if that is the first argument."""
        # A URL is never the word `compare`, so no run is mistaken for it.
        if args[:1] == ["compare"]:
            return compare.make_context(f"{info_name} compare", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Flags, and `compare`."""
        items = super().shell_complete(ctx, incomplete)
        if "compare".startswith(incomplete):
            items.append(CompletionItem("compare", help=compare.get_short_help_str()))
        return items

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command whose context `make_context` made."""
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@config_option
@click.command("bench", cls=_BenchCommand, context_settings=SETTINGS)
@click.argument("url")
@all_flags
def command(**flags: Any) -> None:
    """Send load to the OpenAI-compatible server at URL and report what its clients saw.

    Latencies count from the time at which a request should have been sent, and every scheduled
    request is accounted for. Ctrl-C ends the run and reports what was measured so far. Exits with
    1 if a request was lost or the run was stopped.

    `tandem bench compare A.json B.json` tells what differs between two reports beyond noise.
    """
    values = Flags(**flags)
    options = bench_options(values)
    # Before the run, which may take minutes and would be lost.
    for flag, file in (("--json", values.json_file), ("--html", values.html_file)):
        if file and not file.parent.is_dir():
            raise click.BadParameter(f"directory {file.parent} does not exist", param_hint=flag)
    if values.html_file and find_spec("plotly") is None:
        fail(
            "--html draws with plotly, which is not installed: pip install 'tandem-llm[bench]'",
            status=2,
        )
    try:
        report = asyncio.run(_run(options))
    except BenchError as err:
        fail(str(err), status=2)
    _write(report, values.json_file, values.html_file)
    Console().print(report_tables(report))
    if reason := _failure(report):
        fail(reason)


async def _run(options: BenchOptions) -> Report:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with live_display() as on_progress:
        return await run_bench(options, on_progress, stop)


def _write(report: Report, json_file: Path | None, html_file: Path | None) -> None:
    try:
        if json_file:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        if html_file:
            # Plotly takes a third of the start-up time, and only the page needs it.
            from tandem_loadtest.html import page  # noqa: PLC0415

            html_file.write_text(page(report), encoding="utf-8")
    except OSError as err:
        fail(f"cannot write the report: {err}")


def _failure(report: Report) -> str:
    """One line: how many requests were lost; empty when every request was answered."""
    # Of a stopped run, those that were due: the others could not be sent.
    due = sum(repeat.rates.due for repeat in report.repeats)
    lost = sum(repeat.rates.lost for repeat in report.repeats)
    if not lost:
        return "the run was stopped before its end" if report.repeats[-1].stopped else ""
    return f"{lost} of {due} requests were lost"
