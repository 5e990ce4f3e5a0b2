"""What the live benchmark makes of the EPP's records."""

import pytest
from benchmarks.live_summary import (
    ALL,
    biases,
    histogram_median,
    latencies,
    noise,
    prediction_errors,
)

from tandem_contract.metrics_page import MetricsPage
from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_contract.trace import DecisionTrace

SPLIT, UNIFIED = RoutingPath.PREFILL_THEN_DECODE, RoutingPath.UNIFIED
NAME = "tandem_epp_ttft_prediction_error"


def decision(
    predicted: float | None,
    measured: float | None,
    path: RoutingPath | None = UNIFIED,
    timing: Timing | None = None,
) -> DecisionTrace:
    return DecisionTrace(
        "id", 0.0, 0.0, path=path, predicted_ttft=predicted, measured_ttft=measured, timing=timing
    )


def test_errors_are_shares_of_the_measured_time_by_path() -> None:
    errors = prediction_errors(
        [
            decision(0.1, 0.2),
            decision(0.3, 0.2, SPLIT),
            # Not predicted, no stream, and refused: none has an error.
            decision(None, 0.2),
            decision(0.1, None),
            decision(0.1, 0.2, None),
        ]
    )
    assert errors == {ALL: pytest.approx([0.5, 0.5]), UNIFIED: [0.5], SPLIT: pytest.approx([0.5])}


def test_biases_are_what_predictions_leave_out() -> None:
    unified = [decision(0.1, measured) for measured in (0.11, 0.13, 0.9)]
    assert biases([*unified, decision(0.3, 0.2, SPLIT)]) == pytest.approx(
        {SPLIT: -0.1, UNIFIED: 0.03}
    )


def test_waiting_leaves_out_the_engines_own_time() -> None:
    figures = latencies(
        [
            decision(None, 0.5, timing=Timing(compute=0.3, cached=60, computed=40)),
            decision(None, 0.2, timing=Timing(compute=0.3, cached=0, computed=100)),
            decision(None, None, timing=Timing(compute=9.0, cached=100, computed=0)),
        ]
    )
    assert figures.ttft_p99 == pytest.approx(0.5, abs=0.01)
    assert figures.waiting_p99 == pytest.approx(0.2, abs=0.01)
    assert figures.waiting_p50 <= 0.1
    assert figures.hit_ratio == 0.3


def test_noise_is_the_error_of_the_median() -> None:
    assert noise([0.1, 0.1, 0.1]) == 0
    assert noise([0.1, 0.2, 0.4]) == pytest.approx(0.5)


def test_a_run_without_reports_has_no_figures() -> None:
    with pytest.raises(ValueError, match="no stream"):
        latencies([decision(0.1, 0.2)])


def page(**buckets: int) -> MetricsPage:
    lines = [
        f'{NAME}_bucket{{path="unified",le="{le}"}} {count}'
        for le, count in zip(("0.1", "0.2", "+Inf"), buckets.values(), strict=True)
    ]
    return MetricsPage.parse(f"# TYPE {NAME} histogram\n" + "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("after", "median"),
    [((12, 14, 14), 0.1), ((10, 14, 14), 0.15), ((10, 10, 14), None), ((10, 10, 10), None)],
)
def test_the_median_of_what_a_histogram_observed(
    after: tuple[int, int, int], median: float | None
) -> None:
    before, then = page(a=10, b=10, c=10), page(a=after[0], b=after[1], c=after[2])
    expected = median if median is None else pytest.approx(median)
    assert histogram_median(before, then, NAME) == expected
