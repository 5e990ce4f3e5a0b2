"""The simulation of the page agrees with that of Python, and neither changes unnoticed.

`TANDEM_GOLDEN=write pytest tests/cli/plan/page/test_kernel.py -k golden` writes the golden file.
"""

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ....browser import Tab
from .bimodal import served, workload
from .cases import CASES, random_case

GOLDEN = Path(__file__).parent / "golden" / "kernel.json"
TOLERANCE = 1e-9
SERVED = """
(({ deployment, workload }) => {
  const { outcomes, pods } = Kernel.simulate(deployment, Kernel.workload(workload));
  const gaps = pods.flatMap((pod) => pod.gaps).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let left = gaps.reduce((sum, gap) => sum + gap[1], 0) * 99 / 100;
  const gap99 = gaps.find((gap) => (left -= gap[1]) <= 0);
  return {
    requests: outcomes.map(({ work, answer, first, ended }) => {
      const decode = answer ?? work, later = decode.generated > 1 ? decode.output - 1 : 0;
      return [work.started, first, ended, later ? (decode.ended - decode.first) / later : 0];
    }),
    routes: outcomes.map((o) => [o.answer ? o.computing : null, o.decode]),
    busy: pods.map((pod) => pod.busy),
    links: pods.filter((pod) => pod.link).map((pod) => pod.link.busy),
    preemptions: pods.reduce((sum, pod) => sum + pod.preemptions, 0),
    gap99: gap99 ? gap99[0] : 0,
  };
})
"""

Json = dict[str, Any]


def in_python(case: Json) -> Json:
    return served(case["deployment"], workload(case["workload"]))


async def opened(tab: Tab, folder: Path) -> Tab:
    """The tab, with the kernel in it."""
    script = (files("tandem_cli.plan") / "page" / "kernel.js").read_text()
    file = folder / "kernel.html"
    file.write_text(f"<!DOCTYPE html><title>kernel</title><script>{script}</script>", "utf-8")
    await tab.open(file)
    return tab


async def in_browser(tab: Tab, case: Json) -> Json:
    found: Json = await tab.run(f"{SERVED}({json.dumps(case)})")
    return found


def near(expected: Any) -> Any:
    """`expected`, whose numbers may be off by TOLERANCE."""
    if isinstance(expected, dict):
        return {name: near(value) for name, value in expected.items()}
    if isinstance(expected, list):
        return [near(value) for value in expected]
    if isinstance(expected, float):
        return pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    return expected


def golden(name: str) -> Json:
    found: Json = json.loads(GOLDEN.read_text())[name]
    return found


@pytest.mark.parametrize("name", CASES)
def test_python_gives_the_golden_figures(name: str) -> None:
    found = in_python(CASES[name])
    if os.environ.get("TANDEM_GOLDEN") == "write":
        stored = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        lines = [f'"{key}": {json.dumps(each)}' for key, each in (stored | {name: found}).items()]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert found == near(golden(name))


@pytest.mark.component
@pytest.mark.parametrize("name", CASES)
async def test_the_browser_gives_the_golden_figures(name: str, tab: Tab, tmp_path: Path) -> None:
    assert await in_browser(await opened(tab, tmp_path), CASES[name]) == near(golden(name))


def test_the_cases_reach_what_is_rare() -> None:
    preempted = [name for name in CASES if golden(name)["preemptions"]]
    assert preempted == ["little memory", "little memory of decode pods"]


@pytest.mark.component
async def test_the_browser_agrees_with_python_on_many_more(tab: Tab, tmp_path: Path) -> None:
    await opened(tab, tmp_path)
    for seed in range(60):
        case = random_case(seed)
        assert await in_browser(tab, case) == near(in_python(case)), seed
