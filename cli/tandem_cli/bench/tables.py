"""The report of `tandem bench` as tables for a terminal.

Texts that come from a server or the command line are `Text`: rich would read their square brackets
as markup.
"""

from collections.abc import Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tandem_loadtest.figures.model import Distribution, Estimate, Figures, Repeat, Report
from tandem_loadtest.records import COMPLETE, Outcome

_SHOWN: Final = ("50", "90", "99")
"""Percentiles in the latency table."""
_LATENCIES: Final = (
    ("TTFT", "ttft"),
    ("TTFT on the wire", "ttft_wire"),
    ("ITL", "itl"),
    ("TPOT", "tpot"),
    ("E2E", "e2e"),
    ("E2E on the wire", "e2e_wire"),
)


def report_tables(report: Report) -> RenderableType:
    """All tables, the losses first."""
    last = report.repeats[-1]
    parts: list[RenderableType] = []
    if report.search:
        parts += [_search(report), Text(f"measured at {report.workload['rate']:.4g} sessions/s:")]
    parts.append(_outcomes(report.repeats))
    if len(report.repeats) > 1:
        parts.append(_latency_estimates(report))
        parts.append(Text(f"repeat {len(report.repeats)} of {len(report.repeats)}:", style="bold"))
    parts += [_latencies(last.all), *_invalid(last.all), _groups(last), _rates(report)]
    # A table after a table needs a blank line between them.
    spaced = (Padding(part, (0, 0, 1, 0)) if isinstance(part, Table) else part for part in parts)
    return Group(*spaced, *_notes(last))


def _outcomes(repeats: list[Repeat]) -> Table:
    """One row per outcome that occurred; the sum equals the scheduled requests."""
    totals = {
        outcome.value: sum(repeat.all.outcomes.get(outcome, 0) for repeat in repeats)
        for outcome in Outcome
    }
    table = Table("outcome", box=None, collapse_padding=True)
    table.add_column("requests", justify="right")
    for outcome, count in sorted(totals.items(), key=lambda item: item[0] != Outcome.OK):
        if count:
            table.add_row(outcome, str(count), style="" if outcome in COMPLETE else "red")
    table.add_row("scheduled", str(sum(repeat.all.requests for repeat in repeats)), style="bold")
    return table


def _search(report: Report) -> Table:
    """The steps of the search for the highest rate, in rising order of the rate."""
    table = Table(
        "sessions/s", title="search", title_justify="left", box=None, collapse_padding=True
    )
    for heading in ("scheduled/s", "answered/s", "within SLO", ""):
        table.add_column(heading, justify="right")
    for step in sorted(report.search, key=lambda step: step.rate):
        rates = (f"{rate:.4g}" for rate in (step.rate, step.scheduled, step.achieved))
        mark, style = ("INVALID", "yellow") if step.invalid else ("", "")
        table.add_row(*rates, f"{step.attainment:.1%}", mark, style=style)
    return table


def _latencies(figures: Figures) -> Table:
    """One row per latency; those that must not be used are marked."""
    table = Table("times in ms", box=None, collapse_padding=True)
    for heading in ("mean", *(f"p{percent}" for percent in _SHOWN), "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for name, distribution in _distributions(figures):
        cells = (
            distribution.mean,
            *(distribution.percentiles[percent] for percent in _SHOWN),
            distribution.maximum,
        )
        mark, style = ("INVALID", "yellow") if distribution.invalid else ("", "")
        table.add_row(name, *map(milliseconds, cells), mark, style=style)
    return table


def _latency_estimates(report: Report) -> Table:
    """Mean and percentiles over all repeats, with their 95 % confidence intervals."""
    parts = ("mean", *(f"p{percent}" for percent in _SHOWN))
    table = Table("over all repeats, ms", *parts, "", box=None, collapse_padding=True)
    for name, field in _LATENCIES:
        estimates = [report.summary.get(f"{field}_{part}") for part in parts]
        if any(estimates):
            invalid = any(estimate and estimate.invalid for estimate in estimates)
            mark, style = ("INVALID", "yellow") if invalid else ("", "")
            table.add_row(name, *map(_with_interval, estimates), mark, style=style)
    return table


def _with_interval(estimate: Estimate | None) -> str:
    """`12.3 ± 0.4`."""
    if estimate is None:
        return "–"
    if estimate.high is None:
        return milliseconds(estimate.value)
    return f"{milliseconds(estimate.value)} ± {milliseconds(estimate.high - estimate.value)}"


def _invalid(figures: Figures) -> Iterator[Text]:
    """The reasons why figures are invalid, each delay of the load generator once."""
    names: dict[str, list[str]] = {}
    for name, distribution in _distributions(figures):
        if distribution.invalid:
            # What follows is the limit, which depends on the figure's own median.
            delay = distribution.invalid.partition(" exceeds ")[0]
            names.setdefault(delay, []).append(name)
    for delay, marked in names.items():
        yield Text(
            f"INVALID: {delay} exceeds 1 ms and 5 % of the p50 of {', '.join(marked)}", "yellow"
        )
    if names:
        fix = "run it on another machine than the server, or give it more cores by --processes"
        yield Text(f"fix: {fix}", "yellow")


def _distributions(figures: Figures) -> Iterator[tuple[str, Distribution]]:
    for name, field in _LATENCIES:
        distribution: Distribution | None = getattr(figures, field)
        if distribution is not None:
            yield name, distribution


def _groups(repeat: Repeat) -> Table:
    """One row for each routing path, backend and model."""
    table = Table(box=None, collapse_padding=True)
    # Names of pods differ at their end.
    table.add_column("", overflow="fold")
    for heading in ("requests", "lost", "TTFT p50", "p99", "ITL p50", "p99", "cached"):
        table.add_column(heading, justify="right", no_wrap=True)
    groups = {
        "path": repeat.paths,
        "prefill": repeat.prefill_backends,
        "decode": repeat.decode_backends,
        "model": repeat.models,
    }
    for kind, members in groups.items():
        for name, figures in members.items():
            table.add_row(Text(f"{kind} {name}"), *_group_cells(figures))
    return table


def _group_cells(figures: Figures) -> Iterator[str]:
    yield str(figures.requests)
    yield str(figures.lost)
    for distribution in (figures.ttft, figures.itl):
        for percent in ("50", "99"):
            yield milliseconds(distribution.percentiles[percent]) if distribution else "–"
    yield cached_share(figures)


def _rates(report: Report) -> Table:
    """The summary's rates and shares, with intervals where there are several repeats."""
    table = Table("over all repeats", box=None, collapse_padding=True)
    table.add_column("", justify="right")
    table.add_column("95 % interval")
    table.add_column("")
    for name, estimate in report.summary.items():
        if estimate.unit == "s":
            continue
        interval = ""
        if estimate.low is not None and estimate.high is not None:
            interval = f"{_number(estimate.low, estimate)} to {_number(estimate.high, estimate)}"
        table.add_row(name.replace("_", " "), _with_unit(estimate), interval, _mark(estimate))
    return table


def _mark(estimate: Estimate) -> Text:
    return Text("INVALID" if estimate.invalid else "", "yellow")


def _with_unit(estimate: Estimate) -> str:
    number = _number(estimate.value, estimate)
    return number if estimate.unit == "share" else f"{number} {estimate.unit}"


def _number(value: float, estimate: Estimate) -> str:
    return f"{value:.2%}" if estimate.unit == "share" else f"{value:.4g}"


def _notes(repeat: Repeat) -> Iterator[Text]:
    if repeat.stopped:
        yield Text("stopped early: these figures are of what was measured until then", "yellow")
    if repeat.stall:
        yield Text(
            f"longest wait of a client: {repeat.stall.seconds:.3g} s for the {repeat.stall.phase}"
            f" of its answer, {repeat.stall.at:.1f} s after the start"
        )
    for event in repeat.events:
        ending = "still running" if event.exit_status is None else f"exit {event.exit_status}"
        # A command that failed, a mistyped kill for example, did not do what was to be tested.
        yield Text(
            f"at {event.at:.1f} s: {event.command} ({ending})", "yellow" * bool(event.exit_status)
        )
    for server in repeat.server:
        read = len(server.before_after) + len(server.gauges)
        yield Text(f"metrics of {server.url}: {read} read, in the JSON and the HTML report")
    for warning in repeat.generator.warnings:
        yield Text(f"warning: {warning}", "yellow")
    for failure in repeat.failures:
        yield Text(f"{failure.count} × {failure.outcome}: {failure.reason}", "red")


def milliseconds(seconds: float) -> str:
    """Milliseconds with one decimal."""
    return f"{seconds * 1000:.1f}"


def cached_share(figures: Figures) -> str:
    """The share of prompt tokens that came from a prefix cache, in percent."""
    if figures.cached_tokens is None or not figures.prompt_tokens:
        return "–"
    return f"{figures.cached_tokens / figures.prompt_tokens:.0%}"
