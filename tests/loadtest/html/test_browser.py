"""The page in headless Chromium: drawn without complaint, at any width, by mouse or keyboard."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem_loadtest.figures.model import Report
from tandem_loadtest.html import page

from ...browser import FOCUSED, LOW_CONTRAST, Tab
from ..figures.samples import sample_report
from .samples import hostile_report, plain_report

pytestmark = pytest.mark.component

REPORTS: dict[str, Callable[[], Report]] = {
    "three repeats": sample_report,
    "no loss": lambda: sample_report(repeats=1, lossy=False, read_lag=0.0001),
    "not streamed": plain_report,
    "hostile": hostile_report,
}
WIDTHS = (380, 800, 1400)
THEMES = ("light", "dark")
OPEN_REPEATS = "document.querySelectorAll('.repeat').forEach(d => { d.open = true })"
OPEN_EVERYTHING = "document.querySelectorAll('details').forEach(d => { d.open = true })"
BROKEN_CHARTS = """
JSON.parse(document.getElementById("chart-data").textContent)
  .filter(chart => chart.data.length > 0)
  .filter(chart => {
    const plot = document.getElementById(chart.key);
    const drawn = plot.querySelector("svg.main-svg");
    const traces = plot.querySelectorAll(".scatterlayer .trace, .barlayer .trace").length;
    return !drawn || traces !== chart.data.length || Plotly.validate(plot.data, plot.layout)
      || Math.abs(drawn.clientWidth - plot.clientWidth) > 1;
  }).map(chart => chart.key)
"""
FOCUSABLE = """
[...document.querySelectorAll("a[href], button, summary, [tabindex='0']")]
  .filter(e => e.checkVisibility()).length
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each report's page."""
    folder = tmp_path_factory.mktemp("pages")
    written = {name: folder / f"{name}.html" for name in REPORTS}
    for name, file in written.items():
        file.write_text(page(REPORTS[name]()), encoding="utf-8")
    return written


@pytest.mark.parametrize("name", REPORTS)
async def test_draws_every_chart_at_every_width(
    name: str, tab: Tab, files: dict[str, Path]
) -> None:
    await tab.open(files[name])
    await tab.run(OPEN_REPEATS)
    for width in WIDTHS:
        await tab.resize(width)
        assert await tab.run(BROKEN_CHARTS) == []
        assert await tab.run("document.documentElement.scrollWidth") == width
    assert await tab.run("window.alert.toString().includes('native')")


@pytest.mark.parametrize("theme", THEMES)
async def test_contrast_of_all_text_is_high_enough(
    theme: str, tab: Tab, files: dict[str, Path]
) -> None:
    await tab.prefer(prefers_color_scheme=theme)
    await tab.open(files["three repeats"])
    await tab.run(OPEN_EVERYTHING)
    await tab.painted()
    result = await tab.run(LOW_CONTRAST)
    assert result["checked"] > 1000
    assert result["low"] == []


async def _colours(tab: Tab) -> dict[str, Any]:
    colours: dict[str, Any] = await tab.run(
        """({
          pressed: document.getElementById("theme").getAttribute("aria-pressed"),
          page: getComputedStyle(document.body).backgroundColor,
          chart: document.getElementById("latency-cdf").layout.paper_bgcolor,
        })"""
    )
    return colours


@pytest.mark.parametrize("theme", THEMES)
async def test_the_button_changes_the_theme_of_page_and_charts(
    theme: str, tab: Tab, files: dict[str, Path]
) -> None:
    await tab.prefer(prefers_color_scheme=theme)
    await tab.open(files["no loss"])
    before = await _colours(tab)
    assert before["pressed"] == str(theme == "dark").lower()
    await tab.run("document.getElementById('theme').focus()")
    await tab.press(" ", 32, " ")
    await tab.painted()
    after = await _colours(tab)
    assert all(after[key] != before[key] for key in before)
    await tab.run("document.getElementById('theme').click()")
    await tab.painted()
    assert await _colours(tab) == before


async def test_follows_the_system_when_it_changes(tab: Tab, files: dict[str, Path]) -> None:
    await tab.prefer(prefers_color_scheme="light")
    await tab.open(files["no loss"])
    before = await _colours(tab)
    await tab.prefer(prefers_color_scheme="dark")
    after = await _colours(tab)
    assert all(after[key] != before[key] for key in before)


async def test_the_keyboard_reaches_everything_and_focus_is_visible(
    tab: Tab, files: dict[str, Path]
) -> None:
    await tab.open(files["three repeats"])
    expected = await tab.run(FOCUSABLE)
    await tab.press("Tab", 9)
    first = focused = await tab.run(FOCUSED)
    assert first["text"] == "Skip to the result"
    reached = 0
    while focused is not None and reached < expected:
        assert focused["outline"] != "none", focused
        assert focused["width"] >= 2, focused
        reached = focused["count"]
        await tab.press("Tab", 9)
        focused = await tab.run(FOCUSED)
    assert reached == expected > 30


async def test_keys_follow_the_skip_link_and_open_a_repeat(
    tab: Tab, files: dict[str, Path]
) -> None:
    await tab.open(files["three repeats"])
    await tab.press("Tab", 9)
    await tab.press("Enter", 13, "\r")
    assert await tab.run("document.activeElement.id") == "main"
    second = "document.querySelectorAll('details.repeat')[1]"
    assert not await tab.run("document.querySelector('#repeat-2-ttft svg') !== null")
    await tab.run(f"{second}.querySelector('summary').focus()")
    await tab.press("Enter", 13, "\r")
    await tab.painted()
    assert await tab.run(f"{second}.open")
    assert await tab.run("document.querySelector('#repeat-2-ttft svg') !== null")


async def test_a_screen_reader_gets_the_charts_as_images_with_names(
    tab: Tab, files: dict[str, Path]
) -> None:
    await tab.open(files["no loss"])
    await tab.call("Accessibility.enable")
    nodes = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
    shown = [node for node in nodes if not node["ignored"]]
    roles = {node["role"]["value"] for node in shown}
    assert {"main", "banner", "navigation", "contentinfo", "heading", "table"} <= roles
    images = [node for node in shown if node["role"]["value"] in ("img", "image")]
    assert [node["name"]["value"] for node in images] == [
        *("Distribution of latencies", "Time to first token", "Inter-token latency"),
        *("Requests in flight", "Routing paths", "Decode backends"),
    ]
    assert all(node["description"]["value"] for node in images)


async def test_fits_a_sheet_of_paper(tab: Tab, files: dict[str, Path]) -> None:
    await tab.open(files["three repeats"])
    await tab.run(OPEN_REPEATS)
    await tab.call("Emulation.setEmulatedMedia", media="print")
    await tab.resize(718)  # A4 with Chromium's margins, in CSS pixels
    assert await tab.run("document.documentElement.scrollWidth") == 718


async def test_prints_in_light_colours(tab: Tab, files: dict[str, Path]) -> None:
    await tab.prefer(prefers_color_scheme="dark")
    await tab.open(files["no loss"])
    screen = await _colours(tab)
    await tab.run("window.dispatchEvent(new Event('beforeprint'))")
    assert (await _colours(tab))["pressed"] == "false"
    await tab.run("window.dispatchEvent(new Event('afterprint'))")
    assert await _colours(tab) == screen
