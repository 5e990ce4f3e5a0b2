"""The operator's watches, the kopf handlers that feed the cache, and the relist. No policy.

    kopf watch ──index, event──► cache.upsert_*, remove_deleted ──affected keys──► work queue
    relist ────────────────────► cache.upsert_*, remove ──────────affected keys──►

Each watch has a label selector, so the API server sends only objects that concern the operator.
kopf is only a source of events here: it writes no state into objects and sets no finalizers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import kopf
from kubernetes.aio.client.configuration import Configuration

from tandem_contract import labels
from tandem_contract.custom_resources import PLURALS
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

from ..observed import KINDS as POOL_KINDS
from ..observed import Body, Kind
from ..routing.endpoint.observed import CHILD_KINDS, OPTIONAL_KINDS, ApiKind
from .cache import ClusterCache, WorkKey

POOL_RESOURCES: Final[Mapping[Kind, Resource]] = {
    kind: Resource(labels.API_VERSION, PLURALS[kind]) for kind in POOL_KINDS
}


@dataclass(frozen=True)
class Watch:
    """The objects of one resource that match a label selector."""

    resource: Resource
    selector: str
    """A label that the objects have; empty: all objects of the resource."""
    upsert: Callable[[ClusterCache, Body], set[WorkKey]]
    """Puts an object into the cache and returns the keys it affects."""
    namespaced: bool = True


class WatchListener(Protocol):
    """Receives what the handlers learn; `Controller` implements it."""

    def enqueue(self, keys: set[WorkKey]) -> None:
        """Reconcile `keys` soon."""

    def mark_synced(self) -> None:
        """The cache holds everything that the first lists contained. Called with every event."""

    def request_relist(self) -> None:
        """A watch had to start over; deletions in the meantime were missed."""


def watches(cache: ClusterCache) -> tuple[Watch, ...]:
    """Everything to watch, each resource once: kopf opens one watch per resource."""
    pools = (Watch(resource, "", ClusterCache.upsert_pool) for resource in POOL_RESOURCES.values())
    children = (
        Watch(Resource(version, KINDS[kind].plural), labels.ENDPOINT, ClusterCache.upsert_child)
        for version, kind in (*CHILD_KINDS, *sorted(cache.kinds))
        # Budgets are watched below for pools and endpoints together: kopf opens one watch per
        # resource. Secrets are read by name, see `reads`.
        if kind not in ("PodDisruptionBudget", "Secret")
    )
    nodes = Watch(NODES, "", ClusterCache.upsert_node, namespaced=False)
    return (
        *pools,
        Watch(PODS, labels.POOL, ClusterCache.upsert_pod),
        Watch(CONTROLLER_REVISIONS, labels.POOL, ClusterCache.upsert_revision),
        Watch(POD_DISRUPTION_BUDGETS, labels.MANAGED_BY, _upsert_budget),
        *children,
        *((nodes,) if cache.nodes is not None else ()),
    )


def _upsert_budget(cache: ClusterCache, body: Body) -> set[WorkKey]:
    """Pools and endpoints both have PodDisruptionBudgets, told apart by their labels."""
    object_labels = body["metadata"].get("labels") or {}
    if labels.ENDPOINT in object_labels:
        return cache.upsert_child(body)
    return cache.upsert_budget(body) if labels.POOL in object_labels else set()


async def may_list_nodes(api: Api) -> bool:
    """Whether RBAC lets the operator list nodes; without a ClusterRole it usually may not."""
    try:
        await api.raw(f"{NODES.path()}?limit=1")
    except Forbidden:
        return False
    return True


async def discover_optional_kinds(api: Api) -> frozenset[ApiKind]:
    """The optional kinds that the cluster serves. Called once, at startup."""
    served = set()
    for version, kind in OPTIONAL_KINDS:
        try:
            listed = await api.raw(f"/apis/{version}")
        except NotFound:
            continue
        if any(resource.get("kind") == kind for resource in listed.get("resources") or ()):
            served.add((version, kind))
    return frozenset(served)


async def relist(
    api: Api, cache: ClusterCache, kinds: Sequence[Watch], namespaces: Sequence[str | None]
) -> set[WorkKey]:
    """Bring the cache to what the API server lists; returns the affected keys.

    Needed because a watch that was interrupted for too long starts over with a new list, and kopf
    does not report objects that are missing from that list. `namespaces` is [None] for all of the
    cluster. Raises ApiError; nothing is removed from the cache then.
    """
    before, listed_uids, affected = cache.uids(), set[str](), set[WorkKey]()
    for kind in kinds:
        for namespace in namespaces if kind.namespaced else (None,):
            listed = await api.list(kind.resource, namespace, labels=kind.selector)
            for body in listed.items:
                listed_uids.add(body["metadata"]["uid"])
                affected |= kind.upsert(cache, body)
    # Only what the cache held before the first list can be missing from all of them because it is
    # deleted. An object that a watch added since then may be younger than the lists.
    for uid in before - listed_uids:
        affected |= cache.remove(uid)
    return affected


def kopf_registry(
    kinds: Sequence[Watch],
    cache: ClusterCache,
    listener: WatchListener,
    configuration: Configuration,
) -> kopf.OperatorRegistry:
    """Handlers for all of `kinds` that update the cache and tell `listener`."""
    registry = kopf.OperatorRegistry()
    _register_login(registry, configuration)
    for kind in kinds:
        _register_handlers(registry, kind, cache, listener)
    return registry


def kopf_settings(kinds: Sequence[Watch]) -> kopf.OperatorSettings:
    """kopf as a source of events only; it then needs no permission to read CRDs."""
    settings = kopf.OperatorSettings()
    # Events about pools are our own (`Cluster.write_status`), and so is leader election; scanning
    # would need permission to read CRDs and namespaces.
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.chunk_size = 500
    # Seconds. kopf runs a task for each object until the object had no event for so long.
    settings.queueing.idle_timeout = 1.0
    for kind in kinds:
        if kind.selector:
            # The same selector as in `relist`, or the relist would remove what the watch adds.
            settings.watching.label_selectors[_kopf_selector(kind)] = kind.selector
    return settings


def quiet_kopf_logs() -> None:
    """Drop kopf's log lines about every object; keep its warnings and errors."""
    logging.getLogger("kopf").setLevel(logging.WARNING)


def _register_handlers(
    registry: kopf.OperatorRegistry, kind: Watch, cache: ClusterCache, listener: WatchListener
) -> None:
    async def upsert(body: kopf.Body, **_: Any) -> None:
        listener.enqueue(kind.upsert(cache, dict(body)))

    async def on_event(type: str | None, body: kopf.Body, memo: kopf.Memo, **_: Any) -> None:
        # kopf runs the index handlers for the first lists of all resources before it runs any event
        # handler. The first event thus means that the cache is complete; in a cluster without any
        # watched object there is no event, and nothing to reconcile.
        listener.mark_synced()
        if type == "DELETED":
            listener.enqueue(cache.remove_deleted(body))
        elif type is None and "listed" in memo:
            # A type of None marks an object from a list. The second list of a watch is a new start.
            listener.request_relist()
        memo["listed"] = True

    selector, name = _kopf_selector(kind), kind.resource.plural
    kopf.index(*selector, id=f"{name}_upsert", registry=registry)(upsert)
    kopf.on.event(*selector, id=f"{name}_event", registry=registry)(on_event)


def _kopf_selector(kind: Watch) -> tuple[str, str, str]:
    resource = kind.resource
    return resource.group, resource.version, resource.plural


def _register_login(registry: kopf.OperatorRegistry, configuration: Configuration) -> None:
    """Give kopf the credentials of our own API client; kopf asks again when they are refused."""

    async def login(**_: Any) -> kopf.ConnectionInfo:
        # Read at each login, since the service account's token is replaced regularly.
        auth: Mapping[str, Any] = await configuration.auth_settings()
        header: str = auth.get("BearerToken", {}).get("value") or ""
        scheme, token = (*header.split(" ", 1), "", "")[:2]
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            scheme=scheme or None,
            token=token.strip() or None,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            proxy_url=configuration.proxy,
        )

    kopf.on.login(id="login", registry=registry)(login)
