"""Assembles the page from its parts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import msgspec
from plotly.offline import get_plotlyjs

from ..figures.histogram import RELATIVE_ERROR, percentile_of
from ..figures.model import PERCENTILES, Distribution, Repeat, Report
from ..page_parts import json_in_html, render
from . import summary, tables, units
from .charts import Chart, latency_cdf
from .tables import Table
from .timeline import timeline_charts

_QUANTITIES: Final = {
    "TTFT": "ttft",
    "TTFT on the wire": "ttft_wire",
    "ITL": "itl",
    "TPOT": "tpot",
    "E2E": "e2e",
    "E2E on the wire": "e2e_wire",
}
"""Name → field of `Figures`."""
_IN_CDF: Final = ("TTFT", "ITL", "E2E")


@dataclass(frozen=True)
class _Server:
    """A metrics page, as tables."""

    url: str
    error: str | None
    tables: list[Table]


@dataclass(frozen=True)
class _RepeatSection:
    """What the page shows of one repeat."""

    number: int
    repeat: Repeat
    charts: list[Chart]
    events: Table
    groups: list[Table]
    reasons: list[str]
    """Why values of `groups` are invalid."""
    cpu: str
    """CPU share of each process of the load generator."""
    generator: Table
    servers: list[_Server]


def page(report: Report) -> str:
    """The report as one HTML document of about 5 MB that loads nothing from any network."""
    quantities = _pooled(report)
    cdf = latency_cdf({name: quantities[name] for name in _IN_CDF})
    sections = [_section(number, repeat) for number, repeat in enumerate(report.repeats, 1)]
    specs = [chart.spec for chart in (cdf, *(c for section in sections for c in section.charts))]
    plotly: str = get_plotlyjs()
    return render(
        files(__package__),
        "report.html.jinja",
        style="report.css",
        scripts=["report.js"],
        libraries=[plotly],
        report=report,
        facts=summary.facts(report),
        sentences=summary.sentences(report),
        tiles=summary.tiles(report),
        losses=tables.losses(report),
        reasons=tables.reasons(report),
        cdf=cdf,
        latency=tables.latency(quantities),
        search=tables.search(report),
        sections=sections,
        repeats=tables.repeats(report),
        rates=tables.rates(report),
        estimates=tables.estimates(report),
        chart_data=json_in_html(msgspec.json.encode(specs).decode()),
    )


def _pooled(report: Report) -> dict[str, Distribution | None]:
    return {
        name: pool([getattr(repeat.all, field) for repeat in report.repeats])
        for name, field in _QUANTITIES.items()
    }


def _section(number: int, repeat: Repeat) -> _RepeatSection:
    groups = [
        tables.groups("Routing path", "By routing path", repeat.paths),
        tables.groups("Prefill backend", "By prefill backend", repeat.prefill_backends),
        tables.groups("Decode backend", "By decode backend", repeat.decode_backends),
        tables.groups("Model", "By model", repeat.models),
    ]
    return _RepeatSection(
        number=number,
        repeat=repeat,
        charts=timeline_charts(repeat, f"repeat-{number}"),
        events=tables.events(repeat),
        groups=[table for table in groups if table.rows],
        reasons=sorted({reason for table in groups for reason in table.reasons}),
        cpu=", ".join(map(units.share, repeat.generator.cpu_share)) or "not known",
        generator=tables.generator(repeat.generator),
        servers=[
            _Server(
                url=summary.host(server.url),
                error=server.error,
                tables=[t for t in (tables.counters(server), tables.gauges(server)) if t.rows],
            )
            for server in repeat.server
        ],
    )


def pool(distributions: Sequence[Distribution | None]) -> Distribution | None:
    """The values of all repeats together; None when there is none.

    A single distribution stays as it is. Otherwise percentiles come from the added buckets and are
    at most `RELATIVE_ERROR` off.
    """
    present = [values for values in distributions if values is not None and values.count]
    if len(present) < 2:
        return present[0] if present else None
    counts: Counter[int] = Counter()
    for values in present:
        counts.update(dict(values.buckets))
    count = sum(values.count for values in present)
    minimum = min(values.minimum for values in present)
    maximum = max(values.maximum for values in present)
    return Distribution(
        count=count,
        mean=sum(values.mean * values.count for values in present) / count,
        minimum=minimum,
        maximum=maximum,
        percentiles={f"{p:g}": percentile_of(counts, p, minimum, maximum) for p in PERCENTILES},
        buckets=sorted(counts.items()),
        relative_error=RELATIVE_ERROR,
        invalid=next((values.invalid for values in present if values.invalid), None),
    )
