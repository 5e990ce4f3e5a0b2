"""How fast simulated pods are: a model of about 8 billion parameters on one GPU."""

from typing import Final

from tandem_planner.simulation.engine import BATCHING, Engine
from tandem_planner.step_cost import LinearStep

SPEED: Final = LinearStep(
    fixed=0.008,
    per_decode=0.0001,
    per_context=2e-8,
    # 10,000 prompt tokens per second at a prompt's start, half of that at position 200,000.
    per_token=1e-4,
    per_pair=2.5e-10,
)
"""A router learns of it only through what it observes."""
BUDGET: Final = BATCHING.budget
"""Tokens per step."""


def speed_of(pod: Engine) -> LinearStep:
    """The pod's speed, which here always has this form."""
    assert isinstance(pod.speed, LinearStep)
    return pod.speed
