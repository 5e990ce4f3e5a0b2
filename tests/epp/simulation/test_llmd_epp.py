"""llm-d's own EPP chooses over simulated pods as the policy rebuilt from its source does."""

from pathlib import Path

import pytest

from tandem_planner.simulation.loop import simulate

from ...llmd.programs import program
from .llmd_epp import LlmdEpp
from .llmd_policy import LlmdSettings
from .pods import engines
from .workload import conversations

pytestmark = [pytest.mark.component, pytest.mark.interpreted]


def test_the_rebuilt_policy_makes_the_epps_choices(tmp_path: Path) -> None:
    pods = engines(4, seed=3)
    settings = LlmdSettings(penalty=1.0)
    router = LlmdEpp(pods, 3, program=program("epp"), directory=tmp_path, settings=settings)
    try:
        result = simulate(conversations(200, rate=8.0, seed=7), pods, router)
    finally:
        router.close()
    assert len(result.served) == router.requests >= 200
    # Of short prompts the EPP sees cached parts that the policy does not: its blocks have 64 tokens
    # and the policy's 512. By chance a quarter would agree.
    assert router.agreement > 0.6
