"""The top of the page: what was measured, a sentence about the result, and tiles of figures."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..figures.model import Estimate, Figures, Report, Slo
from ..records import COMPLETE, Outcome
from . import units
from .tables import clock, count_due

_TILES: Final = {
    "ttft_p50": ("TTFT, median", "time from the intended send to the first token"),
    "ttft_p99": ("TTFT, p99", "99 % of the first tokens came sooner"),
    "itl_p50": ("ITL, median", "time between tokens"),
    "itl_p99": ("ITL, p99", "99 % of the gaps were shorter"),
    "e2e_p50": ("End-to-end, median", "time from the intended send to the end of the answer"),
    "e2e_p99": ("End-to-end, p99", "99 % of the answers ended sooner"),
    "requests_per_second": ("Requests per second", "complete answers"),
    "output_tokens_per_second": ("Output tokens per second", "of complete answers"),
    "goodput": ("Goodput", "requests per second within the SLO"),
    "attainment": ("Within SLO", "share of all scheduled requests"),
    "cache_hit_share": ("Prefix-cache hits", "share of the prompt tokens"),
    "output_tokens_per_second_per_gpu": ("Output tokens per second and GPU", ""),
    "goodput_per_gpu": ("Goodput per GPU", "requests per second within the SLO"),
}
"""Name in `Report.summary` → label and explanation, in the order on the page."""


@dataclass(frozen=True)
class Tile:
    """A figure in large type."""

    label: str
    value: str
    note: str = ""
    interval: str = ""
    """Its 95 % confidence interval; empty with a single repeat."""
    invalid: str | None = None
    """Why `value` must not be used."""
    is_loss: bool = False
    """Whether the tile reports lost requests."""


def host(url: str) -> str:
    """Host and port of a URL, without credentials."""
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2] or url


def facts(report: Report) -> dict[str, str]:
    """Label → value of everything that was set or is known about the run."""
    first = report.repeats[0]
    settings = {
        name.replace("_", " "): _setting(value)
        for name, value in report.workload.items()
        if value is not None
    }
    return {
        "Model": report.model,
        "Server": host(report.url),
        "Endpoint": report.endpoint,
        **{name[:1].upper() + name[1:]: value for name, value in settings.items()},
        "SLO": describe_slo(report.slo) or "none given",
        "GPUs": "not given" if report.gpus is None else str(report.gpus),
        "Repeats": str(len(report.repeats)),
        "Time of a repeat": ", ".join(units.seconds(repeat.seconds) for repeat in report.repeats),
        "Started": clock(first.started),
        "Load generator": f"{report.machine}, processes: {report.processes}",
        "Tandem": report.tandem_version,
    }


def sentences(report: Report) -> list[str]:
    """The result in words, losses first."""
    return [
        outcome_sentence(count_due(report.repeats)),
        *_stopped(report),
        *_latency_sentence(report),
        *_slo_sentence(report),
        *_validity_sentence(report),
    ]


def outcome_sentence(counts: dict[str, int]) -> str:
    """How many requests were lost, and how; of those whose time came before a stop."""
    total = sum(counts.values())
    ok = counts.get(Outcome.OK, 0)
    if not total:
        return "No request was scheduled."
    lost = [(count, name) for name, count in counts.items() if count and name not in COMPLETE]
    if not lost:
        differ = f", {total - ok:,} {Outcome.DIFFERS}" if ok < total else ""
        return f"{ok:,} of {total:,} requests ended ok{differ}; none was lost."
    number = sum(count for count, _ in lost)
    kinds = ", ".join(f"{count:,} {name}" for count, name in sorted(lost, reverse=True))
    was = "was" if number == 1 else "were"
    return f"{units.fraction(number, total)} requests {was} lost: {kinds}."


def describe_slo(slo: Slo | None) -> str:
    """`TTFT ≤ 500 ms, ITL ≤ 50 ms`; empty without an SLO."""
    if slo is None:
        return ""
    limits = {"TTFT": slo.ttft, "mean ITL": slo.itl, "end-to-end": slo.e2e}
    return ", ".join(
        f"{name} ≤ {units.seconds(limit)}" for name, limit in limits.items() if limit is not None
    )


def tiles(report: Report) -> list[Tile]:
    """Losses first, then every known figure of the summary, then the longest stall."""
    return [_outcome_tile(report), *_estimate_tiles(report), *_stall_tile(report)]


def _outcome_tile(report: Report) -> Tile:
    total = sum(repeat.rates.due for repeat in report.repeats)
    lost = sum(repeat.rates.lost for repeat in report.repeats)
    note = f"of {total:,} scheduled requests"
    if not lost:
        return Tile("Lost requests", "0", note)
    return Tile("Lost requests", f"{lost:,}", f"{note}: {units.share(lost / total)}", is_loss=True)


def _estimate_tiles(report: Report) -> Iterator[Tile]:
    for name, (label, note) in _TILES.items():
        if figure := report.summary.get(name):
            value = _tile_text(figure.value, figure.unit)
            yield Tile(label, value, note, _interval(figure), figure.invalid)


def _stall_tile(report: Report) -> Iterator[Tile]:
    stalls = [repeat.stall for repeat in report.repeats if repeat.stall]
    if stalls:
        longest = max(stalls, key=lambda stall: stall.seconds)
        note = (
            f"request {longest.request:,} waited for its {longest.phase}, from "
            f"{units.seconds(longest.at)} on"
        )
        yield Tile("Longest stall", units.seconds(longest.seconds), note)


def _interval(figure: Estimate) -> str:
    if figure.low is None or figure.high is None:
        return ""
    return " to ".join(_tile_text(end, figure.unit) for end in (figure.low, figure.high))


def _tile_text(value: float, unit: str) -> str:
    """A figure without the unit of a rate, which the tile's label has."""
    return units.quantity(value, unit if unit in ("s", "share") else "")


def _stopped(report: Report) -> Iterator[str]:
    if any(repeat.stopped for repeat in report.repeats):
        yield "The run was stopped early: the figures are of what was measured until then."


def _latency_sentence(report: Report) -> Iterator[str]:
    """TTFT where answers were streamed, else end-to-end latency. Silent if it is invalid."""
    for prefix, name in (("ttft", "time to the first token"), ("e2e", "end-to-end latency")):
        median, tail = (report.summary.get(f"{prefix}_{p}") for p in ("p50", "p99"))
        if median and tail:
            if not (median.invalid or tail.invalid):
                values = units.seconds(median.value), units.seconds(tail.value)
                yield f"The median {name} was {values[0]}, the 99th percentile {values[1]}."
            return


def _slo_sentence(report: Report) -> Iterator[str]:
    figure = report.summary.get("attainment")
    if figure and not figure.invalid:
        limits = describe_slo(report.slo)
        yield f"{units.share(figure.value)} of all scheduled requests met the SLO ({limits})."


def _validity_sentence(report: Report) -> Iterator[str]:
    figures: list[Estimate | None] = list(report.summary.values())
    if any(figure and figure.invalid for figure in figures) or any(
        _has_invalid(repeat.all) for repeat in report.repeats
    ):
        yield (
            "Some figures are invalid, because the load generator itself was too slow; "
            "they are marked, with the reason."
        )


def _has_invalid(group: Figures) -> bool:
    distributions = (
        *(group.ttft, group.ttft_wire, group.itl),
        *(group.tpot, group.e2e, group.e2e_wire),
    )
    return any(values.invalid for values in distributions if values)


def _setting(value: str | float | bool | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
