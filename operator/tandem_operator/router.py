"""A routing endpoint: the objects that bring a request to a pod. Pure.

plan_endpoint(observed, settings) -> what to write      covers(live, desired) -> already so?
router_state(observed)            -> RouterReady        conflicts(pools)      -> who disagrees
"""

from collections.abc import Sequence

from .covers import covers
from .observed import Body, RouterState
from .router_observed import (
    ApiKind,
    EndpointPlan,
    EndpointPool,
    ObservedEndpoint,
    Ref,
    RouterSettings,
    UnreadPool,
)

__all__ = [
    "ApiKind",
    "Body",
    "EndpointPlan",
    "EndpointPool",
    "ObservedEndpoint",
    "Ref",
    "RouterSettings",
    "UnreadPool",
    "conflicts",
    "covers",
    "plan_endpoint",
    "router_state",
]


def plan_endpoint(observed: ObservedEndpoint, settings: RouterSettings) -> EndpointPlan:
    """What to write so that the endpoint is as its pools ask; empty once it is."""
    return EndpointPlan()


def router_state(observed: ObservedEndpoint) -> RouterState:
    """Whether requests reach the pods as the pools ask, and at which URL."""
    return RouterState(False, "Pending", "the router is not there yet", None)


def conflicts(pools: Sequence[EndpointPool]) -> tuple[str, ...]:
    """One line for each setting that pools of one endpoint want differently: who wants what, and
    what is done."""
    return ()
