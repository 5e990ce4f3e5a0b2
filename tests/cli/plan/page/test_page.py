"""The page in headless Chromium: its controls, its pictures, its words."""

import csv
from pathlib import Path
from typing import Any

import pytest

from tandem_cli.plan.page import page

from ....browser import FOCUSED, LOW_CONTRAST, Tab
from ....loadtest.html.documents import Document
from .pages import HOSTILE, click, data, drawn, measured, opened, text, type_into

WIDTHS = (380, 800, 1400)
THEMES = ("light", "dark")
EXPERIMENTS = ("default", "pcie", "short", "long")
INPUTS = "[...document.querySelectorAll('input, select, button, a[href], summary, [tabindex]')]"
NAMES = """
[...document.querySelectorAll("input, select, button, canvas")]
  .filter((e) => !e.hidden && !e.ariaHidden)
  .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim()
    || document.getElementById(e.getAttribute("aria-labelledby"))?.textContent.trim()))
  .map((e) => e.outerHTML)
"""
PICTURE = """
(() => {
  const canvas = document.getElementById("%s-timeline");
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
  const seen = {};
  for (let at = 0; at < data.length; at += 4) {
    const colour = `rgb(${data[at]}, ${data[at + 1]}, ${data[at + 2]})`;
    seen[colour] = (seen[colour] ?? 0) + 1;
  }
  const of = (name) => seen[Theme.colour(name)] ?? 0;
  return { prefill: of("--series-2"), decode: of("--series-1"), waiting: of("--bad"),
           transfer: of("--series-3"), panel: of("--panel") };
})()
"""
FIGURES = """
Object.fromEntries(["colocated", "split"].map((architecture) => [
  architecture,
  Object.fromEntries(
    Object.entries(Model.outcome(Model.parsed(location.hash), architecture).figures)
      .map(([name, figure]) => [name, figure.value])),
]))
"""
LINKS = """
Model.outcome(Model.parsed(location.hash), "split").run.pods
  .reduce((sum, { link }) => sum + (link?.busy ?? 0), 0)
"""

pytestmark = pytest.mark.component


async def test_both_timelines_show_prefills_and_decodes(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    await click(tab, "[data-experiment=default]")
    await tab.painted()
    together, split = [await tab.run(PICTURE % name) for name in ("colocated", "split")]
    assert min(together["prefill"], together["decode"], together["waiting"]) > 100
    assert min(split["prefill"], split["decode"], split["transfer"]) > 50
    assert split["waiting"] == together["transfer"] == 0
    assert "requests arrive" in await text(tab, "#split-timeline-text")


async def test_a_slider_moved_by_keys_changes_number_picture_and_link(
    tab: Tab, tmp_path: Path
) -> None:
    await opened(tab, tmp_path)
    before = await tab.run(PICTURE % "colocated")
    slider = "document.querySelector('[data-name=long] input[type=range]')"
    await tab.run(f"{slider}.focus()")
    for _ in range(20):
        await tab.press("ArrowRight", 39)
    await drawn(tab)
    assert await tab.run("document.getElementById('long').value") == "45"
    assert await tab.run(f"{slider}.ariaValueText ?? {slider}.getAttribute('aria-valuetext')") == (
        "45 %"
    )
    assert (await tab.run(PICTURE % "colocated"))["prefill"] > before["prefill"]
    assert "long=45" in await tab.run("location.hash")
    print("from slider to picture:", await text(tab, "#drawn"))


async def test_a_number_beyond_the_slider_counts_and_nonsense_does_not(
    tab: Tab, tmp_path: Path
) -> None:
    await opened(tab, tmp_path)
    await type_into(tab, "decodes", "20")
    await drawn(tab)
    assert "20 decode" in await text(tab, "#split-timeline-pods")
    await type_into(tab, "decodes", "0")
    assert await tab.run("document.getElementById('decodes').value") == "20"
    assert "decodes=20" in await tab.run("location.hash")


async def test_a_link_restores_the_state_and_bad_ones_start_anew(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    await tab.run("location.hash = 'rate=30&long=50&prefills=2&chunk=512'")
    await tab.painted()
    await drawn(tab)
    assert await tab.run("document.getElementById('rate').value") == "30"
    assert "2 prefill + 1 decode, 3 GPUs" in await text(tab, "#split-timeline-pods")
    assert "Unequal: 2 GPUs against 3." in await text(tab, "#summary")
    assert "rate=30" in await tab.run("document.getElementById('link').hash")
    await tab.run("location.hash = 'rate=x&long=900&decodes=-3&nothing=1'")
    await tab.painted()
    await drawn(tab)
    state = "['rate', 'long', 'decodes'].map((name) => document.getElementById(name).value)"
    assert await tab.run(state) == ["15", "100", "1"]


async def test_a_fabric_sets_the_rate_and_a_slow_one_is_late(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    await tab.run("document.getElementById('fabric').focus()")
    await tab.press("T", ord("T"), "T")
    await drawn(tab)
    assert await tab.run("document.getElementById('bandwidth').value") == "1"
    figures = await tab.run(FIGURES)
    assert figures["split"]["ttft99"] > 2 * figures["colocated"]["ttft99"]
    assert "100 % co-located, 100 % split" not in await text(tab, "#summary")


async def _experiment(tab: Tab, name: str) -> dict[str, Any]:
    await click(tab, f"[data-experiment={name}]")
    await tab.painted()
    await drawn(tab)
    pressed = "[...document.querySelectorAll('[data-experiment][aria-pressed=true]')]"
    assert await tab.run(f"{pressed}.map((e) => e.dataset.experiment)") == [name]
    assert await text(tab, f"#see-{name}")
    found: dict[str, Any] = await tab.run(FIGURES)
    return found | {"links": await tab.run(LINKS)}


async def test_the_experiments_show_what_their_sentences_say(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    default, pcie, short, long = [await _experiment(tab, name) for name in EXPERIMENTS]
    assert default["colocated"]["gap99"] > 5 * default["split"]["gap99"]
    assert default["split"]["ttft99"] > default["colocated"]["ttft99"]
    assert pcie["split"]["gap99"] < 1.1 * default["split"]["gap99"]
    assert pcie["links"] > 1.4 * default["links"]
    step = default["split"]["itl50"]
    assert pcie["split"]["ttft50"] == pytest.approx(default["split"]["ttft50"], abs=step)
    assert short["split"]["ttft50"] > short["colocated"]["ttft50"]
    assert long["colocated"]["gap99"] > 5 * long["split"]["gap99"]
    assert long["split"]["ttft50"] > default["split"]["ttft50"]


async def test_goodput_ratio_and_network_are_computed(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    assert "requests/s" in await text(tab, "#goodput-text")
    assert await tab.run("document.querySelectorAll('#goodput-plot path[stroke]').length") == 3
    assert await tab.run("document.querySelectorAll('#goodput-table tbody tr').length") == 14
    cells = "[...document.querySelectorAll('#ratio-table button')]"
    assert await tab.run(f"{cells}.length") == 36
    binds = set(await tab.run(f"{cells}.map((e) => e.querySelector('span').textContent)"))
    assert "prefill" in binds
    assert binds & {"decode", "memory", "network"}
    await click(tab, "[data-pods='2:3']")
    await tab.painted()
    await drawn(tab)
    assert "2 prefill + 3 decode" in await text(tab, "#split-timeline-pods")
    # 32 layers × 8 heads × 128 × 2 × 2 bytes × 8,192 tokens.
    assert "is 1.07 GB" in await text(tab, "#network-text")
    await tab.run("document.getElementById('model').focus()")
    await tab.press("ArrowDown", 40)
    await tab.painted()
    assert "Llama 3.3 70B is 2.68 GB" in await text(tab, "#network-text")
    table = await text(tab, "#network-table")
    assert "too slow" in table
    # Pods of four GPUs have four links.
    assert "200 GB/s" in table


async def test_the_requests_of_the_timelines_are_a_table(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    await click(tab, "#requests summary")
    await tab.painted()
    rows = "document.querySelectorAll('#requests-table tbody tr').length"
    assert f"{await tab.run(rows)} requests arrive" in await text(tab, "#split-timeline-text")


async def test_the_csv_has_what_is_shown(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    folder = tmp_path / "saved"
    folder.mkdir()
    file = await tab.download("document.getElementById('csv').click()", folder)
    assert file.name == "tandem-plan.csv"
    head, *rows = csv.reader(file.read_text("utf-8").splitlines())
    assert head == ["table", "architecture", "item", "figure", "value", "low", "high", "unit"]
    assert {row[0] for row in rows} == {
        "about",
        "settings",
        "figures",
        "request",
        "goodput",
        "ratio",
    }
    assert {len(row) for row in rows} == {8}
    about = {row[3]: row[4] for row in rows if row[0] == "about"}
    assert about["model"] == "Llama 3.1 8B"
    assert (about["gpu"], about["calibration"]) == ("H100 SXM 80 GB", "not calibrated")
    units = {row[3]: row[7] for row in rows}
    assert (units["rate"], units["itl"], units["goodput"]) == ("requests/s", "s", "requests/s")
    figures = await tab.run(FIGURES)
    shown = {row[3]: float(row[4]) for row in rows if row[:2] == ["figures", "split"]}
    assert shown == pytest.approx(figures["split"])


@pytest.mark.parametrize("theme", THEMES)
async def test_fits_every_width_and_is_readable(theme: str, tab: Tab, tmp_path: Path) -> None:
    await tab.prefer(prefers_color_scheme=theme)
    await opened(tab, tmp_path)
    for width in WIDTHS:
        await tab.resize(width)
        await drawn(tab)
        assert await tab.run("document.documentElement.scrollWidth") == width
        canvas = "document.getElementById('split-timeline')"
        assert await tab.run(f"{canvas}.width === {canvas}.parentElement.clientWidth")
    await tab.run("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    result = await tab.run(LOW_CONTRAST)
    assert result["checked"] > 200
    assert result["low"] == []


async def test_the_theme_button_redraws_the_pictures(tab: Tab, tmp_path: Path) -> None:
    await tab.prefer(prefers_color_scheme="light")
    await opened(tab, tmp_path)
    light = await tab.run(PICTURE % "split")
    await click(tab, "#theme")
    await tab.painted()
    dark = await tab.run(PICTURE % "split")
    # Colours are those of the theme at that time.
    assert min(light["panel"], dark["panel"]) > 10_000
    assert await tab.run("Theme.colour('--panel')") == "rgb(24, 33, 43)"


async def test_everything_has_a_name_and_the_keyboard_reaches_it(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    assert await tab.run(NAMES) == []
    expected = await tab.run(
        f"{INPUTS}.filter((e) => e.checkVisibility() && e.tabIndex >= 0).length"
    )
    reached = 0
    for _ in range(expected):
        await tab.press("Tab", 9)
        focused = await tab.run(FOCUSED)
        assert focused["outline"] != "none", focused
        reached = focused["count"]
    assert reached == expected > 80
    assert await tab.run("document.getElementById('summary').getAttribute('aria-live')") == "polite"


async def test_says_when_the_kv_of_a_prompt_does_not_fit(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    await tab.run("Model.data.decode.tokens = 3000")
    await tab.run("location.hash = 'longTokens=6000&long=100'")
    await tab.painted()
    await drawn(tab)
    assert "Split pods cannot serve this: a prompt is larger" in await text(tab, "#summary")
    assert "Not possible" in await text(tab, "#split-timeline-text")


async def test_a_profile_takes_the_badge_away_and_warns_beyond_it(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path, measured())
    assert "Calibrated with a profile" in await text(tab, ".badge")
    assert "Unknown: prompts of 4,000 tokens" in await text(tab, "#summary")
    await type_into(tab, "longTokens", "1000")
    await drawn(tab)
    assert "Unknown" not in await text(tab, "#summary")


def test_an_uncalibrated_page_says_so_and_what_it_cannot_show() -> None:
    found = Document(page(data()))
    (badge,) = found.all("p", class_="badge bad")
    assert badge.words.startswith("Not calibrated")
    (footer,) = found.all("footer")
    assert "does not prove what it says of GPUs" in footer.words


def test_loads_nothing_and_escapes_names() -> None:
    text = page(data(HOSTILE))
    found = Document(text)
    assert found.all("b") == []
    assert len(found.all("script")) == 2
    for element in found.elements:
        assert not {"src", "srcset", "action", "data", "poster"} & element.attributes.keys()
        assert element.attributes.get("href", "#").startswith(("#", "data:,"))
    ids = [element.attributes["id"] for element in found.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    for element in found.elements:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            assert element.attributes.get(name, ids[0]) in ids
