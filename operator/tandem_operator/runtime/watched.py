"""What the operator watches, and with which selector: the API server sends nothing else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PLURALS, PREFILL_POOL
from tandem_kube.client import Api
from tandem_kube.errors import Forbidden, NotFound
from tandem_kube.resources import (
    CONTROLLER_REVISIONS,
    KINDS,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    Resource,
)

from ..observed import Body, Kind
from ..routing.router_observed import CHILD_KINDS, OPTIONAL_KINDS, ApiKind
from .known import Known, WorkKey

POOLS: Final[Mapping[Kind, Resource]] = {
    PREFILL_POOL: Resource(labels.API_VERSION, PLURALS[PREFILL_POOL]),
    DECODE_POOL: Resource(labels.API_VERSION, PLURALS[DECODE_POOL]),
}


@dataclass(frozen=True)
class Watched:
    """Objects of a kind that have a label."""

    resource: Resource
    selector: str
    """Empty: all of the kind."""
    see: Callable[[Known, Body], set[WorkKey]]
    namespaced: bool = True


def watched(known: Known) -> tuple[Watched, ...]:
    """Everything to watch; each resource once, as kopf has one watch for each."""
    pools = (Watched(resource, "", Known.see_pool) for resource in POOLS.values())
    children = (
        Watched(Resource(version, KINDS[kind].plural), labels.ENDPOINT, Known.see_child)
        for version, kind in (*CHILD_KINDS, *sorted(known.kinds))
        if kind != "PodDisruptionBudget"
    )
    return (
        *pools,
        Watched(PODS, labels.POOL, Known.see_pod),
        Watched(CONTROLLER_REVISIONS, labels.POOL, Known.see_revision),
        Watched(POD_DISRUPTION_BUDGETS, labels.MANAGED_BY, _see_budget),
        *children,
        *((Watched(NODES, "", Known.see_node, False),) if known.nodes is not None else ()),
    )


def _see_budget(known: Known, body: Body) -> set[WorkKey]:
    """A pool's, an endpoint's, or nobody's that we know."""
    found = body["metadata"].get("labels") or {}
    if labels.ENDPOINT in found:
        return known.see_child(body)
    return known.see_budget(body) if labels.POOL in found else set()


async def may_list_nodes(api: Api) -> bool:
    """Whether RBAC lets us see nodes; an operator bound to namespaces usually may not."""
    try:
        await api.raw(f"{NODES.path()}?limit=1")
    except Forbidden:
        return False
    return True


async def optional_kinds(api: Api) -> frozenset[ApiKind]:
    """Which of the kinds that a cluster may lack are there. Asked once, at startup."""
    found = set()
    for version, kind in OPTIONAL_KINDS:
        try:
            listed = await api.raw(f"/apis/{version}")
        except NotFound:
            continue
        if any(resource.get("kind") == kind for resource in listed.get("resources") or ()):
            found.add((version, kind))
    return frozenset(found)
