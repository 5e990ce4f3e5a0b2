"""The status of each pool of a set, and the events that its changes are worth. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .actions import SetPlan
from .observed import Observed, PoolKey

StatusBody = dict[str, Any]
"""A pool's whole `status`."""


@dataclass(frozen=True)
class Event:
    """One Kubernetes event about a pool."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def statuses(observed: Observed, plan: SetPlan) -> Mapping[PoolKey, StatusBody]:
    """The status of every pool that is not being deleted; equal to what the object has when nothing
    changed.

    `observed.failures` should be those of the apply of this very plan.
    """
    return {}


def transitions(old: Mapping[str, Any], new: StatusBody) -> tuple[Event, ...]:
    """What is worth an event between two statuses of a pool; nothing when no condition changed."""
    return ()
