"""Tables of the page, as plain values that the template fills in."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..figures.model import Distribution, Figures, Generator, Repeat, Report, ServerMetrics
from ..records import Outcome
from . import units

OUTCOMES: Final = {
    Outcome.OK: "complete answer",
    Outcome.UNSENT: "never sent: too many requests in flight, or the run was stopped before",
    Outcome.SHED: "refused with status 429 or 503",
    Outcome.ERROR_STATUS: "refused with another status than 200",
    Outcome.IN_BAND_ERROR: "error inside an answer of status 200",
    Outcome.TIMEOUT: "not complete in time",
    Outcome.CONNECTION_LOST: "no connection, or it closed before the end",
    Outcome.TRUNCATED: "ended without finish reason, usage or last event",
    Outcome.WRONG: "another answer than the reference's",
    Outcome.DIFFERS: "another answer than the reference's, which varies itself",
}
"""Outcome → what it means, in the order of the loss table."""


@dataclass(frozen=True)
class Cell:
    """A value of a table."""

    text: str
    invalid: str | None = None
    """Why the value must not be used; None: it is valid."""


@dataclass(frozen=True)
class Table:
    """Rows whose first cell is their heading."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    prose: Sequence[str] = ()
    """Columns of text; the others are of numbers."""
    empty: str = "no values"
    """Shown in place of a table without rows."""

    @property
    def reasons(self) -> list[str]:
        """Why cells are invalid, each reason once."""
        return sorted({cell.invalid for row in self.rows for cell in row if cell.invalid})


def row(*texts: str) -> list[Cell]:
    """Cells of valid values."""
    return [Cell(text) for text in texts]


def clock(started: str) -> str:
    """A time of day in ISO 8601, easier to read: `2026-01-02 03:04:05+00:00`."""
    return started.replace("T", " ", 1)


def count_outcomes(repeats: Iterable[Repeat]) -> dict[str, int]:
    """Outcome → requests of all repeats, in the order of `OUTCOMES`; unknown ones last."""
    counts: Counter[str] = Counter()
    for repeat in repeats:
        counts.update(repeat.all.outcomes)
    return {**{name: counts[name] for name in OUTCOMES}, **counts}


def count_due(repeats: Sequence[Repeat]) -> dict[str, int]:
    """The same without the requests whose time came after a stop: all of them are unsent."""
    later = sum(repeat.all.requests - repeat.rates.due for repeat in repeats)
    counts = count_outcomes(repeats)
    return {**counts, Outcome.UNSENT: counts[Outcome.UNSENT] - later}


def losses(report: Report) -> Table:
    """Every outcome with its count, in all repeats together."""
    counts = count_outcomes(report.repeats)
    total = sum(counts.values())
    return Table(
        "Outcomes: each scheduled request ended in exactly one of these ways",
        ("Outcome", "Requests", "Share", "Meaning"),
        [
            row(name, f"{count:,}", units.share(count / total if total else None), meaning)
            for name, count in counts.items()
            for meaning in (OUTCOMES.get(Outcome(name), "") if name in OUTCOMES else "",)
        ]
        + [row("scheduled", f"{total:,}", units.share(1.0 if total else None), "all of the above")],
        prose=("Meaning",),
    )


def reasons(report: Report) -> Table:
    """Why requests were lost, the most frequent first."""
    counts: Counter[tuple[str, str]] = Counter()
    for repeat in report.repeats:
        for failure in repeat.failures:
            counts[failure.outcome, failure.reason] += failure.count
    return Table(
        "Most frequent reasons",
        ("Outcome", "Requests", "Reason"),
        [row(outcome, f"{count:,}", reason) for (outcome, reason), count in counts.most_common(20)],
        prose=("Reason",),
        empty="no request was lost",
    )


def latency(distributions: Mapping[str, Distribution | None]) -> Table:
    """Name of a quantity → one row with its percentiles."""
    percentiles = ("1", "10", "25", "50", "75", "90", "95", "99", "99.9")
    columns = ("Quantity", "Values", "Mean", "Min", *(f"p{p}" for p in percentiles), "Max")
    rows = []
    for name, values in distributions.items():
        if values is None:
            continue
        times = (
            *(values.mean, values.minimum),
            *(values.percentiles.get(p) for p in percentiles),
            values.maximum,
        )
        cells = [Cell(units.seconds(time), values.invalid) for time in times]
        rows.append([*row(name, f"{values.count:,}"), *cells])
    return Table("Percentiles", columns, rows, empty="no request ended ok")


def groups(kind: str, caption: str, figures: Mapping[str, Figures]) -> Table:
    """One row for each group of requests, like a routing path; `kind` heads the first column."""
    columns = (
        *(kind, "Requests", "Ok", "Lost", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"),
        "E2E p50",
        "E2E p99",
        "Output tokens",
        "Cache hits",
        "Within SLO",
    )
    rows = [[Cell(name), *_group(group)] for name, group in figures.items()]
    return Table(caption, columns, rows)


def repeats(report: Report) -> Table:
    """One row for each repeat."""
    columns = (
        "Repeat",
        "Started",
        "Seconds",
        "Requests",
        "Ok",
        "Lost",
        "TTFT p50",
        "TTFT p99",
        "ITL p50",
        "ITL p99",
        "E2E p50",
        "E2E p99",
        "Output tokens",
        "Cache hits",
        "Within SLO",
    )
    rows = []
    for position, repeat in enumerate(report.repeats, 1):
        seconds = units.number(repeat.seconds) + (" (stopped early)" if repeat.stopped else "")
        start = row(str(position), clock(repeat.started), seconds)
        rows.append([*start, *_group(repeat.all)])
    return Table("All repeats", columns, rows)


def rates(report: Report) -> Table:
    """One row for each repeat with its rates per second."""
    rows = []
    for position, repeat in enumerate(report.repeats, 1):
        rates = repeat.rates
        values = (rates.scheduled, rates.requests, rates.output_tokens, rates.total_tokens)
        goodput = units.ABSENT if rates.goodput is None else units.number(rates.goodput)
        rows.append(row(str(position), *map(units.number, values), goodput))
    columns = ("Repeat", "Scheduled", "Requests", "Output tokens", "All tokens", "Goodput")
    return Table("Rates per second", columns, rows)


def search(report: Report) -> Table:
    """One row for each step of the search for the highest rate, in rising order of the rate."""
    rows = []
    for step in sorted(report.search, key=lambda step: step.rate):
        rates = map(units.number, (step.rate, step.scheduled, step.achieved))
        rows.append([*row(*rates), Cell(units.share(step.attainment), step.invalid)])
    columns = ("Sessions", "Requests scheduled", "Requests answered", "Within SLO")
    return Table("Search for the highest rate, per second", columns, rows)


def estimates(report: Report) -> Table:
    """Every figure of the summary with its interval."""
    rows = []
    for name, figure in report.summary.items():
        texts = (
            units.ABSENT if value is None else units.quantity(value, figure.unit)
            for value in (figure.value, figure.low, figure.high)
        )
        rows.append([Cell(name), *(Cell(text, figure.invalid) for text in texts)])
    columns = ("Figure", "Mean of the repeats", "95 % interval from", "to")
    return Table("Every figure", columns, rows)


def events(repeat: Repeat) -> Table:
    """Commands that were run, in the order of their marks in the charts."""
    rows = []
    for mark, event in enumerate(repeat.events, 1):
        running = event.seconds is None
        status = "none" if event.exit_status is None else str(event.exit_status)
        rows.append(
            row(
                *(f"E{mark}", units.seconds(event.at), event.command),
                "stopped at the end of the run" if running else units.seconds(event.seconds),
                *(status, event.output),
            )
        )
    columns = ("Mark", "Started at", "Command", "Ran for", "Exit status", "End of its output")
    return Table("Events", columns, rows, prose=("Command", "Ran for", "End of its output"))


def generator(health: Generator) -> Table:
    """How late the load generator was itself."""
    named = {"Lateness of sending": health.lateness, "Lag of reading": health.read_lag}
    rows = [
        row(
            *(name, units.seconds(values.percentiles.get("50"))),
            *(units.seconds(values.percentiles.get("99")), units.seconds(values.maximum)),
        )
        for name, values in named.items()
        if values is not None
    ]
    return Table("How well the load generator kept up", ("Quantity", "p50", "p99", "Max"), rows)


def counters(server: ServerMetrics) -> Table:
    """Counters of a metrics page and their increase."""
    rows = [row(name, units.number(value)) for name, value in sorted(server.before_after.items())]
    return Table("Counters", ("Counter", "Increase during the run"), rows)


def gauges(server: ServerMetrics) -> Table:
    """Gauges of a metrics page, summarized."""
    rows = []
    for name, values in sorted(server.gauges.items()):
        known = [value for value in values if value is not None]
        if known:
            mean = sum(known) / len(known)
            texts = map(units.number, (min(known), mean, max(known), known[-1]))
            rows.append(row(name, *texts))
    return Table("Gauges", ("Gauge", "Min", "Mean", "Max", "Last"), rows)


def _group(group: Figures) -> list[Cell]:
    """Cells of a group of requests, without its name."""
    ok = group.outcomes.get(Outcome.OK, 0)
    cached, within = group.cached_tokens, group.within_slo
    hits = None if cached is None or not group.prompt_tokens else cached / group.prompt_tokens
    return [
        *row(f"{group.requests:,}", f"{ok:,}", f"{group.lost:,}"),
        *(
            _percentile(values, percent)
            for values in (group.ttft, group.itl, group.e2e)
            for percent in ("50", "99")
        ),
        *row(f"{group.output_tokens:,}", units.share(hits)),
        Cell(
            units.share(within / group.requests if within is not None and group.requests else None)
        ),
    ]


def _percentile(values: Distribution | None, percent: str) -> Cell:
    if values is None:
        return Cell(units.ABSENT)
    return Cell(units.seconds(values.percentiles.get(percent)), values.invalid)
