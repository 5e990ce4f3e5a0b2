"""Figures per path."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.paths import RoutingPath
from tandem_loadtest.calls import Call, Result
from tandem_loadtest.report import (
    UNROUTED,
    PathFigures,
    Slos,
    figures,
    percentile,
    summarize,
    to_json,
)

CALL = Call("x", max_tokens=1)


def result(
    path: RoutingPath | None = None,
    ttft: float | None = 0.1,
    itls: tuple[float, ...] = (),
    error: str | None = None,
) -> Result:
    return Result(CALL, routing_path=path, ttft=ttft, itls=itls, error=error)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([4.0, 1.0, 3.0, 2.0], 0, 1.0),
        ([4.0, 1.0, 3.0, 2.0], 100, 4.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([0.0, 10.0], 99, 9.9),
    ],
)
def test_a_percentile_is_linear_between_ranks(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100), st.floats(0, 100))
def test_a_percentile_lies_within_its_values_and_rises(
    values: list[float], percent: float, other_percent: float
) -> None:
    low, high = sorted((percentile(values, percent), percentile(values, other_percent)))
    assert min(values) <= low
    assert high <= max(values)
    assert percentile(values, min(percent, other_percent)) == low


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_a_percentile_of_nothing_or_out_of_range_is_an_error(
    values: list[float], percent: float
) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_results_are_summed_up_by_path() -> None:
    fast, split = RoutingPath.FAST_DECODE, RoutingPath.PREFILL_THEN_DECODE
    summary = summarize(
        [
            result(split, 1.0, (0.1, 0.3)),
            result(fast, 0.2, (0.2,)),
            result(split, 3.0),
            result(split, ttft=None),
            result(split, 99.0, (99.0,), error="broke off"),
            result(None, None, error="no route"),
        ]
    )
    assert list(summary) == ["fast_decode", "prefill_then_decode", UNROUTED]
    assert summary[fast] == PathFigures(1, 0, 0.2, 0.2, 0.2, 0.2)
    assert summary[split].requests == 4
    assert summary[split].failed == 1
    assert summary[split].ttft_p50 == 2.0
    assert summary[split].itl_p50 == pytest.approx(0.2)
    assert summary[UNROUTED] == PathFigures(1, 1, None, None, None, None)


def test_no_results_give_no_paths() -> None:
    assert summarize([]) == {}
    assert figures([]) == PathFigures(0, 0, None, None, None, None)


def test_goodput_counts_requests_that_met_both_slos() -> None:
    results = [
        result(ttft=0.5, itls=(0.1, 0.3)),
        result(ttft=0.5),
        result(ttft=0.6, itls=(0.1,)),
        result(ttft=0.1, itls=(0.1, 0.5)),
        result(ttft=None),
        result(ttft=0.1, error="broke off"),
    ]
    assert figures(results, slos=Slos(ttft=0.5, itl=0.2), seconds=4).goodput == 0.5


def test_goodput_needs_a_duration() -> None:
    with pytest.raises(ValueError, match="duration"):
        figures([], slos=Slos(1, 1))


def test_the_summary_goes_to_json() -> None:
    written = json.loads(json.dumps(to_json(summarize([result(RoutingPath.UNIFIED)]))))
    assert written == {
        "unified": {
            "requests": 1, "failed": 0, "ttft_p50": 0.1, "ttft_p99": 0.1,
            "itl_p50": None, "itl_p99": None, "goodput": None,
        }
    }  # fmt: skip
