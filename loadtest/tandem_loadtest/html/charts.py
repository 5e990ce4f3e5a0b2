"""Charts as Plotly's JSON, each with its text alternative. `timeline` has those over time.

A colour is the name of a custom property of the style sheet (`--series-1`): the script replaces it
by the colour of the current theme.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any, Final

from ..figures.histogram import value_of
from ..figures.model import Distribution
from . import units
from .tables import Cell, Table, row

Json = dict[str, Any]

SERIES: Final = 9
"""Number of series colours in the style sheet."""
DASHES: Final = ("solid", "dash", "dot", "dashdot")
PATTERNS: Final = ("", "/", "x", "-", "\\", "|", "+", ".")
"""Of bars, so that they differ without colour."""
SMALLEST: Final = 1e-6
"""Seconds; shorter times are drawn here, since a logarithmic axis has no 0."""
_LONGEST_NAME: Final = 40
INVALID: Final = " (INVALID)"
"""Follows the name of a series that must not be used."""


@dataclass(frozen=True)
class Chart:
    """A chart and what is said of it to a person who does not see it."""

    key: str
    """Unique in the page; part of ids."""
    title: str
    description: str
    data: list[Json]
    layout: Json
    table: Table
    """The same values."""

    @property
    def spec(self) -> Json:
        """What the script passes to Plotly."""
        return {"key": self.key, "data": self.data, "layout": self.layout}


def colour(position: int) -> str:
    """The series colour at a position; the colours repeat after `SERIES`."""
    return f"--series-{position % SERIES + 1}"


def plain(text: str) -> str:
    """Text from outside, short and without what Plotly reads as markup."""
    short = text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"
    return short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") or "(empty)"


def layout(x_title: str, y_title: str) -> Json:
    """What all charts have in common."""
    axis = {
        "gridcolor": "--grid",
        "linecolor": "--axis",
        "zerolinecolor": "--axis",
        "tickcolor": "--axis",
        "ticks": "outside",
        "automargin": True,
    }
    return {
        "autosize": True,
        "paper_bgcolor": "--panel",
        "plot_bgcolor": "--panel",
        "font": {"color": "--ink", "size": 13},
        "margin": {"l": 56, "r": 16, "t": 24, "b": 44},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "--panel", "bordercolor": "--axis", "font": {"color": "--ink"}},
        # Above the labels of events. The style sheet makes room for every row.
        "legend": {"orientation": "h", "y": 1.1, "yanchor": "bottom", "x": 0, "maxheight": 1000},
        "showlegend": True,
        "xaxis": {**axis, "title": {"text": x_title, "standoff": 8}},
        "yaxis": {**axis, "title": {"text": y_title, "standoff": 8}},
    }


def times(axis: Json) -> Json:
    """The axis with labels like `50ms` and `2s`."""
    return axis | {"tickformat": "~s", "ticksuffix": "s", "hoverformat": ".3s"}


def log_times(axis: Json, values: Iterable[float]) -> Json:
    """The axis in logarithmic scale, with labels at 1, 10, …, or at 1, 2, 5, 10, … for few decades.

    Plotly's own labels have a unit at powers of ten only.
    """
    low, high = min(values := [*values]), max(values)
    steps = (1, 2, 5) if high < 100 * low else (1,)
    ticks = [
        step * 10.0**power
        for power in range(floor(log10(low)), ceil(log10(high)) + 1)
        for step in steps
    ]
    labels = [units.seconds(tick) for tick in ticks]
    return times(axis) | {"type": "log", "tickvals": ticks, "ticktext": labels}


def latency_cdf(distributions: Mapping[str, Distribution | None]) -> Chart:
    """Name of a quantity → share of its values that are at most the time on the x axis."""
    present = {name: values for name, values in distributions.items() if values is not None}
    data = [_cdf_trace(position, *item) for position, item in enumerate(present.items())]
    base = layout("time (logarithmic)", "share of values")
    if data:
        base["xaxis"] = log_times(base["xaxis"], (time for trace in data for time in trace["x"]))
    base["yaxis"] |= {"range": [0, 1.02], "tickformat": ".0%"}
    described = [
        f"{name} is invalid: {values.invalid}"
        if values.invalid
        else f"{name}: half within {units.seconds(values.percentiles['50'])}, "
        f"99 % within {units.seconds(values.percentiles['99'])}"
        for name, values in present.items()
    ]
    return Chart(
        key="latency-cdf",
        title="Distribution of latencies",
        description="Steeper and further to the left is better. " + _joined(described),
        data=data,
        layout=base,
        table=_cdf_table(present),
    )


def _cdf_trace(position: int, name: str, values: Distribution) -> Json:
    xs, ys, total = [max(values.minimum, SMALLEST)], [0.0], 0
    for bucket, count in values.buckets:
        total += count
        time = min(values.maximum, max(values.minimum, value_of(bucket)))
        xs.append(max(SMALLEST, float(f"{time:.5g}")))
        ys.append(round(total / values.count, 6))
    xs.append(max(values.maximum, SMALLEST))
    ys.append(1.0)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name + (INVALID if values.invalid else ""),
        "x": xs,
        "y": ys,
        "line": {
            "shape": "hv",
            "width": 1.5 if values.invalid else 2.5,
            "color": "--muted" if values.invalid else colour(position),
            "dash": DASHES[position % len(DASHES)],
        },
        "hovertemplate": "%{y:.1%}",
    }


def _cdf_table(present: Mapping[str, Distribution]) -> Table:
    percentiles = list(dict.fromkeys(p for values in present.values() for p in values.percentiles))
    rows = [
        [
            *row(f"{percentile} %"),
            *(
                Cell(units.seconds(values.percentiles.get(percentile)), values.invalid)
                for values in present.values()
            ),
        ]
        for percentile in percentiles
    ]
    columns = ("Share of values", *(f"{name} at most" for name in present))
    return Table("Distribution of latencies", columns, rows)


def _joined(parts: list[str]) -> str:
    return f"{'. '.join(parts)}." if parts else "There are no values."
