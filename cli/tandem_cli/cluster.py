"""The pools of a cluster and what serves them, as `tandem status` shows them.

    read(api, namespace) ──lists of pools, pods, Deployments──► view(…) (pure) ──► SetView …

Nothing is written, and nothing else is read. Errors, each one line for the person who asked:

ApiError             the API server cannot be asked, or answered otherwise
ClusterError
  NotInstalled       the CRDs are missing: install them
  NotPermitted       a list is forbidden: which one, and where
  NothingFound       there is no pool, or none of this name
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PLURALS
from tandem_kube.errors import Forbidden, NotFound
from tandem_kube.resources import DEPLOYMENTS, PODS, Object, Resource
from tandem_operator.conditions import ConditionType, Reason
from tandem_operator.observed import PodState, PoolResource, SetKey
from tandem_operator.planning.api_objects import pod_state, pool_resource, set_key

if TYPE_CHECKING:
    from tandem_kube.client import Api

_POOLS: Final = tuple(Resource(labels.API_VERSION, plural) for plural in PLURALS.values())
_PARTS: Final = (
    ConditionType.PODS_READY,
    ConditionType.COMPATIBLE,
    ConditionType.PEER_READY,
    ConditionType.ROUTER_READY,
)
_EXPECTED: Final[Mapping[str, str]] = {
    **dict.fromkeys((ConditionType.READY, *_PARTS), "True"),
    ConditionType.PROGRESSING: "False",
    ConditionType.STALLED: "False",
    ConditionType.UPDATE_AVAILABLE: "False",
}
"""What a condition says of a pool that nobody needs to look at; others are not judged."""


class ClusterError(Exception):
    """There is nothing to show."""


class NotInstalled(ClusterError):
    """The cluster does not know the kind."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(
            f"this cluster has no {resource.plural}.{resource.group}: install Tandem's Helm chart"
        )


class NotPermitted(ClusterError):
    """RBAC forbids the list."""

    def __init__(self, resource: Resource, namespace: str | None, said: Forbidden) -> None:
        where = f"in namespace {namespace}" if namespace else "in all namespaces"
        super().__init__(f"not permitted to list {resource.plural} {where}: {said}")


class NothingFound(ClusterError):
    """No pool, or none of the name."""

    def __init__(self, name: str | None, namespace: str | None) -> None:
        what = f"no set or pool {name}" if name else "no PrefillPool and no DecodePool"
        where = f"in namespace {namespace}" if namespace else "in any namespace"
        super().__init__(f"{what} {where}")


@dataclass(frozen=True)
class Condition:
    """One that is not as it should be."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True)
class PodView:
    """A pod."""

    name: str
    state: str
    """Ready, Draining, Terminating, or its phase."""
    node: str | None
    revision: str
    trouble: str | None
    """The cluster's own words on why it does not run."""


@dataclass(frozen=True)
class PoolView:
    """A pool as its status tells it."""

    kind: str
    name: str
    ready: bool
    """Condition Ready, for the generation there is."""
    model: str | None
    desired: int
    ready_pods: int
    updated: int
    paired: int
    draining: int
    revision: str | None
    update_revision: str | None
    """Another than `revision` while it is being rolled out."""
    endpoint: str | None
    """URL that clients use; None for prefill, and before there is one."""
    conditions: tuple[Condition, ...]
    pods: tuple[PodView, ...]


@dataclass(frozen=True)
class RouterView:
    """A Deployment of an endpoint's router: its EPP or its Envoy."""

    endpoint: str
    component: str
    desired: int
    available: int


@dataclass(frozen=True)
class SetView:
    """A PrefillPool with every DecodePool that names it, or a DecodePool alone."""

    namespace: str
    name: str
    pools: tuple[PoolView, ...]
    routers: tuple[RouterView, ...]

    @property
    def ready(self) -> bool:
        """Whether every pool is."""
        return all(pool.ready for pool in self.pools)


async def read(api: "Api", namespace: str | None) -> tuple[SetView, ...]:
    """The sets of a namespace, None: of all. Raises ClusterError, ApiError."""
    # One after the other: what is missing or forbidden is told of the pools first.
    pools = [body for kind in _POOLS for body in await _listed(api, kind, namespace)]
    pods = await _listed(api, PODS, namespace, labels.POOL)
    deployments = await _listed(api, DEPLOYMENTS, namespace, labels.ENDPOINT)
    return view(pools, pods, deployments)


def named(sets: Iterable[SetView], name: str | None) -> tuple[SetView, ...]:
    """Those that are called `name`, or that have a pool of this name; all for None."""
    return tuple(
        each for each in sets if name in (None, each.name, *(pool.name for pool in each.pools))
    )


def to_json(found: SetView) -> dict[str, object]:
    """What `-o json` prints of a set: its fields, and whether it is ready."""
    return {"ready": found.ready, **asdict(found)}


def view(
    pools: Sequence[Object], pods: Iterable[Object], deployments: Iterable[Object]
) -> tuple[SetView, ...]:
    """The sets that these objects make, by namespace and name."""
    by_pool: dict[tuple[str, str], list[PodState]] = {}
    for body in pods:
        pod = pod_state(body)
        by_pool.setdefault((body["metadata"]["namespace"], pod.pool), []).append(pod)
    members: dict[SetKey, list[PoolResource]] = {}
    for body in pools:
        members.setdefault(set_key(body), []).append(pool_resource(body))
    routers = [(body["metadata"]["namespace"], _router(body)) for body in deployments]
    return tuple(
        SetView(
            key.namespace,
            key.name,
            tuple(_pool(p, by_pool.get((key.namespace, p.key.name), [])) for p in _in_order(found)),
            tuple(
                router
                for namespace, router in routers
                if namespace == key.namespace and router.endpoint in _endpoints(found)
            ),
        )
        for key, found in sorted(members.items())
    )


async def _listed(
    api: "Api", resource: Resource, namespace: str | None, selector: str = ""
) -> Sequence[Object]:
    try:
        return (await api.list(resource, namespace, labels=selector)).items
    except NotFound as err:
        raise NotInstalled(resource) from err
    except Forbidden as err:
        raise NotPermitted(resource, namespace, err) from err


def _in_order(pools: list[PoolResource]) -> list[PoolResource]:
    """Prefill before decode."""
    return sorted(pools, key=lambda pool: (pool.key.kind == DECODE_POOL, pool.key.name))


def _endpoints(pools: Iterable[PoolResource]) -> set[str]:
    return {
        pool.body["spec"].get("routing", {}).get("endpoint") or pool.key.name
        for pool in pools
        if pool.key.kind == DECODE_POOL
    }


def _pool(pool: PoolResource, pods: list[PodState]) -> PoolView:
    status, role = pool.status, "decode" if pool.key.kind == DECODE_POOL else "prefill"
    spec = pool.body.get("spec") or {}
    conditions = _conditions(pool)
    ours = [pod for pod in pods if (pod.role == "prefill") == (role == "prefill")]
    return PoolView(
        kind=pool.key.kind,
        name=pool.key.name,
        ready=not any(c.type == ConditionType.READY for c in conditions),
        model=status.get("model") or spec.get("model", {}).get("name"),
        desired=status.get("desiredReplicas", spec.get("replicas", 1)),
        ready_pods=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        paired=status.get("pairedReplicas", 0),
        draining=status.get("drainingReplicas", 0),
        revision=status.get("currentRevision"),
        update_revision=status.get("updateRevision"),
        endpoint=status.get("endpoint"),
        conditions=tuple(c for c in conditions if not _said_again(c, conditions)),
        pods=tuple(_pod(pod) for pod in sorted(ours, key=lambda pod: pod.name)),
    )


def _conditions(pool: PoolResource) -> list[Condition]:
    """Those that are not as they should be; an old or absent Ready is one of them."""
    seen = pool.status.get("observedGeneration", 0)
    if seen < pool.generation:
        what = "this change" if seen else "this pool"
        message = f"the operator has not looked at {what} yet: is it running?"
        return [Condition(ConditionType.READY, "Unknown", "NotObserved", message)]
    stated: list[Mapping[str, Any]] = pool.status.get("conditions") or []
    return [
        Condition(one["type"], one["status"], one.get("reason", ""), one.get("message", ""))
        for one in stated
        if one["status"] != _EXPECTED.get(one["type"], one["status"])
        or one.get("reason") == Reason.DRAIN_STUCK
    ]


def _said_again(condition: Condition, others: Iterable[Condition]) -> bool:
    """Whether this is Ready, and a part of it says why."""
    return condition.type == ConditionType.READY and any(
        other.type in _PARTS and other.reason == condition.reason for other in others
    )


def _pod(pod: PodState) -> PodView:
    leaving: Literal["Terminating", "Draining"] = "Terminating" if pod.deleting else "Draining"
    state = leaving if pod.leaving else "Ready" if pod.ready else pod.phase
    return PodView(pod.name, state, pod.node, pod.revision, pod.trouble)


def _router(body: Object) -> RouterView:
    found = body["metadata"]["labels"]
    return RouterView(
        found[labels.ENDPOINT],
        found.get(labels.COMPONENT, body["metadata"]["name"]),
        body["spec"].get("replicas", 1),
        (body.get("status") or {}).get("availableReplicas", 0),
    )
