"""Charts over the time of one repeat, with a mark for each event."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ..figures.model import Distribution, Event, Repeat, Timeline
from ..records import COMPLETE, Outcome
from . import units
from .charts import DASHES, INVALID, PATTERNS, Chart, Json, colour, layout, log_times, plain, times
from .tables import Cell, Table, row

_MOST_GROUPS: Final = 7
"""Groups with a series of their own; smaller ones share the last series."""
_LOSSES: Final = tuple(outcome for outcome in Outcome if outcome not in COMPLETE)
_MOST_BARS: Final = 60
"""Bars side by side; more intervals are added up, since shares of few requests are noise."""
_LOG_RATIO: Final = 30
"""Times that differ by a larger factor are drawn on a logarithmic axis."""


@dataclass(frozen=True)
class _Latency:
    """A latency over time."""

    title: str
    which: str
    """Of what the values of an interval are."""
    p50: Sequence[float | None]
    p99: Sequence[float | None]
    whole: Distribution | None
    """Of the whole repeat."""

    @property
    def invalid(self) -> str | None:
        """Why the values must not be used."""
        return self.whole.invalid if self.whole else None


def timeline_charts(repeat: Repeat, key: str) -> list[Chart]:
    """All charts of a repeat; `key` distinguishes the repeats in the page."""
    line, total = repeat.timeline, repeat.all
    ttft = ("Time to first token", "of the requests intended then", line.ttft_p50, line.ttft_p99)
    itl = ("Inter-token latency", "of the gaps that ended then", line.itl_p50, line.itl_p99)
    charts = [
        _latencies(f"{key}-ttft", line, _Latency(*ttft, whole=total.ttft)),
        _latencies(f"{key}-itl", line, _Latency(*itl, whole=total.itl)),
        _requests(f"{key}-in-flight", line),
        _losses(f"{key}-losses", line),
        _shares(f"{key}-paths", "Routing paths", line, line.paths),
        _shares(f"{key}-backends", "Decode backends", line, line.backends),
    ]
    for chart in charts:
        chart.layout.update(_marks(repeat.events))
        chart.layout["xaxis"]["range"] = [0, max(len(line.scheduled), 1) * line.interval]
    return charts


def _latencies(key: str, line: Timeline, latency: _Latency) -> Chart:
    series = {"p50": latency.p50, "p99": latency.p99}
    values = [value for points in series.values() for value in points if value]
    base = layout("seconds after the start", "")
    is_log = bool(values) and max(values) > _LOG_RATIO * min(values)
    if is_log:
        base["yaxis"] = log_times(base["yaxis"], values)
    else:
        base["yaxis"] = times(base["yaxis"]) | {"rangemode": "tozero"}
    notes = [f"The longest p99 is {units.seconds(max(values))}." if values else "No values."]
    if is_log:
        notes.append("The axis of time is logarithmic.")
    if latency.invalid:
        notes[0] = f"Invalid: {latency.invalid}."
    data = [
        _line(position, name + (INVALID if latency.invalid else ""), line, points)
        | {"hovertemplate": "%{y:.3s}s"}
        for position, (name, points) in enumerate(series.items())
        if values
    ]
    if latency.invalid:
        for trace in data:
            trace["line"]["color"] = trace["marker"]["color"] = "--muted"
    description = f"Median and 99th percentile {latency.which}. {' '.join(notes)}"
    cells = {
        name: [Cell(units.seconds(value), latency.invalid) for value in points]
        for name, points in series.items()
    }
    return Chart(key, latency.title, description, data, base, _table(latency.title, line, cells))


def _requests(key: str, line: Timeline) -> Chart:
    title = "Requests in flight"
    series = {"in flight at most": line.in_flight, "scheduled": line.scheduled}
    data = [
        _line(position, name, line, points)
        for position, (name, points) in enumerate(series.items())
    ]
    most = max(line.in_flight, default=0)
    description = (
        f"Most requests in flight at the same time, and requests scheduled, in each interval of "
        f"{units.number(line.interval)} s. At most {most:,} were in flight."
    )
    base = layout("seconds after the start", "requests")
    base["yaxis"]["rangemode"] = "tozero"
    cells = {name: _counts(points) for name, points in series.items()}
    return Chart(key, title, description, data, base, _table(title, line, cells))


def _losses(key: str, line: Timeline) -> Chart:
    totals = {name: sum(points) for name, points in line.losses.items()}
    lost = {name: line.losses[name] for name, total in totals.items() if total}
    line, lost = _coarser(line, lost)
    counts = ", ".join(f"{totals[name]:,} {name}" for name in lost)
    description = f"Lost requests: {counts}." if lost else "No request was lost."
    base = layout("seconds after the start", "requests") | {"barmode": "stack", "bargap": 0}
    data = _bars(line, lost, _LOSSES)
    cells = {name: _counts(points) for name, points in lost.items()}
    table = _table("Lost requests", line, cells)
    return Chart(key, "Lost requests", description, data, base, table)


def _shares(key: str, title: str, line: Timeline, groups: Mapping[str, Sequence[int]]) -> Chart:
    line, largest = _coarser(line, _largest(groups))
    total = sum(map(sum, largest.values()))
    described = ", ".join(
        f"{name} {units.share(sum(points) / total)}" for name, points in largest.items() if total
    )
    base = layout("seconds after the start", "share of requests")
    base |= {"barmode": "stack", "barnorm": "fraction", "bargap": 0}
    base["yaxis"] |= {"tickformat": ".0%", "range": [0, 1]}
    data = [bar | {"hovertemplate": "%{y:.0%}"} for bar in _bars(line, largest)]
    cells = {name: _counts(points) for name, points in largest.items()}
    return Chart(
        *(key, title, f"Share of the requests that ended then. {described or 'No values'}."),
        *(data, base, _table(f"{title}: requests", line, cells)),
    )


def _largest(groups: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """The largest groups by name, and the sum of the others."""
    names = sorted(groups, key=lambda name: sum(groups[name]), reverse=True)
    if len(names) <= _MOST_GROUPS + 1:
        return {name: groups[name] for name in sorted(names)}
    others = names[_MOST_GROUPS:]
    summed = [sum(values) for values in zip(*(groups[name] for name in others), strict=True)]
    largest: dict[str, Sequence[int]] = {n: groups[n] for n in sorted(names[:_MOST_GROUPS])}
    return largest | {f"{len(others)} others": summed}


def _coarser(
    line: Timeline, groups: Mapping[str, Sequence[int]]
) -> tuple[Timeline, dict[str, list[int]]]:
    """Intervals so long that there are at most `_MOST_BARS`, and the groups' sums in them."""
    longest = max(map(len, groups.values()), default=0)
    step = max(1, -(-longest // _MOST_BARS))
    coarse = msgspec.structs.replace(line, interval=line.interval * step)
    return coarse, {
        name: [sum(values[start : start + step]) for start in range(0, len(values), step)]
        for name, values in groups.items()
    }


def _line(position: int, name: str, line: Timeline, values: Sequence[float | None]) -> Json:
    return {
        "type": "scatter",
        # A value between two gaps has no line: its marker shows it.
        "mode": "lines+markers",
        "name": name,
        "x": _middles(line, len(values)),
        "y": [None if value is None else float(f"{value:.5g}") for value in values],
        "line": {"color": colour(position), "dash": DASHES[position], "width": 2},
        "marker": {"color": colour(position), "size": 4},
    }


def _bars(
    line: Timeline, groups: Mapping[str, Sequence[int]], order: Sequence[str] = ()
) -> list[Json]:
    """One series per group. Those in `order` have the same colours in every repeat."""
    names = list(dict.fromkeys((*order, *groups)))
    return [
        {
            "type": "bar",
            "name": plain(name),
            "x": _middles(line, len(values)),
            "y": list(values),
            "width": line.interval,
            "marker": {
                "color": colour(position),
                "line": {"width": 0},
                "pattern": _pattern(PATTERNS[position % len(PATTERNS)]),
            },
        }
        for position, name in enumerate(names)
        if (values := groups.get(name)) is not None
    ]


def _pattern(shape: str) -> Json:
    stripes = {"fillmode": "overlay", "fgcolor": "--panel", "size": 6, "solidity": 0.25}
    return {"shape": shape} | (stripes if shape else {})


def _marks(events: Sequence[Event]) -> Json:
    """Vertical lines with the events' labels, as in the table of events."""
    shapes: list[Json] = []
    labels: list[Json] = []
    for number, event in enumerate(events, 1):
        across = {"yref": "paper", "y0": 0, "y1": 1, "x0": event.at}
        if event.seconds:
            area = {"type": "rect", "x1": event.at + event.seconds, "line": {"width": 0}}
            shapes.append(across | area | {"fillcolor": "--event", "opacity": 0.12})
        # A halo, because bars may have the colour of the line.
        for stroke in ({"color": "--panel", "width": 4}, {"color": "--event", "width": 2}):
            line = {"type": "line", "x1": event.at, "line": stroke | {"dash": "dot"}}
            shapes.append(across | line)
        labels.append(
            {
                "text": f"E{number}",
                "hovertext": plain(event.command),
                "font": {"color": "--event"},
                "showarrow": False,
                "x": event.at,
                "xanchor": "left",
                "y": 1,
                "yref": "paper",
                "yanchor": "bottom",
            }
        )
    return {"shapes": shapes, "annotations": labels}


def _middles(line: Timeline, count: int) -> list[float]:
    return [round((position + 0.5) * line.interval, 6) for position in range(count)]


def _counts(values: Sequence[int]) -> list[Cell]:
    return row(*(f"{value:,}" for value in values))


def _table(caption: str, line: Timeline, series: Mapping[str, Sequence[Cell]]) -> Table:
    rows = [
        [Cell(units.number(position * line.interval)), *values]
        for position, values in enumerate(zip(*series.values(), strict=True))
    ]
    return Table(caption, ("From second", *series), rows)
