"""The page is well formed, complete, escaped, and refers to nothing outside."""

import base64
import hashlib
import json
import re
from functools import lru_cache
from itertools import pairwise

import msgspec
import pytest

from tandem_loadtest.figures.model import Report
from tandem_loadtest.html import page
from tandem_loadtest.records import Outcome

from ..figures.samples import sample_report
from .documents import Document
from .samples import HOSTILE, hostile_report, plain_report, searched_report


@lru_cache
def document(name: str) -> Document:
    return Document(page(REPORTS[name]()))


REPORTS = {
    "three repeats": sample_report,
    "one repeat": lambda: sample_report(repeats=1),
    "no loss": lambda: sample_report(repeats=1, lossy=False, read_lag=0.0001),
    "not streamed": plain_report,
    "all lost": lambda: plain_report(outcome=Outcome.SHED),
    "no request": lambda: plain_report(requests=0),
    "no request, with an SLO": lambda: plain_report(requests=0, within_slo=0),
    "hostile": hostile_report,
    "after a search": searched_report,
}
every_report = pytest.mark.parametrize("name", REPORTS)


@every_report
def test_ids_are_unique_and_references_exist(name: str) -> None:
    found = document(name)
    ids = [e.attributes["id"] for e in found.elements if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    for element in found.elements:
        for attribute in ("aria-labelledby", "aria-describedby"):
            assert element.attributes.get(attribute, ids[0]) in ids
        if element.attributes.get("href", "").startswith("#"):
            assert element.attributes["href"][1:] in ids


@every_report
def test_nothing_is_loaded(name: str) -> None:
    found = document(name)
    for element in found.elements:
        assert not {"src", "srcset", "action", "data", "poster"} & element.attributes.keys()
        assert element.attributes.get("href", "#").startswith(("#", "data:,"))
    (style,) = found.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text


def test_policy_allows_only_the_scripts_of_the_page() -> None:
    found = document("one repeat")
    (policy,) = found.all("meta", **{"http-equiv": "Content-Security-Policy"})
    directives = dict(
        part.strip().split(" ", 1) for part in policy.attributes["content"].split(";")
    )
    assert directives["default-src"] == "'none'"
    scripts = [script.text for script in found.all("script") if not script.attributes]
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert directives["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]


@every_report
def test_headings_do_not_skip_a_level(name: str) -> None:
    levels = [int(e.tag[1]) for e in document(name).elements if re.fullmatch("h[1-6]", e.tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


@every_report
def test_every_chart_has_a_name_a_description_and_its_values(name: str) -> None:
    found = document(name)
    (script,) = found.all("script", id="chart-data")
    charts = {chart["key"]: chart for chart in json.loads(script.text)}
    figures = {f.attributes["aria-labelledby"]: f for f in found.all("figure")}
    assert len(figures) == len(charts) == 1 + 6 * len(REPORTS[name]().repeats)
    for key, chart in charts.items():
        figure = figures[f"{key}-title"]
        plots = [plot for plot in figure.inner if plot.attributes.get("role") == "img"]
        tables = [inner for inner in figure.inner if inner.tag == "details"]
        assert bool(plots) == bool(tables) == bool(chart["data"])
        assert found.all("p", id=f"{key}-description")[0].text


def test_losses_come_first() -> None:
    found = document("three repeats")
    (verdict,) = [e for e in found.all("p") if e.attributes.get("class", "").startswith("verdict")]
    assert verdict.words.startswith("124 of 1,800 (6.9\N{NO-BREAK SPACE}%) requests were lost")
    assert found.all("li")[6].words.split()[:3] == ["Lost", "requests", "124"]


def test_every_outcome_and_every_event_is_shown() -> None:
    report = sample_report(repeats=1)
    cells = {e.words for e in document("one repeat").elements if e.tag in ("th", "td", "span")}
    assert {outcome.value for outcome in Outcome} <= cells
    for event in report.repeats[0].events:
        assert event.command in cells
        assert event.output in cells


def test_an_invalid_figure_is_never_shown_as_valid() -> None:
    report = sample_report(repeats=1)
    (reason,) = {f.invalid for f in report.summary.values() if f.invalid and f.unit == "s"}
    tiles = document("one repeat").all("li", class_="tile invalid")
    # Goodput and attainment depend on a limit of ITL.
    labels = [tile.inner[0].text for tile in tiles]
    assert labels[:2] == ["ITL, median", "ITL, p99"]
    assert all(label.startswith(("Goodput", "Within")) for label in labels[2:]), labels
    assert {tile.inner[1].text for tile in tiles} == {"invalid"}
    assert {tile.inner[-1].text for tile in tiles[:2]} == {reason}
    shown = report.repeats[0].all.itl
    assert shown is not None
    median = f"{shown.percentiles['50'] * 1000:.1f}\N{NO-BREAK SPACE}ms"
    holders = [e for e in document("one repeat").elements if e.text.strip() == median]
    assert holders
    assert {e.tag for e in holders} == {"s"}


@pytest.mark.parametrize("name", ["not streamed", "all lost", "no request"])
def test_missing_figures_are_left_out(name: str) -> None:
    found = document(name)
    words = "".join(e.words for e in found.all("main"))
    assert "None" not in words
    assert "nan" not in words
    assert len([e for e in found.all("li") if "tile" in e.attributes.get("class", "")]) == 1


def test_says_that_all_were_lost_and_why() -> None:
    words = document("all lost").all("main")[0].words
    assert "3 of 3 (100\N{NO-BREAK SPACE}%) requests were lost: 3 shed." in words
    assert "the reason" in words


def test_text_from_outside_is_escaped() -> None:
    found = document("hostile")
    assert len(found.all("script")) == 3
    assert found.all("b") == []
    assert not any(name.startswith("on") for e in found.elements for name in e.attributes)
    (title,) = found.all("h1")
    assert title.text == f"Load test of {HOSTILE}"
    assert "secret" not in page(hostile_report())


def test_charts_have_no_markup_from_outside() -> None:
    """Plotly reads names, labels and hover texts as HTML."""
    (script,) = document("hostile").all("script", id="chart-data")
    assert "&lt;/script&gt;" in script.text
    assert "\\u003c" not in script.text
    assert "<" not in script.text


def test_a_report_read_from_json_gives_the_same_page() -> None:
    report = sample_report(repeats=1, count=50)
    copy = msgspec.json.decode(msgspec.json.encode(report), type=Report)
    assert page(copy) == page(report)


def test_the_steps_of_a_search_are_shown_by_their_rate() -> None:
    text = page(searched_report())
    section = text[text.index('<section id="search"') :]
    section = section[: section.index("</section>")]
    assert section.index("2.10") < section.index("3.90") < section.index("8.20")
    assert "was too late" in section
    assert '<section id="search"' not in page(sample_report(repeats=1))
