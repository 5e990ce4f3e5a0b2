"""Which front serves an endpoint's clients: Envoy, which asks an EPP, or the router. Pure.

    wanted front = the one that the Service selects      it alone runs
    another one                                          both run, and the Service keeps its front
    every pod of the wanted front is available           the Service selects it, the other one ends

So a change of front loses no more than a rollout of one: there is a front at every moment, and pods
that end have drained as in any rollout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem_contract import labels

from ...observed import Body
from ..objects.common import ENVOY, ROUTER, Names
from .observed import ObjectRef, ObservedEndpoint
from .requirements import EndpointRequirements


@dataclass(frozen=True)
class Fronts:
    """Which front the Service selects, and which run."""

    serving: str
    """Component whose pods the Service selects."""
    running: frozenset[str]
    """`serving`, and the wanted one while its pods start."""
    waits_for: tuple[str, ...] = ()
    """Names of the wanted front's Deployments that are not available yet."""


def fronts(observed: ObservedEndpoint, required: EndpointRequirements) -> Fronts:
    """The fronts of an endpoint with at least one readable pool, if `required.envoy`."""
    wanted, current = required.front, selected_front(observed)
    if current is None:
        return Fronts(wanted, frozenset({wanted}))
    # An unreadable pool may be the one that keeps the endpoint from changing its front.
    if current == wanted or observed.unreadable_pools:
        return Fronts(current, frozenset({current}))
    starting = tuple(_not_available(observed, _deployments(observed, required, wanted)))
    # The Service stays for a while after the last pool, but not its front: there is none to keep.
    if starting and _deployment(observed, _deployments(observed, required, current)[0]) is not None:
        return Fronts(current, frozenset({current, wanted}), starting)
    return Fronts(wanted, frozenset({wanted}))


def selected_front(observed: ObservedEndpoint) -> str | None:
    """The component that the endpoint's Service selects; None: there is no Service, or it is
    someone else's."""
    name = Names(observed.key.name).endpoint
    body = observed.children.get(ObjectRef("v1", "Service", name))
    selector: Any = (body or {}).get("spec", {}).get("selector") or {}
    component = selector.get(labels.COMPONENT)
    return component if component in (ENVOY, ROUTER) else None


def available(deployment: Body | None) -> tuple[int, int]:
    """Pods of a Deployment that are available, and that there are to be."""
    if deployment is None:
        return 0, 1
    status: Any = deployment.get("status") or {}
    return status.get("availableReplicas", 0), deployment["spec"]["replicas"]


def _deployment(observed: ObservedEndpoint, name: str) -> Body | None:
    return observed.children.get(ObjectRef("apps/v1", "Deployment", name))


def _deployments(
    observed: ObservedEndpoint, required: EndpointRequirements, front: str
) -> list[str]:
    names = Names(observed.key.name)
    if front == ROUTER:
        return [names.router]
    return [names.envoy, *([names.epp] if required.epp else [])]


def _not_available(observed: ObservedEndpoint, deployments: list[str]) -> Iterator[str]:
    for name in deployments:
        ready, replicas = available(_deployment(observed, name))
        if ready < replicas:
            yield name
