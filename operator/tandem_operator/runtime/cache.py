"""The cluster as the operator last saw it, indexed by set and by endpoint. No I/O.

    upsert_*(body), remove(uid)          ◄── watches, and the answers to our own writes
    observe(key), observe_endpoint(key)  ──► the input of planning

`upsert_*`, `remove` and `set_*` return the keys that the change affects, for the work queue. All of
it runs on one event loop without awaiting, so no update is ever seen half done.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PREFILL_POOL
from tandem_contract.paths import Role

from ..observed import (
    Body,
    EndpointKey,
    Failure,
    Kind,
    NodeState,
    Observed,
    PodState,
    PoolKey,
    PoolResource,
    RevisionState,
    RouterState,
    SetKey,
)
from ..planning.api_objects import node_state, pod_state, pool_resource, revision_state, set_key
from ..planning.validation import validate_set
from ..resources.pools import DecodePool
from ..resources.resolve import DEFAULTS, Defaults
from ..routing.endpoint.observed import (
    ApiKind,
    EndpointPool,
    ObjectRef,
    ObservedEndpoint,
    UnreadablePool,
)
from .store import Store

WorkKey = SetKey | EndpointKey
"""A key of the work queue: what one reconciliation is about."""


class ClusterCache:
    """Every object that the operator watches, as last seen, and the outcome of its last writes."""

    def __init__(
        self,
        *,
        nodes: bool,
        kinds: frozenset[ApiKind] = frozenset(),
        defaults: Defaults = DEFAULTS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`nodes`: whether the operator may list nodes. `clock` returns Unix seconds."""
        # A pool is indexed under its own key, its set's, and a DecodePool's endpoint's too.
        self.pools: Store[PoolKey | WorkKey, PoolResource] = Store()
        self.pods: Store[PoolKey, PodState] = Store()
        self.revisions: Store[PoolKey, RevisionState] = Store()
        self.budgets: Store[PoolKey, Body] = Store()
        self.children: Store[EndpointKey, Body] = Store()
        self._plan_keys: dict[EndpointKey, Body] = {}
        """Each endpoint's Secret, as last read: Secrets are neither watched nor listed."""
        self.nodes: Store[None, NodeState] | None = Store() if nodes else None
        """None when the operator may not list nodes."""
        self.kinds = kinds
        """Optional kinds that the cluster serves."""
        self.failures: dict[PoolKey, Failure] = {}
        """Writes for a pool that the API server refused in the last apply."""
        self.child_failures: dict[EndpointKey, Mapping[ObjectRef, Failure]] = {}
        self.kv_bytes_moved: dict[PoolKey, float] = {}
        """KV bytes that a DecodePool's engines have pulled, as last probed."""
        self._router_states: dict[EndpointKey, RouterState] = {}
        self._defaults = defaults
        self._clock = clock

    def work_keys(self) -> list[WorkKey]:
        """The keys of all sets and endpoints."""
        return [key for key in self.pools.all_keys() if not isinstance(key, PoolKey)]

    def pool_keys(self, key: SetKey) -> tuple[PoolKey, ...]:
        """The pools of a set, with the PrefillPool that names it even when it does not exist."""
        # Pods and revisions of a PrefillPool that was deleted may still exist.
        namesake = PoolKey(key.namespace, key.kind, key.name)
        return tuple(sorted({namesake, *(pool.key for pool in self.pools.by_key(key))}))

    def observe(self, key: SetKey) -> Observed:
        """A snapshot of a set."""
        # Sorted, so that equal content gives an equal snapshot.
        members = sorted(self.pools.by_key(key), key=lambda pool: pool.key)
        # One at most: a set has the name of its PrefillPool.
        prefill = next((pool for pool in members if pool.key.kind == PREFILL_POOL), None)
        decodes = tuple(pool for pool in members if pool.key.kind == DECODE_POOL)
        pools = self.pool_keys(key)
        return Observed(
            key=key,
            now=self._clock(),
            prefill=prefill,
            decodes=decodes,
            pods=tuple(_sorted_by_name(self.pods, pools)),
            revisions=tuple(_sorted_by_name(self.revisions, pools)),
            budgets=tuple(_values(self.budgets, pools)),
            nodes=None if self.nodes is None else tuple(self.nodes.values()),
            routers={
                endpoint.name: self._router_states[endpoint]
                for endpoint in map(endpoint_of, decodes)
                if endpoint in self._router_states
            },
            kv_bytes_moved={
                pool.key.name: self.kv_bytes_moved[pool.key]
                for pool in decodes
                if pool.key in self.kv_bytes_moved
            },
            failures={pool: self.failures[pool] for pool in pools if pool in self.failures},
        )

    def observe_endpoint(self, key: EndpointKey, secret: bytes) -> ObservedEndpoint:
        """A snapshot of an endpoint; `secret` becomes the next plan key if one is due."""
        pools, unreadable = [], []
        for resource in sorted(self.pools.by_key(key), key=lambda pool: pool.key):
            # A pool that is being deleted needs no routing and must not own new objects.
            if resource.deleting:
                continue
            pool = self._read(resource)
            if pool is None:
                unreadable.append(UnreadablePool(resource.uid, resource.key.name))
            else:
                pools.append(EndpointPool(resource.uid, pool))
        return ObservedEndpoint(
            key=key,
            now=self._clock(),
            pools=tuple(pools),
            unreadable_pools=tuple(unreadable),
            children={ObjectRef.of(body): body for body in self.endpoint_objects(key)},
            kinds=self.kinds,
            secret=secret,
            failures=self.child_failures.get(key, {}),
        )

    def _read(self, resource: PoolResource) -> DecodePool | None:
        """The DecodePool with what it inherits from its PrefillPool; None when it is invalid."""
        # The DecodePool alone is not enough: it inherits fields from the PrefillPool of its set.
        members = self.pools.by_key(set_key(resource.body))
        prefill = next((pool.body for pool in members if pool.key.kind == PREFILL_POOL), None)
        reading = validate_set(prefill, [resource.body], self._defaults).decodes[resource.key.name]
        return reading.pool if isinstance(reading.pool, DecodePool) else None

    def endpoint_objects(self, key: EndpointKey) -> list[Body]:
        """The objects of an endpoint, its Secret included."""
        secret = self._plan_keys.get(key)
        return [*self.children.by_key(key), *([secret] if secret else [])]

    def set_plan_keys(self, key: EndpointKey, secret: Body | None) -> None:
        """Store an endpoint's Secret; None: there is none."""
        if secret is None:
            self._plan_keys.pop(key, None)
        else:
            self._plan_keys[key] = _trimmed(secret)

    def set_router_state(self, key: EndpointKey, state: RouterState) -> set[SetKey]:
        """Store an endpoint's state; the sets whose pools report it, if it changed."""
        # An equal state must not enqueue the sets, or each pass over an endpoint would cause
        # further ones.
        if self._router_states.get(key) == state:
            return set()
        self._router_states[key] = state
        return {set_key(pool.body) for pool in self.pools.by_key(key)}

    def set_kv_bytes_moved(self, pool: PoolKey, total: float) -> set[SetKey]:
        """Store how many KV bytes a DecodePool's pods have pulled; its set, if that changed."""
        if self.kv_bytes_moved.get(pool) == total:
            return set()
        self.kv_bytes_moved[pool] = total
        return {set_key(resource.body) for resource in self.pools.by_key(pool)}

    def pod_counts(self) -> Iterable[tuple[str, str, str, str, int]]:
        """Namespace, pool, role, state and number of pods, for the metrics."""
        for key in self.pods.all_keys():
            counts = Counter((pod.role, _metric_state(pod)) for pod in self.pods.by_key(key))
            for (role, state), count in counts.items():
                yield key.namespace, key.name, role, state, count

    def upsert_pool(self, body: Body) -> set[WorkKey]:
        resource = pool_resource(_trimmed(body))
        keys: tuple[PoolKey | WorkKey, ...] = (resource.key, set_key(resource.body))
        if resource.key.kind == DECODE_POOL:
            keys += (endpoint_of(resource),)
        # When the pool moved to another set or endpoint, the old keys are among those returned.
        # The version is read from `body`, since `_trimmed` has removed it.
        changed = self.pools.put(resource.uid, _version(body), keys, resource)
        return {key for key in changed if not isinstance(key, PoolKey)}

    def upsert_pod(self, body: Body) -> set[WorkKey]:
        # PodState has only fields that planning reads: other updates of the pod enqueue nothing.
        return self._put(self.pods, body, pod_state(body))

    def upsert_revision(self, body: Body) -> set[WorkKey]:
        return self._put(self.revisions, body, revision_state(body))

    def upsert_budget(self, body: Body) -> set[WorkKey]:
        # Kubernetes rewrites the status of a budget with every change of its pods.
        return self._put(self.budgets, body, _trimmed(body, "status"))

    def upsert_child(self, body: Body) -> set[WorkKey]:
        metadata = body["metadata"]
        key = EndpointKey(metadata["namespace"], metadata["labels"][labels.ENDPOINT])
        if body["kind"] == "Secret":
            self.set_plan_keys(key, body)
            return set()
        return set(self.children.put(metadata["uid"], _version(body), (key,), _trimmed(body)))

    def upsert_node(self, body: Body) -> set[WorkKey]:
        if self.nodes is None:
            return set()
        uid = body["metadata"]["uid"]
        # Any node may decide whether a replica of any set fits.
        changed = self.nodes.put(uid, _version(body), (None,), node_state(body))
        return self._all_sets() if changed else set()

    def uids(self) -> set[str]:
        """The uids of all objects in the cache."""
        stores = (self.pools, self.pods, self.revisions, self.budgets, self.children, self.nodes)
        return {uid for store in stores if store is not None for uid in store.uids()}

    def remove_deleted(self, body: Body) -> set[WorkKey]:
        """Remove an object for which a watch sent DELETED.

        A watch with a selector also sends that when an object's labels stop matching. Such an
        object may come back, hence the version.
        """
        return self.remove(body["metadata"]["uid"], _version(body))

    def remove(self, uid: str, version: float = math.inf) -> set[WorkKey]:
        """Remove an object of any kind; with a `version` only if it is not newer than that."""
        # The caller does not know the kind of object. A store ignores a uid that it does not have,
        # except that it remembers the deletion.
        keys = self.pools.remove(uid, version)
        pool_keys = self.pods.remove(uid, version) | self.revisions.remove(uid, version)
        pool_keys |= self.budgets.remove(uid, version)
        if self.nodes is not None and self.nodes.remove(uid, version):
            return self._all_sets()
        for key in keys:
            if isinstance(key, PoolKey):
                # A new pool of the same name starts without them.
                self.failures.pop(key, None)
                self.kv_bytes_moved.pop(key, None)
        work_keys = {key for key in keys if not isinstance(key, PoolKey)}
        return work_keys | self.children.remove(uid, version) | self._sets(pool_keys)

    def _put(self, store: Store[PoolKey, Any], body: Body, value: Any) -> set[WorkKey]:
        key = pool_key_of(body)
        return self._sets(store.put(body["metadata"]["uid"], _version(body), (key,), value))

    def _all_sets(self) -> set[WorkKey]:
        return {key for key in self.work_keys() if isinstance(key, SetKey)}

    def _sets(self, pools: Iterable[PoolKey]) -> set[WorkKey]:
        return {set_key(resource.body) for pool in pools for resource in self.pools.by_key(pool)}


def endpoint_of(pool: PoolResource) -> EndpointKey:
    """The endpoint of a DecodePool: `spec.routing.endpoint`, by default the pool's own name."""
    name = _text_at(pool.body, "spec", "routing", "endpoint")
    return EndpointKey(pool.key.namespace, name or pool.key.name)


def pool_key_of(body: Body) -> PoolKey:
    """The pool that an object's labels name."""
    metadata = body["metadata"]
    object_labels = metadata.get("labels") or {}
    is_prefill = object_labels.get(labels.ROLE) == Role.PREFILL
    kind: Kind = PREFILL_POOL if is_prefill else DECODE_POOL
    return PoolKey(metadata["namespace"], kind, object_labels.get(labels.POOL, ""))


def _metric_state(pod: PodState) -> str:
    if pod.leaving:
        return "draining"
    if pod.over:
        return "failed"
    return "ready" if pod.ready else "pending"


def _text_at(body: Body, *path: str) -> str | None:
    """The string at `path`; None when it or a parent is missing or of another type."""
    value: Any = body
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) and value else None


def _values(store: Store[PoolKey, Any], keys: Iterable[PoolKey]) -> Iterable[Any]:
    return (value for key in keys for value in store.by_key(key))


def _sorted_by_name(store: Store[PoolKey, Any], keys: Iterable[PoolKey]) -> Iterable[Any]:
    """Sorted, so that a snapshot does not depend on the order in which events arrived."""
    return sorted(_values(store, keys), key=lambda value: value.name)


def _version(body: Body) -> int:
    """The resourceVersion. Kubernetes 1.35 documents that versions are growing numbers, which
    etcd-backed API servers have always sent."""
    return int(body["metadata"]["resourceVersion"])


def _trimmed(body: Body, *without: str) -> Body:
    """The object without fields that change with every write and that the operator does not read.

    Objects that differ in these alone compare equal, and so cause no reconciliation.
    """
    dropped = ("managedFields", "resourceVersion")
    metadata = {k: v for k, v in body["metadata"].items() if k not in dropped}
    return {**{k: v for k, v in body.items() if k not in without}, "metadata": metadata}
