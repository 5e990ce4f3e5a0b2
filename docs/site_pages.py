"""Write the pages of the site that are no Markdown, before mkdocs reads docs/: `make docs`.

run/plan-page.html   the page of tandem plan, for a model on a GPU that were not measured
"""

from pathlib import Path
from typing import Final

from tandem_cli.plan.inputs import known_models, read_model
from tandem_cli.plan.page import page, page_data
from tandem_planner.fabrics import Fabric
from tandem_planner.simulation.measures import Slo
from tandem_planner.sizing.deployments import Estimate
from tandem_planner.sizing.gpus import GPUS

DOCS: Final = Path(__file__).parent
_MODEL: Final = "llama-3.1-8b"


def plan_page() -> str:
    """The page; from it, tandem plan's own differ in the model, the pods and the rate."""
    estimate = Estimate(read_model(_MODEL)[0], GPUS["h100"], Fabric.NVLINK)
    others = {name: read_model(name)[0] for name in known_models() if name != _MODEL}
    slo = Slo(ttft=2.0, itl=0.05)
    return page(page_data(estimate, [], model=_MODEL, others=others, slo=slo, attainment=0.9))


if __name__ == "__main__":
    (DOCS / "run" / "plan-page.html").write_text(plan_page(), encoding="utf-8")
