"""What the operator watches, and feeds, which put what kopf sees into the cache. No policy.

    list ───► cache.replace ────────────────affected keys──► work queue
    watch ──► cache.upsert_*, remove_deleted ──affected keys──►

Each watch has a label selector, so the API server sends only objects that concern the operator. No
error ends a watch: while a kind cannot be read, its last content stays, and no set or endpoint of a
namespace is reconciled before everything in that namespace was read once.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from tandem_contract import labels
from tandem_contract.custom_resources import PLURALS
from tandem_kube.client import Api
from tandem_kube.errors import Forbidden
from tandem_kube.reflector import FIRST_PAUSE, MAX_PAUSE, OUTAGE
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
from ..planning.api_objects import set_key
from ..routing.endpoint.observed import CHILD_KINDS, OPTIONAL_KINDS, ApiKind
from .cache import ClusterCache, Upsert, WorkKey
from .store import WatchScope

POOL_RESOURCES: Final[Mapping[Kind, Resource]] = {
    kind: Resource(labels.API_VERSION, PLURALS[kind]) for kind in POOL_KINDS
}
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


def next_pause(pause: float) -> float:
    """The pause in seconds after one more failure; `pause` is the last one, 0 for none."""
    return min(MAX_PAUSE, max(FIRST_PAUSE, 2 * pause))


async def may_list_nodes(api: Api) -> bool:
    """Whether RBAC lets the operator list nodes; without a ClusterRole it usually may not."""
    try:
        await api.raw(f"{NODES.path()}?limit=1")
    except Forbidden:
        return False
    return True


class Feed:
    """What one watch in one namespace has learned; feeds the cache. A session of kopf calls it."""

    def __init__(
        self, watch: Watch, namespace: str | None, cache: ClusterCache, listener: WatchListener
    ) -> None:
        self.watch, self.namespace = watch, namespace
        self.path: Final = watch.resource.path(namespace)
        self.synced = False
        """Whether everything was listed once; stays."""
        self.failures = 0
        """Number of failed calls since the start."""
        self.heard_at = -math.inf
        """When kopf last told anything of it, on the event loop's clock."""
        self.restored = asyncio.Event()
        """Set when the cluster turns out to be in an older state: no watch can be trusted."""
        self.listed_at = -math.inf
        """When it was last listed completely."""
        self.was_silent = False
        """Whether the last watch ended before it told anything, not even a bookmark."""
        self._cache, self._listener = cache, listener
        self._in_doubt = True
        """Until the next list: all that is known may be of a state that is gone. The answer to a
        write of ours may be newer than that list, and yet be from before etcd was restored."""
        self._failed_in_a_row = 0
        self._is_reported = False
        """Whether an outage was logged, and not its end."""
        self._newest = 0
        """The newest version seen."""
        self._is_silent = False
        """Whether the watch has told nothing yet."""
        self._opened_at = -math.inf
        self._pause = 0.0
        """Seconds before the last watch; it grows while watches end at once."""

    @property
    def has_answer(self) -> bool:
        """Whether the cache has the objects, or the operator can do without them."""
        return self.synced or (self.watch.optional and self.failures > 0)

    @property
    def is_failing(self) -> bool:
        """Whether calls fail as in an outage. A watch that goes on after one may stay silent, since
        the cluster may be older than its version; and what is not watched is listed meanwhile."""
        return self._failed_in_a_row >= OUTAGE

    def begin(self) -> None:
        """A session begins, with lists that replace all that is known."""
        self._in_doubt, self._newest = True, 0
        self.restored.clear()

    def listed(self, bodies: list[Object], version: int) -> None:
        """A complete list of `version`."""
        self._heard()
        self.listed_at, self._failed_in_a_row, self._is_silent = self.heard_at, 0, False
        is_older, self._newest = version < self._newest, version
        restored, self._in_doubt = is_older or self._in_doubt, False
        if is_older:
            log.warning("the cluster was restored to an older state: all is read anew")
            self.restored.set()
        kept = [self._trim(body) for body in bodies]
        affected = self._cache.replace(
            self._scope, self.watch.upsert, kept, version, restored=restored
        )
        self._listener.enqueue(affected)
        if not self.synced:
            self.synced = True
            # What was enqueued before everything was read has been dropped.
            self._listener.enqueue_namespace(self.namespace)

    def applied(self, kind: str, body: Object) -> None:
        """An event of a watch: ADDED, MODIFIED or DELETED."""
        self.bookmarked(int(body["metadata"]["resourceVersion"]))
        if kind == "DELETED":
            self._listener.enqueue(self._cache.remove_deleted(body))
        else:
            self._listener.enqueue(self.watch.upsert(self._cache, self._trim(body), None))

    def changed(self, reason: str, body: Body) -> None:
        """A pool was created, updated or, after a start, found again."""
        name = f"{body['metadata']['namespace']}/{body['metadata']['name']}"
        # Each session resumes all pools.
        level = logging.DEBUG if reason == "resume" else logging.INFO
        log.log(level, "%s %s: %s", self.watch.kind, name, reason)
        self._listener.enqueue({set_key(body)})

    def bookmarked(self, version: int) -> None:
        """The watch has told everything up to a version."""
        self._heard()
        self._newest = max(self._newest, version)
        self.was_silent = self._is_silent = False

    def pause_before_watch(self) -> float:
        """Seconds: they grow while watches end at once. After failures it is kopf that pauses."""
        now, opened_at, self._opened_at = self._now(), self._opened_at, -math.inf
        if opened_at == -math.inf:
            return 0.0
        self._pause = 0.0 if now - opened_at >= MAX_PAUSE else next_pause(self._pause)
        return self._pause

    def watching(self) -> None:
        """A watch is open."""
        self._heard()
        self._opened_at = self.heard_at
        self.was_silent, self._is_silent = self._is_silent, True
        if self._is_reported and not self.is_failing:
            log.info("%s: watch restored", self.path)
            self._is_reported = False

    def watch_expired(self) -> None:
        """kopf lists before it watches again."""
        self._opened_at = self._now()
        self.was_silent = self._is_silent = False

    def failed(self, why: str, *, is_outage: bool) -> None:
        """A list or a watch was refused; `is_outage`: the API server gives no answer, or none of
        its own."""
        self._heard()
        self.failures += 1
        self._failed_in_a_row += 1
        # Connections break in normal operation.
        if self.is_failing:
            self._in_doubt |= is_outage
            if not self._is_reported:
                log.warning("%s: watch failed, keeping what is known: %s", self.path, why)
            self._is_reported = True
        if self.watch.optional and self.failures == 1 and not self.synced:
            # From now on nothing waits for this feed.
            self._listener.enqueue_namespace(self.namespace)

    def emptied(self) -> None:
        """The cluster no longer serves the kind."""
        # As after a restore: a later list may bring the same objects back.
        self._cache.replace(self._scope, self.watch.upsert, (), 0, restored=True)

    def _heard(self) -> None:
        self.heard_at = self._now()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    @property
    def _scope(self) -> WatchScope:
        return WatchScope(self.watch.resource.api_version, self.watch.kind, self.namespace)

    def _trim(self, body: Object) -> Object:
        # The largest part of many objects. The cache reads them of pools only.
        if self.watch.kind not in POOL_RESOURCES:
            body["metadata"].pop("managedFields", None)
        return body
