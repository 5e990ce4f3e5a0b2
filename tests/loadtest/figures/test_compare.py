"""Verdicts on synthetic reports."""

from functools import cache
from typing import Any

import msgspec
import pytest

from tandem_loadtest.figures.compare import Comparison, Difference, compare
from tandem_loadtest.figures.intervals import build_report
from tandem_loadtest.figures.model import Report

from .samples import sample_repeat, sample_report

pytestmark = pytest.mark.long


@cache
def sample(repeats: int, seed: int, slower: float, count: int) -> Report:
    return sample_report(
        repeats=repeats, seed=seed, slower=slower, count=count, lossy=False, read_lag=0.0
    )


def report(
    *, repeats: int = 3, seed: int = 0, slower: float = 1.0, count: int = 300, **fields: Any
) -> Report:
    created = sample(repeats, seed, slower, count)
    # The seed of a sample is that of its noise.
    workload = created.workload | {"seed": 0}
    return msgspec.structs.replace(created, **({"workload": workload} | fields))


def verdicts(comparison: Comparison) -> dict[str, Difference]:
    return {difference.name: difference for difference in comparison.differences}


@pytest.mark.parametrize("repeats", [1, 3])
def test_equal_servers_differ_at_the_rate_of_the_confidence_at_most(repeats: int) -> None:
    false, total = 0, 0
    for seed in range(0, 120, 20):
        comparison = compare(
            report(repeats=repeats, seed=seed), report(repeats=repeats, seed=seed + 10)
        )
        known = [d for d in comparison.differences if d.beyond_noise is not None]
        false += sum(bool(difference.beyond_noise) for difference in known)
        total += len(known)
    assert total > 150
    # Figures of a run depend on each other, so that the rate varies more than that of a coin.
    assert false / total <= 0.1


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_slower_server_is_recognized(repeats: int) -> None:
    comparison = compare(report(repeats=repeats), report(repeats=repeats, seed=50, slower=1.2))
    for name in ("ttft_p50", "ttft_mean", "itl_p50", "tpot_p50", "e2e_p50"):
        difference = verdicts(comparison)[name]
        assert difference.beyond_noise is True
        assert difference.improves is False
        assert difference.percent == pytest.approx(20, abs=12)
        assert difference.low is not None
        assert 0 < difference.low < difference.b - difference.a
    assert verdicts(comparison)["lost_share"].beyond_noise is False
    assert comparison.warnings == []


def test_the_faster_server_is_the_better_one() -> None:
    difference = verdicts(compare(report(slower=1.2), report(seed=50)))["ttft_p50"]
    assert difference.improves is True
    assert difference.percent is not None
    assert difference.percent < 0


def test_a_report_equals_itself() -> None:
    comparison = compare(report(), report())
    assert not any(difference.beyond_noise for difference in comparison.differences)
    assert {difference.percent for difference in comparison.differences} == {0.0, None}


def test_higher_goodput_is_better() -> None:
    slow = report(slower=3.0)
    difference = verdicts(compare(slow, report(seed=50)))["goodput_per_gpu"]
    assert (difference.beyond_noise, difference.improves) == (True, True)


def test_repeats_on_one_side_only_are_combined_with_the_other_sides_run() -> None:
    comparison = compare(report(repeats=1), report(repeats=3, seed=50, slower=1.3))
    difference = verdicts(comparison)["ttft_p50"]
    assert difference.beyond_noise is True
    assert "independent" in difference.basis
    assert [note for note in comparison.notes if note.startswith("A has one repeat")]
    assert not [note for note in comparison.notes if note.startswith("B has one repeat")]


def test_a_single_run_gives_no_verdict_on_token_rates() -> None:
    difference = verdicts(compare(report(repeats=1), report(repeats=1, slower=2)))[
        "output_tokens_per_second"
    ]
    assert (difference.beyond_noise, difference.improves, difference.low) == (None, None, None)
    assert "--repeats" in difference.basis


def test_a_single_run_of_few_requests_does_not_bound_p99() -> None:
    few = report(repeats=1, count=50)
    difference = verdicts(compare(few, report(repeats=1, count=50, seed=5, slower=1.1)))["ttft_p99"]
    assert (difference.low, difference.high, difference.beyond_noise) == (None, None, False)


def test_differences_below_the_error_of_the_histogram_are_noise() -> None:
    # Without variance between the repeats, only the histogram's error keeps the two apart.
    repeat, other = (
        sample_repeat(count=100, lossy=False, slower=s, read_lag=0) for s in (1, 1.004)
    )
    fields: dict[str, Any] = {
        "tandem_version": "", "machine": "", "url": "", "model": "", "endpoint": "",
        "workload": {}, "processes": 1,
    }  # fmt: skip
    a, b = (build_report([r] * 2, **fields) for r in (repeat, other))
    assert verdicts(compare(a, b))["itl_p90"].beyond_noise is False
    assert verdicts(compare(a, b))["itl_mean"].beyond_noise is True


def test_an_invalid_figure_has_no_verdict() -> None:
    invalid = sample_report(lossy=False, count=300, read_lag=0.004)
    comparison = compare(report(), invalid)
    difference = verdicts(comparison)["itl_p50"]
    assert difference.beyond_noise is None
    assert difference.basis.startswith("invalid in B: the load generator's read lag")
    warnings = [w for w in comparison.warnings if w.startswith("B: itl is invalid: ")]
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"model": "other"}, "model differs: base in A, other in B"),
        ({"endpoint": "completions"}, "endpoint differs: chat in A, completions in B"),
        ({"machine": "laptop"}, "machine differs: 2 × Example CPU"),
        ({"processes": 8}, "processes differs: 2 in A, 8 in B"),
        ({"gpus": None}, "gpus differs: 4 in A, none in B"),
        ({"slo": None}, 'slo differs: {"ttft":0.4,"itl":0.03,"e2e":null} in A, none in B'),
        ({"workload": {"preset": "chat", "rate": 20.0}}, "workload rate differs: 15.0 in A, 20.0"),
        ({"workload": {"preset": "rag"}}, "workload preset differs: chat in A, rag in B"),
    ],
)
def test_each_difference_of_the_settings_is_named(fields: dict[str, Any], warning: str) -> None:
    comparison = compare(report(), report(**fields))
    assert [text for text in comparison.warnings if text.startswith(warning)]


def test_another_url_or_version_is_what_a_comparison_is_about() -> None:
    other = report(url="http://127.0.0.1:9", tandem_version="0.2.0")
    assert compare(report(), other).warnings == []


def test_losses_and_stopped_repeats_are_named() -> None:
    lossy = sample_report(count=300, read_lag=0.0)
    stopped = msgspec.structs.replace(
        lossy, repeats=[*lossy.repeats, msgspec.structs.replace(lossy.repeats[0], stopped=True)]
    )
    warnings = compare(stopped, report()).warnings
    assert [text for text in warnings if text.startswith("A lost ")]
    assert "A: 1 of 4 repeats were stopped early" in warnings


def test_a_figure_that_the_repeats_do_not_have_has_no_verdict() -> None:
    inconsistent = report(gpus=None)
    assert "goodput_per_gpu" in inconsistent.summary
    difference = verdicts(compare(report(), inconsistent))["goodput_per_gpu"]
    assert (difference.beyond_noise, difference.basis) == (None, "no repeat has this figure")


def test_figures_of_one_report_only_are_named() -> None:
    a = report()
    summary = {k: v for k, v in a.summary.items() if k not in ("goodput", "attainment")}
    comparison = compare(a, report(summary=summary))
    assert comparison.warnings == ["only A has goodput, attainment"]
    assert "goodput" not in verdicts(comparison)


def test_the_notes_state_the_rate_of_false_differences() -> None:
    (note,) = compare(report(), report()).notes
    assert note == (
        "Intervals have 95 % confidence: of 35 figures without a true difference, about 2 would "
        "still appear to differ."
    )
