"""What the page says: capacities as Python finds them, and nothing where nothing is known."""

import json
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem_cli.plan.page import PageData
from tandem_planner.simulation.measures import Result, Slo, percentile

from ....browser import Tab
from .bimodal import Json, simulated, workload
from .pages import click, data, drawn, measured, opened, text, type_into

STATE = "Model.parsed(location.hash)"
CAPACITY = """
((changes, architecture) => {
  const state = { ...Model.started(), ...changes };
  const steps = Model.capacity(state, architecture);
  for (;;) {
    const { done, value } = steps.next();
    if (done) return { ...value, deployment: Model.deployment(state, architecture), state };
  }
})(%s, %s)
"""
EMPTY = """
["goodput-plot", "goodput-legend", "goodput-table", "ratio-table"]
  .filter((id) => document.getElementById(id).childElementCount)
"""

pytestmark = pytest.mark.component


async def changed(tab: Tab, settings: str) -> None:
    """Follow a link to a state, and wait for the pictures."""
    await tab.run(f"location.hash = {settings!r}")
    await tab.painted()
    await drawn(tab)


async def capacity_of(tab: Tab, changes: Json, architecture: str) -> Json:
    found: Json = await tab.run(CAPACITY % (json.dumps(changes), json.dumps(architecture)))
    return found


def in_python(deployment: Json, state: Json) -> Result:
    """What `Model.outcome` simulates."""
    count = min(3000, max(400, ceil(30 * state["rate"])))
    settings = state | {"long": state["long"] / 100, "count": count}
    return simulated(deployment, workload(settings))


def is_met(found: Json, rate: float) -> bool:
    """Whether Python's simulation meets the objective at a rate, and keeps up."""
    state = found["state"] | {"rate": rate}
    result = in_python(found["deployment"], state)
    slo = Slo(state["ttft"], state["itl"] / 1000)
    served = result.served[len(result.served) // 5 :]
    met = sum(slo.is_met(s.ttft, s.itl) for s in served)
    return result.growth() <= 0.05 and met / len(served) >= state["attainment"] / 100


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({"prefills": 4, "itl": 15, "outputTokens": 2000, "chunk": 0}, "split"),
        ({"chunk": 0}, "split"),
        ({"chunk": 0, "ttft": 0.5}, "colocated"),
    ],
)
async def test_a_capacity_is_exact_as_python_finds_it(
    changes: Json, architecture: str, tab: Tab, tmp_path: Path
) -> None:
    await opened(tab, tmp_path, measured())
    found = await capacity_of(tab, changes, architecture)
    assert 0 < found["rate"] < found["above"] <= 1.05 * found["rate"]
    assert is_met(found, found["rate"])
    assert not is_met(found, found["above"])


@pytest.mark.parametrize("rate", [20, 200])
async def test_growth_and_percentiles_are_those_of_python(
    rate: float, tab: Tab, tmp_path: Path
) -> None:
    await opened(tab, tmp_path, measured())
    await tab.run(f"location.hash = 'rate={rate}'")
    figures = await tab.run(f"Model.outcome({STATE}, 'split').figures")
    state = await tab.run(STATE)
    result = in_python(await tab.run(f"Model.deployment({STATE}, 'split')"), state)
    served = result.served[len(result.served) // 5 :]
    expected = {
        "growth": result.growth(),
        "ttft99": percentile((s.ttft for s in served), 99),
        "itl50": percentile((s.itl for s in served if s.itl), 50),
        "gap99": result.gap_percentile(99),
    }
    assert {name: figures[name]["value"] for name in expected} == pytest.approx(expected, rel=1e-9)


async def test_a_small_capacity_is_as_exact(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    changes = {"outputTokens": 4000, "itl": 15, "prefills": 4, "decodes": 1}
    found = await capacity_of(tab, changes, "split")
    assert 0 < found["rate"] < found["above"] <= 1.05 * found["rate"]


async def test_no_rate_meets_what_an_idle_pod_does_not(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    assert (await capacity_of(tab, {"itl": 1}, "split"))["rate"] == 0


async def test_unknown_beyond_a_profile_in_all_its_texts(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path, measured())
    for name in ("summary", "goodput-text", "ratio-best", "network-text"):
        assert (await text(tab, f"#{name}")).startswith("Unknown: prompts of "), name
    assert "measure with tandem profile --longest 4000" in await text(tab, "#summary")
    assert await tab.run(EMPTY) == []
    await changed(tab, "longTokens=1000&prompt=2500")
    for name in ("summary", "goodput-text", "ratio-best", "network-text"):
        assert "Unknown" not in await text(tab, f"#{name}"), name


async def test_overload_is_no_goodput(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    await changed(tab, "rate=200&ttft=0&itl=0")
    assert "Split pods do not keep up." in await text(tab, "#summary")
    assert "do not keep up" in await text(tab, "#split-timeline-text")
    rows = "[...document.querySelectorAll('#figures-table tbody tr')]"
    goodput = f"{rows}.find((row) => row.textContent.startsWith('Goodput, '))"
    assert "does not keep up" in await tab.run(f"{goodput}.lastChild.textContent")
    assert "does not keep up" in await text(tab, "#goodput-table")


async def test_enter_on_a_cell_keeps_the_focus_there(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    await tab.run("document.querySelector('[data-pods=\"2:3\"]').focus()")
    await tab.press("Enter", 13, "\r")
    await tab.painted()
    await drawn(tab)
    assert "2 prefill + 3 decode" in await text(tab, "#split-timeline-pods")
    assert await tab.run("document.activeElement.dataset.pods") == "2:3"
    assert await tab.run("document.activeElement.getAttribute('aria-pressed')") == "true"


async def test_starts_with_the_chunks_of_the_plan(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    assert await tab.run("document.getElementById('chunk').value") == "2048"
    assert "chunks of 2,048" in await text(tab, "#colocated-timeline-pods")
    assert "whole prompts" in await text(tab, "#see-default")


def started(**changes: Any) -> PageData:
    content = data()
    return msgspec.structs.replace(content, start=msgspec.structs.replace(content.start, **changes))


async def test_the_objective_is_the_one_given(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path, started(ttft=None, itl=2000.0, e2e=0.9, rate=4.0, attainment=0.5))
    values = "['ttft', 'itl', 'e2e', 'attainment'].map((id) => document.getElementById(id).value)"
    assert await tab.run(values) == ["0", "2000", "0.9", "0.5"]
    slider = "document.querySelector('[data-name=ttft] [type=range]')"
    assert await tab.run(f"{slider}.getAttribute('aria-valuetext')") == "no limit"
    share = f"Model.outcome({STATE}, 'split').figures.attainment.value"
    tight = await tab.run(share)
    await type_into(tab, "e2e", "0")
    await drawn(tab)
    assert tight < await tab.run(share) == 1


async def test_a_limit_of_the_whole_time_binds_decode_pods(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    found = await capacity_of(tab, {"ttft": 0, "itl": 0, "e2e": 1, "prefills": 8}, "split")
    assert found["binds"] == "decode"


async def test_what_cannot_be_served_leaves_no_old_pictures(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    assert await tab.run(EMPTY) != []
    await tab.run("Model.data.decode.tokens = 3000")
    await changed(tab, "longTokens=6000&long=100")
    assert await tab.run("document.getElementById('split-timeline').height") == 0
    assert await tab.run(EMPTY) == []
    for name in ("goodput-text", "ratio-best"):
        assert (await text(tab, f"#{name}")).startswith("Not possible: "), name


async def test_a_link_with_names_of_objects_is_no_state(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    found = await tab.run("Object.keys(Model.parsed('toString=1&constructor=2&rate=3'))")
    assert "rate" in found
    assert not {"toString", "constructor"} & set(found)


async def test_what_others_bind_is_a_lower_bound(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    # Prompts alone: 16 prefill pods cannot fill one decode pod.
    await click(tab, "#reset")
    await changed(tab, "outputTokens=1&long=100&itl=0")
    assert "one decode pod at least " in await text(tab, "#ratio-best")
    roles = "[...document.querySelectorAll('#goodput-text, #ratio-best')]"
    assert await tab.run(f"{roles}.filter((e) => e.role || e.ariaLive).length") == 0


async def test_slow_charts_yield_between_simulations_and_draw_bounds_last(
    tab: Tab, tmp_path: Path
) -> None:
    await opened(tab, tmp_path)
    most, said = await tab.run(
        """(() => {
          const { simulate } = Kernel, state = Model.started();
          let count = 0, most = 0;
          Kernel.simulate = (...all) => (count += 1, simulate(...all));
          const run = (steps) => {
            for (;;) {
              count = 0;
              const { done, value } = steps.next();
              most = Math.max(most, count);
              if (done) return value;
            }
          };
          const text = () => document.getElementById("goodput-text").textContent;
          const series = run(Charts.goodput(state)), early = text();
          run(Charts.ratio(state, () => {}));
          run(Charts.bounds(series, state));
          Kernel.simulate = simulate;
          return [most, [early, text()]];
        })()"""
    )
    assert most == 1
    early, late = said
    assert early.count("(bounds follow)") == 3
    assert "bounds follow" not in late
    assert late.count(" – ") == 3
