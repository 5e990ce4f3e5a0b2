"""The pools of a cluster with their pods and routers, as `tandem status` shows them.

    read_sets ──lists of pools, pods, Deployments──► build_sets (pure) ──► SetView, …

It reads these lists only and writes nothing. Errors; each message is one line for the user:

ApiError             the API server cannot be reached, or it answered with another error
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
_PARTS_OF_READY: Final = (
    ConditionType.PODS_READY,
    ConditionType.COMPATIBLE,
    ConditionType.PEER_READY,
    ConditionType.ROUTER_READY,
)
_EXPECTED: Final[Mapping[str, str]] = {
    **dict.fromkeys((ConditionType.READY, *_PARTS_OF_READY), "True"),
    ConditionType.PROGRESSING: "False",
    ConditionType.STALLED: "False",
    ConditionType.UPDATE_AVAILABLE: "False",
}
"""Condition → its status in a healthy pool. Conditions that are not listed are never shown."""


class ClusterError(Exception):
    """The cluster has nothing to show."""


class NotInstalled(ClusterError):
    """The cluster does not have the CRD."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(
            f"this cluster has no {resource.plural}.{resource.group}: install Tandem's Helm chart"
        )


class NotPermitted(ClusterError):
    """RBAC forbids the list."""

    def __init__(self, resource: Resource, namespace: str | None, err: Forbidden) -> None:
        where = f"in namespace {namespace}" if namespace else "in all namespaces"
        super().__init__(f"not permitted to list {resource.plural} {where}: {err}")


class NothingFound(ClusterError):
    """There is no pool, or none of the given name."""

    def __init__(self, name: str | None, namespace: str | None) -> None:
        missing = f"no set or pool {name}" if name else "no PrefillPool and no DecodePool"
        where = f"in namespace {namespace}" if namespace else "in any namespace"
        super().__init__(f"{missing} {where}")


@dataclass(frozen=True)
class Condition:
    """A condition of a pool that needs attention."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True)
class PodView:
    """A pod of a pool."""

    name: str
    state: str
    """Ready, Draining, Terminating, or its phase."""
    node: str | None
    revision: str
    trouble: str | None
    """Why it does not run, as the cluster reports it; None if it runs."""


@dataclass(frozen=True)
class PoolView:
    """A pool, as its status describes it."""

    kind: str
    name: str
    ready: bool
    """Condition Ready, for the current generation."""
    model: str | None
    desired: int
    ready_pods: int
    updated: int
    paired: int
    draining: int
    revision: str | None
    update_revision: str | None
    """Differs from `revision` during a rollout."""
    endpoint: str | None
    """URL that clients use; None for a PrefillPool, and before the endpoint exists."""
    conditions: tuple[Condition, ...]
    pods: tuple[PodView, ...]


@dataclass(frozen=True)
class RouterView:
    """A Deployment of an endpoint's router: EPP or Envoy."""

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
        """Whether every pool is ready."""
        return all(pool.ready for pool in self.pools)


async def read_sets(api: "Api", namespace: str | None) -> tuple[SetView, ...]:
    """The sets of a namespace, or of all namespaces for None. Raises ClusterError, ApiError."""
    # In sequence, pools first: a missing CRD or permission is reported for the pools before
    # anything else.
    pools = [body for kind in _POOLS for body in await _list(api, kind, namespace)]
    # One list for all sets, joined below: the number of calls does not grow with the pools.
    pods = await _list(api, PODS, namespace, labels.POOL)
    deployments = await _list(api, DEPLOYMENTS, namespace, labels.ENDPOINT)
    return build_sets(pools, pods, deployments)


def select(sets: Iterable[SetView], name: str | None) -> tuple[SetView, ...]:
    """The sets with this name or with a pool of this name; all sets for None."""
    return tuple(
        set_view
        for set_view in sets
        if name in (None, set_view.name, *(pool.name for pool in set_view.pools))
    )


def to_json(set_view: SetView) -> dict[str, object]:
    """The `-o json` form of a set: its fields and `ready`."""
    return {"ready": set_view.ready, **asdict(set_view)}


def build_sets(
    pools: Sequence[Object], pods: Iterable[Object], deployments: Iterable[Object]
) -> tuple[SetView, ...]:
    """Join pools, pods and Deployments to sets, ordered by namespace and name."""
    pods_of_pool: dict[tuple[str, str], list[PodState]] = {}
    for body in pods:
        # A pod that downloads a model serves nothing.
        if labels.MODEL_PULL in body["metadata"]["labels"]:
            continue
        # The operator's own parsers: this shows what the operator sees.
        pod = pod_state(body)
        pods_of_pool.setdefault((body["metadata"]["namespace"], pod.pool), []).append(pod)
    members: dict[SetKey, list[PoolResource]] = {}
    for body in pools:
        members.setdefault(set_key(body), []).append(pool_resource(body))
    # A router belongs to an endpoint, which several pools may share.
    routers = [(body["metadata"]["namespace"], _router(body)) for body in deployments]
    return tuple(
        SetView(
            key.namespace,
            key.name,
            tuple(
                _pool(p, pods_of_pool.get((key.namespace, p.key.name), []))
                for p in _prefill_first(set_pools)
            ),
            tuple(
                router
                for namespace, router in routers
                if namespace == key.namespace and router.endpoint in _endpoints(set_pools)
            ),
        )
        for key, set_pools in sorted(members.items())
    )


async def _list(
    api: "Api", resource: Resource, namespace: str | None, selector: str = ""
) -> Sequence[Object]:
    try:
        return (await api.list(resource, namespace, labels=selector)).items
    # A list of a known kind never answers 404, even with no object: the CRD is missing.
    except NotFound as err:
        raise NotInstalled(resource) from err
    except Forbidden as err:
        raise NotPermitted(resource, namespace, err) from err


def _prefill_first(pools: list[PoolResource]) -> list[PoolResource]:
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
    # A PrefillPool and a DecodePool may have the same name: the role tells their pods apart.
    own_pods = [pod for pod in pods if (pod.role == "prefill") == (role == "prefill")]
    return PoolView(
        kind=pool.key.kind,
        name=pool.key.name,
        # `conditions` has Ready only if it is not True.
        ready=not any(c.type == ConditionType.READY for c in conditions),
        model=status.get("model") or spec.get("model", {}).get("name"),
        # Before the first reconciliation there is no status: show what the spec asks for.
        desired=status.get("desiredReplicas", spec.get("replicas", 1)),
        ready_pods=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        paired=status.get("pairedReplicas", 0),
        draining=status.get("drainingReplicas", 0),
        revision=status.get("currentRevision"),
        update_revision=status.get("updateRevision"),
        endpoint=status.get("endpoint"),
        conditions=tuple(c for c in conditions if not _is_explained(c, conditions)),
        pods=tuple(_pod(pod) for pod in sorted(own_pods, key=lambda pod: pod.name)),
    )


_OPERATOR: Final = "app.kubernetes.io/component=operator"
"""Label of the operator's pods, as the chart sets it."""


def _conditions(pool: PoolResource) -> list[Condition]:
    """The conditions that need attention; Ready is one if the status is of an older generation."""
    observed = pool.status.get("observedGeneration", 0)
    # The conditions describe an older spec: showing them would mislead.
    if observed < pool.generation:
        what = "this change" if observed else "this pool"
        message = f"the operator has not observed {what} yet: kubectl get pods -A -l {_OPERATOR}"
        return [Condition(ConditionType.READY, "Unknown", "NotObserved", message)]
    conditions: list[Mapping[str, Any]] = pool.status.get("conditions") or []
    return [
        Condition(c["type"], c["status"], c.get("reason", ""), c.get("message", ""))
        for c in conditions
        if c["status"] != _EXPECTED.get(c["type"], c["status"])
        # Needs attention although the condition's status is the expected one.
        or c.get("reason") == Reason.DRAIN_STUCK
    ]


def _is_explained(condition: Condition, others: Iterable[Condition]) -> bool:
    """Whether this is Ready, and another condition states the same reason in detail."""
    return condition.type == ConditionType.READY and any(
        other.type in _PARTS_OF_READY and other.reason == condition.reason for other in others
    )


def _pod(pod: PodState) -> PodView:
    # A deleted pod may still be Ready until its containers end.
    leaving: Literal["Terminating", "Draining"] = "Terminating" if pod.deleting else "Draining"
    state = leaving if pod.leaving else "Ready" if pod.ready else pod.phase
    return PodView(pod.name, state, pod.node, pod.revision, pod.trouble)


def _router(body: Object) -> RouterView:
    own_labels = body["metadata"]["labels"]
    return RouterView(
        own_labels[labels.ENDPOINT],
        own_labels.get(labels.COMPONENT, body["metadata"]["name"]),
        body["spec"].get("replicas", 1),
        (body.get("status") or {}).get("availableReplicas", 0),
    )
