"""The operator's watches, which feed the cache. No policy.

    list ───► cache.replace ────────────────affected keys──► work queue
    watch ──► cache.upsert_*, remove_deleted ──affected keys──►

Each watch has a label selector, so the API server sends only objects that concern the operator. No
error ends a watch: while a kind cannot be read, its last content stays, and no set or endpoint of a
namespace is reconciled before everything in that namespace was read once.
"""

import asyncio
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

from tandem_contract import labels
from tandem_contract.custom_resources import PLURALS
from tandem_kube.client import Api
from tandem_kube.errors import ApiError, Forbidden, NotFound
from tandem_kube.list_watch import ListWatch
from tandem_kube.resources import (
    CONTROLLER_REVISIONS,
    JOBS,
    KINDS,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    Object,
    Resource,
)

from ..observed import KINDS as POOL_KINDS
from ..observed import Body, Kind
from ..routing.endpoint.observed import CHILD_KINDS, OPTIONAL_KINDS, ApiKind
from .cache import ClusterCache, Upsert, WorkKey
from .store import WatchScope

POOL_RESOURCES: Final[Mapping[Kind, Resource]] = {
    kind: Resource(labels.API_VERSION, PLURALS[kind]) for kind in POOL_KINDS
}
DISCOVERY_PERIOD: Final = 15.0
"""Seconds between looks for optional kinds that the cluster does not serve: one that is installed
goes unnoticed for as long. Each costs one call per missing kind."""

_ELSEWHERE: Final = ("PodDisruptionBudget", "Secret")
"""Kinds of endpoints' objects without a watch of their own: budgets are watched for pools and
endpoints together, and Secrets are read by name (see `reads`)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Watch:
    """The objects of one kind that match a label selector."""

    kind: str
    resource: Resource
    selector: str
    """A label that the objects have; empty: all objects of the resource."""
    upsert: Upsert
    namespaced: bool = True
    optional: bool = False
    """Whether sets and endpoints are reconciled although the objects cannot be read."""


class WatchListener(Protocol):
    """Receives what the watches learn; `Controller` implements it."""

    def enqueue(self, keys: set[WorkKey]) -> None:
        """Reconcile `keys` soon."""

    def enqueue_namespace(self, namespace: str | None) -> None:
        """Reconcile everything in a namespace soon; None: in all."""


def watches(cache: ClusterCache) -> tuple[Watch, ...]:
    """Everything to watch but the optional kinds, each resource once."""
    pools = (
        Watch(kind, resource, "", ClusterCache.upsert_pool)
        for kind, resource in POOL_RESOURCES.items()
    )
    children = (child_watch(kind) for kind in CHILD_KINDS if kind[1] not in _ELSEWHERE)
    nodes = Watch("Node", NODES, "", ClusterCache.upsert_node, namespaced=False, optional=True)
    return (
        *pools,
        Watch("Pod", PODS, labels.POOL, ClusterCache.upsert_pod),
        Watch(
            "ControllerRevision", CONTROLLER_REVISIONS, labels.POOL, ClusterCache.upsert_revision
        ),
        Watch("PodDisruptionBudget", POD_DISRUPTION_BUDGETS, labels.MANAGED_BY, _upsert_budget),
        # An older Role does not permit it: pools without prePull need no Job.
        Watch("Job", JOBS, labels.MODEL_PULL, ClusterCache.upsert_pull_job, optional=True),
        *children,
        *((nodes,) if cache.nodes is not None else ()),
    )


def child_watch(kind: ApiKind) -> Watch:
    """The watch of a kind of endpoints' objects."""
    version, name = kind
    resource = Resource(version, KINDS[name].plural)
    is_optional = kind in OPTIONAL_KINDS
    return Watch(name, resource, labels.ENDPOINT, ClusterCache.upsert_child, optional=is_optional)


def _upsert_budget(cache: ClusterCache, body: Body, listed_at: int | None) -> set[WorkKey]:
    """Pools and endpoints both have PodDisruptionBudgets, told apart by their labels."""
    object_labels = body["metadata"].get("labels") or {}
    if labels.ENDPOINT in object_labels:
        return cache.upsert_child(body, listed_at)
    return cache.upsert_budget(body, listed_at) if labels.POOL in object_labels else set()


async def may_list_nodes(api: Api) -> bool:
    """Whether RBAC lets the operator list nodes; without a ClusterRole it usually may not."""
    try:
        await api.raw(f"{NODES.path()}?limit=1")
    except Forbidden:
        return False
    return True


async def served_kinds(api: Api, kinds: Collection[ApiKind]) -> frozenset[ApiKind]:
    """Those of `kinds` that the cluster serves. Raises ApiError."""
    served = set()
    for version, kind in kinds:
        try:
            listed = await api.raw(f"/apis/{version}")
        except NotFound:
            continue
        if any(resource.get("kind") == kind for resource in listed.get("resources") or ()):
            served.add((version, kind))
    return frozenset(served)


class Feed(ListWatch[Object]):
    """One watch in one namespace, which feeds the cache."""

    def __init__(
        self,
        api: Api,
        watch: Watch,
        namespace: str | None,
        cache: ClusterCache,
        listener: WatchListener,
    ) -> None:
        super().__init__(api, watch.resource, namespace, labels=watch.selector)
        self.watch, self.namespace = watch, namespace
        self._cache, self._listener = cache, listener

    @property
    def scope(self) -> WatchScope:
        return WatchScope(self.watch.resource.api_version, self.watch.kind, self.namespace)

    @property
    def has_answer(self) -> bool:
        """Whether the cache has the objects, or the operator can do without them."""
        return self.synced.is_set() or (self.watch.optional and self.failures > 0)

    def _parse(self, body: Object) -> Object:
        # The largest part of many objects. The cache reads them of pools only.
        if self.watch.kind not in POOL_RESOURCES:
            body["metadata"].pop("managedFields", None)
        return body

    def _replace(self, listed: list[Object], version: int, *, restored: bool) -> None:
        if restored:
            log.warning(
                "the cluster was restored to an older state: %s are read anew", self._description
            )
        upsert = self.watch.upsert
        affected = self._cache.replace(self.scope, upsert, listed, version, restored=restored)
        self._listener.enqueue(affected)
        if not self.synced.is_set():
            self.synced.set()
            # What was enqueued before everything was read has been dropped.
            self._listener.enqueue_namespace(self.namespace)

    def _apply(self, kind: str, body: Object) -> None:
        if kind == "DELETED":
            self._listener.enqueue(self._cache.remove_deleted(body))
        else:
            self._listener.enqueue(self.watch.upsert(self._cache, body, None))

    def _on_error(self, err: ApiError) -> None:
        super()._on_error(err)
        if self.watch.optional and self.failures == 1 and not self.synced.is_set():
            # From now on nothing waits for this feed.
            self._listener.enqueue_namespace(self.namespace)

    def _reconnected(self) -> None:
        # Reconciliations failed too meanwhile, and wait for up to a minute to be tried again.
        self._listener.enqueue_namespace(self.namespace)


class Feeds:
    """All feeds. Those of optional kinds come and go with the kinds."""

    def __init__(
        self,
        api: Api,
        cache: ClusterCache,
        namespaces: Sequence[str | None],
        listener: WatchListener,
    ) -> None:
        """`namespaces` is [None] for all of the cluster."""
        self._api, self._cache = api, cache
        self._namespaces, self._listener = namespaces, listener
        self._tasks: dict[Feed, asyncio.Task[NoReturn]] = {}
        self._discovered = False

    def is_complete(self, namespace: str) -> bool:
        """Whether the cache has everything in a namespace. Before that, existing objects look
        missing and would be created again."""
        return self._discovered and all(
            feed.has_answer for feed in self._tasks if feed.namespace in (None, namespace)
        )

    async def run(self) -> None:
        """Feed the cache until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watch in watches(self._cache):
                self._start(group, watch)
            while True:
                try:
                    await self._discover(group)
                except ApiError as err:
                    log.warning("cannot discover which kinds the cluster serves: %s", err)
                await asyncio.sleep(DISCOVERY_PERIOD)

    async def _discover(self, group: asyncio.TaskGroup) -> None:
        """Start feeds of optional kinds that were installed, end those of kinds that are gone."""
        gone = {
            (feed.watch.resource.api_version, feed.watch.kind)
            for feed in self._tasks
            if feed.watch.selector == labels.ENDPOINT
            and feed.watch.optional
            and isinstance(feed.last_error, NotFound)
        }
        unserved = [
            kind for kind in OPTIONAL_KINDS if kind not in self._cache.kinds or kind in gone
        ]
        served = await served_kinds(self._api, unserved)
        removed, added = gone - served, served - self._cache.kinds
        self._cache.kinds = (self._cache.kinds - removed) | added
        for kind in removed:
            log.warning("the cluster no longer serves %s of %s", kind[1], kind[0])
            self._stop(child_watch(kind))
        for kind in added:
            self._start(group, child_watch(kind))
        is_first, self._discovered = not self._discovered, True
        if is_first or removed:
            self._listener.enqueue_namespace(None)

    def _start(self, group: asyncio.TaskGroup, watch: Watch) -> None:
        for namespace in self._namespaces if watch.namespaced else (None,):
            feed = Feed(self._api, watch, namespace, self._cache, self._listener)
            self._tasks[feed] = group.create_task(feed.run())

    def _stop(self, watch: Watch) -> None:
        for feed in [feed for feed in self._tasks if feed.watch == watch]:
            self._tasks.pop(feed).cancel()
            self._cache.replace(feed.scope, watch.upsert, (), sys.maxsize, restored=False)
