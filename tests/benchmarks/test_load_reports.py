"""The reports of other load generators, in the shape that their pinned versions write."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import load_reports
from benchmarks.load_reports import Reported

VLLM = {
    "completed": 9,
    "failed": 1,
    "num_prompts": 10,
    "p50_ttft_ms": 100.0,
    "p95_ttft_ms": 150.0,
    "p99_ttft_ms": 200.0,
    "p50_itl_ms": 20.0,
}
VLLM_EMBEDDINGS = {"completed": 9, "num_prompts": 10, "p50_e2el_ms": 100.0}


def distribution(p50: float, p95: float, p99: float, count: int = 9) -> dict[str, Any]:
    percentiles = {"p50": p50, "p95": p95, "p99": p99}
    return {"successful": {"count": count, "percentiles": percentiles}}


def guidellm(count: int = 9, delay: float = 0.0) -> dict[str, Any]:
    metrics = {
        "request_totals": {"successful": 9, "errored": 1, "incomplete": 0, "total": 10},
        "time_to_first_token_ms": distribution(100.0, 150.0, 200.0, count),
        "inter_token_latency_ms": distribution(20.0, 22.0, 25.0, count),
        "request_dispatch_delay": distribution(0.001, 0.001, delay),
    }
    return {"benchmarks": [{"metrics": metrics}]}


AIPERF = {
    "request_count": {"unit": "requests", "avg": 9.0},
    "error_request_count": {"unit": "requests", "avg": 1.0},
    "time_to_first_token": {"unit": "ms", "p50": 100.0, "p95": 150.0, "p99": 200.0},
    "inter_token_latency": {"unit": "ms", "p50": 20.0, "p99": 25.0},
}
STREAMED = (9, 1, pytest.approx(0.1), pytest.approx(0.15), pytest.approx(0.2), pytest.approx(0.02))
WHOLE = (9, 1, None, None, None, None)


@pytest.mark.parametrize(
    ("read", "file", "report", "values"),
    [
        (load_reports.vllm, "report.json", VLLM, STREAMED),
        (load_reports.vllm, "report.json", VLLM_EMBEDDINGS, WHOLE),
        (load_reports.guidellm, "report.json", guidellm(), STREAMED),
        (load_reports.guidellm, "report.json", guidellm(count=0), WHOLE),
        (load_reports.aiperf, "profile_export_aiperf.json", AIPERF, STREAMED),
    ],
)
def test_reports_are_read(
    read: Callable[[Path], Reported],
    file: str,
    report: dict[str, Any],
    values: tuple[object, ...],
    tmp_path: Path,
) -> None:
    (tmp_path / file).write_text(json.dumps(report))
    reported = read(tmp_path)
    assert (
        reported.ok,
        reported.failed,
        reported.ttft_p50,
        reported.ttft_p95,
        reported.ttft_p99,
        reported.itl_p50,
    ) == values
    assert reported.note == ""


def test_a_report_without_failures_has_no_number_of_errors(tmp_path: Path) -> None:
    report = {key: value for key, value in AIPERF.items() if key != "error_request_count"}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(report))
    assert load_reports.aiperf(tmp_path).failed == 0


def test_the_dispatch_delay_of_guidellm_is_noted(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(guidellm(delay=0.95)))
    assert load_reports.guidellm(tmp_path).note == "dispatch delay p99 950 ms"
