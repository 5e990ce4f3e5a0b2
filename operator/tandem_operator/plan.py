"""One pass over a set: what is seen → what to write. Pure."""

from .actions import SetPlan
from .observed import Observed
from .resolve import DEFAULTS, Defaults


def plan_set(observed: Observed, defaults: Defaults = DEFAULTS) -> SetPlan:
    """What brings the set one step nearer to its spec; empty (`writes == 0`) once it is there."""
    return SetPlan(observed.key)
