"""The sentence and the tiles at the top of the page."""

import pytest
from msgspec import structs

from tandem_loadtest.figures.model import Slo
from tandem_loadtest.html.summary import (
    describe_slo,
    facts,
    host,
    outcome_sentence,
    sentences,
    tiles,
)

from ..figures.samples import sample_report
from .samples import plain_report


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ({}, "No request was scheduled."),
        ({"ok": 1200}, "1,200 of 1,200 requests ended ok; none was lost."),
        ({"ok": 8, "differs": 2}, "8 of 10 requests ended ok, 2 differs; none was lost."),
        ({"ok": 9, "shed": 1}, "1 of 10 (10 %) requests was lost: 1 shed."),
        (
            {"ok": 6, "differs": 1, "shed": 1, "truncated": 2, "wrong": 0},
            "3 of 10 (30 %) requests were lost: 2 truncated, 1 shed.",
        ),
    ],
)
def test_outcome_sentence(counts: dict[str, int], sentence: str) -> None:
    assert outcome_sentence(counts).replace("\N{NO-BREAK SPACE}", " ") == sentence


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000/v1", "127.0.0.1:8000"),
        ("https://user:secret@example.com/", "example.com"),
        ("not a URL", "not a URL"),
    ],
)
def test_host(url: str, expected: str) -> None:
    assert host(url) == expected


def test_describe_slo() -> None:
    text = describe_slo(Slo(ttft=0.5, e2e=2.0)).replace("\N{NO-BREAK SPACE}", " ")
    assert text == "TTFT ≤ 500 ms, end-to-end ≤ 2 s"
    assert describe_slo(None) == ""


def test_invalid_figures_are_not_in_the_sentence() -> None:
    slow = sample_report(read_lag=0.1)
    assert slow.summary["ttft_p50"].invalid
    text = " ".join(sentences(slow))
    assert "median" not in text
    assert "Some figures are invalid" in text
    assert "invalid" not in " ".join(sentences(sample_report(read_lag=0.0001)))


def test_says_that_a_run_was_stopped() -> None:
    report = sample_report(repeats=1)
    stopped = structs.replace(report.repeats[0], stopped=True)
    text = " ".join(sentences(structs.replace(report, repeats=[stopped])))
    assert "stopped early" in text
    assert "stopped" not in " ".join(sentences(report))


def test_tiles_have_intervals_only_with_several_repeats() -> None:
    assert any(tile.interval for tile in tiles(sample_report()))
    assert not any(tile.interval for tile in tiles(sample_report(repeats=1)))


def test_tiles_of_a_run_without_slo_and_streams() -> None:
    assert [tile.label for tile in tiles(plain_report())] == ["Lost requests"]


def test_facts_name_everything_that_was_set() -> None:
    report = sample_report(repeats=2)
    shown = facts(report)
    assert shown["Model"] == "base"
    assert shown["Arrivals"] == "poisson"
    assert shown["Repeats"] == "2"
    assert "Shared" not in shown, "a setting of None was not set"
    assert "2 × Example CPU" in shown["Load generator"]
