"""What the page starts with: the deployments that were found, and the objective as it was given."""

import pytest

from tandem_cli.plan.inputs import read_model
from tandem_cli.plan.page import page_data
from tandem_cli.plan.page.data import COLOCATED
from tandem_planner.fabrics import Fabric
from tandem_planner.simulation.engine import Batching
from tandem_planner.simulation.measures import Slo
from tandem_planner.sizing.deployments import CannotServe, Deployment, Estimate, Pool
from tandem_planner.sizing.gpus import GPUS
from tandem_planner.sizing.search import DECODE, PREFILL

from .pages import estimate

SPLIT = Deployment(Pool(3, 8, DECODE), Pool(2, 8, PREFILL))
TOGETHER = Deployment(Pool(4, 8, Batching(512, 256)))
SCARCE = Estimate(read_model("deepseek-v3")[0], GPUS["h200"], Fabric.RDMA, utilization=0.62)
"""With memory for short requests only."""


def test_needs_no_room_beyond_that_of_the_deployments_found() -> None:
    content = page_data(
        SCARCE, [TOGETHER, SPLIT], model="m", others={}, slo=Slo(2.0, 0.05), attainment=0.9
    )
    assert (content.start.prefills, content.start.decodes, content.start.colocated) == (2, 3, 4)
    assert content.colocated.budget == 512


def test_says_what_does_not_fit_where_an_architecture_was_not_found() -> None:
    with pytest.raises(CannotServe, match="does not fit"):
        page_data(SCARCE, [TOGETHER], model="m", others={}, slo=Slo(2.0), attainment=0.9)


def test_adds_no_limit_and_drops_none() -> None:
    content = page_data(estimate(), [], model="m", others={}, slo=Slo(e2e=30), attainment=0.9)
    assert (content.start.ttft, content.start.itl, content.start.e2e) == (None, None, 30)
    assert content.colocated.budget == COLOCATED.budget
