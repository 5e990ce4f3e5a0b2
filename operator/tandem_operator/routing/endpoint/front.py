"""Which front serves an endpoint's clients: Envoy, which asks an EPP, or the router. Pure.

    the Service selects another front than the wanted one    both run; once every pod of the wanted
                                                             front is available, it is selected
    the Service selects the wanted front                     the other one's Deployments end, each
                                                             once the one before it has no pod left
    no Deployment of the other one is left                   the rest of it is deleted

So a change of front loses no more than a rollout of one: there is a front at every moment, and its
pods drain with all that they use, such as Envoy with EPP, Services and policies. The selector that
the API server holds decides: while it refuses the write that moves it, nothing ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem_contract import labels

from ...observed import Body
from ..objects.common import ENVOY, ROUTER, Names
from .observed import ObjectRef, ObservedEndpoint
from .requirements import EndpointRequirements
from .unused import own_children


@dataclass(frozen=True)
class Fronts:
    """Which front the Service selects, and which run."""

    serving: str
    """Component whose pods the Service selects."""
    running: frozenset[str]
    """`serving`, the wanted one while its pods start, and another one until its pods have ended."""
    waits_for: tuple[str, ...] = ()
    """Names of the wanted front's Deployments that are not available yet."""
    is_moving: bool = False
    """Whether another one ends as soon as the Service selects `serving`."""
    ended: tuple[str, ...] = ()
    """Names of the Deployments of another one that are to be gone, in this order."""


def plan_fronts(observed: ObservedEndpoint, required: EndpointRequirements) -> Fronts:
    """The fronts of an endpoint with at least one readable pool, if `required.has_front`."""
    wanted, selected = required.front, selected_front(observed)
    running = {front for front in (ENVOY, ROUTER) if _is_deployed(observed, required, front)}
    # Without its Service, what runs tells.
    current = selected or next((front for front in (ENVOY, ROUTER) if front in running), wanted)
    # An unreadable pool may be the one that keeps the endpoint from changing its front.
    if observed.unreadable_pools:
        return Fronts(current, frozenset({current}))
    if selected == wanted:
        return _end(observed, required, {ENVOY: ROUTER, ROUTER: ENVOY}[wanted])
    starting = tuple(_not_available(observed, _deployments(observed, required, wanted)))
    # The Service stays for a while after the last pool, but not its front: there is none to keep.
    if current != wanted and current in running and starting:
        return Fronts(current, frozenset({current, wanted}), starting)
    return Fronts(wanted, frozenset({wanted, *running}), is_moving=bool(running - {wanted}))


def _end(observed: ObservedEndpoint, required: EndpointRequirements, front: str) -> Fronts:
    """What is left of `front` runs until its last pod has ended, and the wanted one."""
    deployments = [_ref(name) for name in _deployments(observed, required, front)]
    left = [ref for ref in own_children(observed) if ref in deployments]
    if not left:
        return Fronts(required.front, frozenset({required.front}))
    # Clients are connected to the first one's pods, which need those of the next one.
    first = next(ref for ref in deployments if ref in left)
    ended = tuple(ref.name for ref in deployments if ref == first or ref not in left)
    return Fronts(required.front, frozenset({required.front, front}), ended=ended)


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
    # A deletion ends its pods, whatever the status still says.
    ready = 0 if is_ending(deployment) else status.get("availableReplicas", 0)
    return ready, deployment["spec"]["replicas"]


def is_ending(deployment: Body) -> bool:
    """Whether a Deployment stays only until its pods have ended (`EndpointPlan.end`)."""
    return "deletionTimestamp" in deployment["metadata"]


def _deployment(observed: ObservedEndpoint, name: str) -> Body | None:
    return observed.children.get(_ref(name))


def _ref(name: str) -> ObjectRef:
    return ObjectRef("apps/v1", "Deployment", name)


def _is_deployed(observed: ObservedEndpoint, required: EndpointRequirements, front: str) -> bool:
    """Whether the Deployment of the pods that clients connect to exists."""
    return _deployment(observed, _deployments(observed, required, front)[0]) is not None


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
