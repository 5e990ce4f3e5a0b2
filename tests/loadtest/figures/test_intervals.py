"""Confidence intervals over repeats and the summary of a report."""

import random
from statistics import fmean

import msgspec
import pytest

from tandem_loadtest.figures.intervals import (
    Value,
    build_report,
    complete,
    estimate,
    summarize,
    summary_values,
    t_quantile,
)
from tandem_loadtest.figures.model import Repeat

from .samples import sample_repeat, sample_report


@pytest.mark.parametrize(
    ("freedom", "expected"),
    # Table of the NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, α = 0.025.
    [
        (1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (29, 2.045),
        (100, 1.984), (1e7, 1.960),
    ],
)  # fmt: skip
def test_the_quantile_of_students_distribution(freedom: float, expected: float) -> None:
    assert t_quantile(freedom) == pytest.approx(expected, abs=6e-4)


def test_degrees_of_freedom_need_not_be_whole() -> None:
    assert t_quantile(2) < t_quantile(1.5) < t_quantile(1)


def test_an_estimate_has_students_interval() -> None:
    # Mean 3, standard deviation √2.5, 4 degrees of freedom.
    result = estimate([Value(v, "s") for v in (1.0, 2.0, 3.0, 4.0, 5.0)])
    assert (result.value, result.unit) == (3, "s")
    assert result.low == pytest.approx(3 - 2.776445 * (2.5 / 5) ** 0.5, abs=1e-4)
    assert result.high == pytest.approx(3 + 2.776445 * (2.5 / 5) ** 0.5, abs=1e-4)


def test_the_interval_covers_the_truth_in_95_of_100_cases() -> None:
    random_ = random.Random(1)
    covered = 0
    for _ in range(2000):
        result = estimate([Value(random_.gauss(7, 2), "s") for _ in range(3)])
        assert result.low is not None
        assert result.high is not None
        covered += result.low <= 7 <= result.high
    assert 0.935 <= covered / 2000 <= 0.965


def test_one_repeat_has_no_interval() -> None:
    result = estimate([Value(2.0, "s", "too slow")])
    assert (result.value, result.low, result.high, result.invalid) == (2, None, None, "too slow")


def test_the_interval_has_the_error_of_the_histogram() -> None:
    result = estimate([Value(2.0, "s", error=0.5), Value(2.0, "s", error=0.25)])
    assert (result.low, result.high) == (1.5, 2.5)


def test_an_estimate_is_of_at_least_one_value() -> None:
    with pytest.raises(ValueError, match="value"):
        estimate([])


@pytest.fixture(scope="module")
def repeats() -> list[Repeat]:
    return [sample_repeat(seed=seed, count=200) for seed in range(3)]


def test_the_summary_has_every_figure(repeats: list[Repeat]) -> None:
    summary = summarize(repeats, gpus=4)
    times = ("ttft", "ttft_wire", "itl", "tpot", "e2e", "e2e_wire")
    rates = (
        "requests_per_second", "output_tokens_per_second", "total_tokens_per_second", "goodput",
    )  # fmt: skip
    assert summary.keys() == {
        *(f"{name}_{part}" for name in times for part in ("mean", "p50", "p90", "p99")),
        *rates,
        *(f"{name}_per_gpu" for name in rates),
        *("attainment", "lost_share", "cache_hit_share"),
    }
    assert {e.unit for name, e in summary.items() if name.startswith(times)} == {"s"}
    for name in rates:
        assert summary[f"{name}_per_gpu"].value == pytest.approx(summary[name].value / 4)
        assert summary[f"{name}_per_gpu"].unit == summary[name].unit + "/GPU"


def test_the_summary_is_the_mean_over_the_repeats(repeats: list[Repeat]) -> None:
    summary = summarize(repeats, gpus=None)
    assert not any(name.endswith("per_gpu") for name in summary)
    lost = [
        1 - (r.all.outcomes["ok"] + r.all.outcomes.get("differs", 0)) / r.all.requests
        for r in repeats
    ]
    assert summary["lost_share"].value == pytest.approx(fmean(lost))
    assert summary["goodput"].value == pytest.approx(fmean(r.rates.goodput or 0 for r in repeats))
    hits = [(r.all.cached_tokens or 0) / r.all.prompt_tokens for r in repeats]
    assert summary["cache_hit_share"].value == pytest.approx(fmean(hits))
    p99 = [r.all.ttft.percentiles["99"] for r in repeats if r.all.ttft]
    assert summary["ttft_p99"].value == pytest.approx(fmean(p99))


def test_a_figure_is_invalid_if_it_is_in_any_repeat(repeats: list[Repeat]) -> None:
    late = sample_repeat(seed=9, count=200, read_lag=0.002)
    summary = summarize([*repeats, late], gpus=None)
    assert summary["itl_p50"].invalid == (late.all.itl and late.all.itl.invalid)
    assert summary["itl_p50"].invalid
    assert summary["ttft_p50"].invalid is None


def test_a_repeat_without_slo_has_no_goodput() -> None:
    values = summary_values(sample_repeat(count=50, slo=None), gpus=1)
    assert not values.keys() & {"goodput", "goodput_per_gpu", "attainment"}


def test_stopped_repeats_count_only_if_no_other_does(repeats: list[Repeat]) -> None:
    stopped = msgspec.structs.replace(repeats[0], stopped=True)
    assert complete([stopped, repeats[1]]) == [repeats[1]]
    assert complete([stopped, stopped]) == [stopped, stopped]
    assert summarize([stopped, repeats[1]], None) == summarize([repeats[1]], None)


def test_a_report_has_its_repeats_and_their_summary() -> None:
    report = sample_report(repeats=2, count=50)
    assert len(report.repeats) == 2
    assert report.summary == summarize(report.repeats, 4)


def test_a_report_needs_a_repeat() -> None:
    with pytest.raises(ValueError, match="repeat"):
        build_report(
            [], tandem_version="", machine="", url="", model="", endpoint="", workload={},
            processes=1,
        )  # fmt: skip


def test_an_interval_stays_where_its_figure_can_be() -> None:
    spread = estimate([Value(0.1, "share"), Value(0.9, "share")])
    assert (spread.low, spread.high) == (0.0, 1.0)
    assert estimate([Value(1.0, "requests/s"), Value(9.0, "requests/s")]).low == 0.0


def test_goodput_and_attainment_are_invalid_with_the_latencies_of_the_slo() -> None:
    summary = sample_report(repeats=1, read_lag=1.0).summary
    assert summary["goodput"].invalid
    assert summary["attainment"].invalid == summary["goodput"].invalid
    assert not summary["requests_per_second"].invalid
    assert not sample_report(repeats=1, read_lag=0.0001).summary["goodput"].invalid
