"""Pages to test, and how to wait for them."""

from pathlib import Path

from tandem_cli.plan.inputs import read_model
from tandem_cli.plan.page import PageData, page, page_data
from tandem_planner.fabrics import Fabric
from tandem_planner.simulation.measures import Slo
from tandem_planner.sizing.deployments import Estimate
from tandem_planner.sizing.gpus import GPUS
from tandem_planner.step_cost import LinearStep

from ....browser import Tab

HOSTILE = "</script><b>bold</b> & \"quoted\" 'too'"


def estimate(fabric: Fabric = Fabric.NVLINK) -> Estimate:
    return Estimate(read_model("llama-3.1-8b")[0], GPUS["h100"], fabric)


def data(title: str = "Llama 3.1 8B") -> PageData:
    """Of a model that was not measured."""
    others = {"Llama 3.3 70B": read_model("llama-3.3-70b")[0]}
    return page_data(estimate(), [], model=title, others=others, slo=Slo(2.0, 0.05), attainment=0.9)


def measured() -> PageData:
    """Of one that was."""
    known = estimate()
    step = LinearStep(0.01, 1e-5, 1e-8, 3e-5, 1e-9)
    profiled = Estimate(known.model, known.gpu, known.fabric, measured=step, measured_error=0.2)
    return page_data(
        profiled, [], model="measured", others={}, longest=2000, slo=Slo(2.0, 0.05), attainment=0.9
    )


def write(folder: Path, content: PageData, name: str = "page") -> Path:
    file = folder / f"{name}.html"
    file.write_text(page(content), encoding="utf-8")
    return file


async def drawn(tab: Tab) -> None:
    """Wait until the page has drawn the last change, slow charts included."""
    await tab.run(
        """new Promise((done) => {
          const isDrawn = () => document.body.dataset.charts === "drawn";
          const look = () => isDrawn() && (observer.disconnect(), done(0));
          const observer = new MutationObserver(look);
          observer.observe(document.body, { attributes: true, attributeFilter: ["data-charts"] });
          look();
        })"""
    )


async def opened(tab: Tab, folder: Path, content: PageData | None = None) -> None:
    await tab.resize(1400, 900)
    await tab.open(write(folder, content or data()))
    await drawn(tab)


async def text(tab: Tab, selector: str) -> str:
    found: str = await tab.run(f"document.querySelector({selector!r}).textContent")
    return found


async def type_into(tab: Tab, name: str, value: str) -> None:
    """Replace what a number box has, key by key."""
    await tab.run(f"document.getElementById({name!r}).select()")
    await tab.run(f"document.getElementById({name!r}).focus()")
    for character in value:
        await tab.press(character, ord(character), character)
    await tab.press("Tab", 9)


async def click(tab: Tab, selector: str) -> None:
    """Press the left button of a mouse in the middle of an element."""
    x, y = await tab.run(
        f"""(() => {{
          const element = document.querySelector({selector!r});
          element.scrollIntoView({{ block: "center" }});
          const box = element.getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
    )
    for kind in ("mousePressed", "mouseReleased"):
        await tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
