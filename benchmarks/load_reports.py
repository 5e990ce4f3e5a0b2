"""What load generators report, read from the JSON files that they write."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from tandem_loadtest.figures.model import Distribution, Report
from tandem_loadtest.records import Outcome

_MS: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Reported:
    """The result of a run as the tool gives it. Times in seconds; None: not reported."""

    ok: int
    """Requests that it counts as successful."""
    failed: int
    """Requests that it counts as anything else."""
    ttft_p50: float | None
    ttft_p95: float | None
    ttft_p99: float | None
    itl_p50: float | None
    """Of all gaps, or of the mean gap of each request: on a regular server they are the same."""
    note: str = ""
    """Classes of failures, and whether it says that its own figures are invalid."""


def tandem(directory: Path) -> Reported:
    """`tandem bench --json report.json`."""
    report = msgspec.json.decode((directory / "report.json").read_bytes(), type=Report)
    figures = report.repeats[0].all
    ok = figures.outcomes.get(Outcome.OK, 0)
    notes = [f"{n} {name}" for name, n in sorted(figures.outcomes.items()) if name != Outcome.OK]
    distributions = (figures.ttft, figures.itl)
    if any(figure is not None and figure.invalid for figure in distributions):
        notes.append("marks figures as invalid")
    return Reported(
        ok,
        figures.requests - ok,
        _percentile(figures.ttft, "50"),
        _percentile(figures.ttft, "95"),
        _percentile(figures.ttft, "99"),
        _percentile(figures.itl, "50"),
        ", ".join(notes),
    )


def _percentile(figure: Distribution | None, name: str) -> float | None:
    return None if figure is None else figure.percentiles[name]


def vllm(directory: Path) -> Reported:
    """`vllm bench serve --save-result --result-filename report.json`."""
    report = _read(directory / "report.json")
    return Reported(
        report["completed"],
        # A report on embeddings has no number of failures.
        report.get("failed", report["num_prompts"] - report["completed"]),
        _milliseconds(report.get("p50_ttft_ms")),
        _milliseconds(report.get("p95_ttft_ms")),
        _milliseconds(report.get("p99_ttft_ms")),
        _milliseconds(report.get("p50_itl_ms")),
    )


def guidellm(directory: Path) -> Reported:
    """`guidellm run --output kind=json,path=report.json`."""
    (benchmark,) = _read(directory / "report.json")["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]

    def percentile(metric: str, name: str) -> float | None:
        values = metrics[metric]["successful"]
        return _milliseconds(values["percentiles"][name]) if values["count"] else None

    delay = (metrics["request_dispatch_delay"] or {}).get("successful", {}).get("percentiles", {})
    late = delay.get("p99", 0.0)
    return Reported(
        totals["successful"],
        totals["total"] - totals["successful"],
        percentile("time_to_first_token_ms", "p50"),
        percentile("time_to_first_token_ms", "p95"),
        percentile("time_to_first_token_ms", "p99"),
        percentile("inter_token_latency_ms", "p50"),
        f"dispatch delay p99 {late * 1000:.0f} ms" if late > 0.05 else "",
    )


def aiperf(directory: Path) -> Reported:
    """`aiperf profile --artifact-dir`."""
    report = _read(directory / "profile_export_aiperf.json")

    def value(metric: str, name: str) -> float | None:
        return _milliseconds(report.get(metric, {}).get(name))

    return Reported(
        int(report.get("request_count", {}).get("avg", 0)),
        int(report.get("error_request_count", {}).get("avg", 0)),
        value("time_to_first_token", "p50"),
        value("time_to_first_token", "p95"),
        value("time_to_first_token", "p99"),
        value("inter_token_latency", "p50"),
    )


def _read(file: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def _milliseconds(value: float | None) -> float | None:
    return None if value is None else value * _MS
