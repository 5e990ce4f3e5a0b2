"""The cluster as the operator last saw it, indexed by set and by endpoint. No I/O.

    upsert_*(body), remove(uid)          ◄── watches, and the answers to our own writes
    observe(key), observe_endpoint(key)  ──► the input of planning

`upsert_*`, `remove` and `set_*` return the keys that the change affects, for the work queue. All of
it runs on one event loop without awaiting, so no update is ever seen half done.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PREFILL_POOL

from ..observed import (
    Body,
    EndpointKey,
    Failure,
    NodeState,
    Observed,
    PodState,
    PoolKey,
    PoolResource,
    PullJob,
    PullPod,
    RevisionState,
    RouterState,
    SetKey,
    StorageReport,
)
from ..planning.api_objects import (
    node_state,
    pod_state,
    pool_resource,
    pull_job,
    pull_pod,
    revision_state,
    set_key,
)
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
from .bodies import endpoint_of, pool_key_of, pull_key_of, scope_of, trimmed, version_of
from .store import K, Store, V, WatchScope

WorkKey = SetKey | EndpointKey
"""A key of the work queue: what one reconciliation is about."""

Upsert = Callable[["ClusterCache", Body, int | None], set[WorkKey]]
"""Puts an object into the cache, from a list of that version or from a watch."""


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
        self.pull_jobs: Store[SetKey, PullJob] = Store()
        self.pull_pods: Store[SetKey, PullPod] = Store()
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
        # What a pool's engines said when last probed: bytes they have pulled, and of their store.
        self.kv_bytes_moved: dict[PoolKey, float] = {}
        self.storage: dict[PoolKey, StorageReport] = {}
        self._router_states: dict[EndpointKey, RouterState] = {}
        self._defaults = defaults
        self._clock = clock

    def work_keys(self) -> list[WorkKey]:
        """The keys of all sets and endpoints, also of endpoints that no pool names any more."""
        keys = {key for key in self.pools.all_keys() if not isinstance(key, PoolKey)}
        return [*keys, *(key for key in self.children.all_keys() if key not in keys)]

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
            pull_jobs=tuple(_sorted_by_name(self.pull_jobs, [key])),
            pull_pods=tuple(_sorted_by_name(self.pull_pods, [key])),
            nodes=None if self.nodes is None else tuple(self.nodes.values()),
            routers={
                endpoint.name: self._router_states[endpoint]
                for endpoint in map(endpoint_of, decodes)
                if endpoint in self._router_states
            },
            kv_bytes_moved={p: self.kv_bytes_moved[p] for p in pools if p in self.kv_bytes_moved},
            storage={pool: self.storage[pool] for pool in pools if pool in self.storage},
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
            self._plan_keys[key] = trimmed(secret)

    def set_router_state(self, key: EndpointKey, state: RouterState) -> set[SetKey]:
        """Store an endpoint's state; the sets whose pools report it, if it changed."""
        # An equal state must not enqueue the sets, or each pass over an endpoint would cause
        # further ones.
        if self._router_states.get(key) == state:
            return set()
        self._router_states[key] = state
        return {set_key(pool.body) for pool in self.pools.by_key(key)}

    def set_probed(self, results: dict[PoolKey, V], pool: PoolKey, value: V) -> set[WorkKey]:
        """Store `value` of a pool that still exists in `results`; its set, if that changed."""
        if results.get(pool) == value or not self.pools.by_key(pool):
            return set()
        results[pool] = value
        return self._sets([pool])

    def pod_counts(self) -> Iterable[tuple[str, str, str, str, int]]:
        """Namespace, pool, role, state and number of pods, for the metrics."""
        for key in self.pods.all_keys():
            counts = Counter((pod.role, pod.state) for pod in self.pods.by_key(key))
            for (role, state), count in counts.items():
                yield key.namespace, key.name, role, state, count

    def upsert_pool(self, body: Body, listed_at: int | None = None) -> set[WorkKey]:
        # Whose `replicas` is stands in the managed fields, which `trimmed` removes.
        resource = replace(pool_resource(body), body=trimmed(body))
        keys: tuple[PoolKey | WorkKey, ...] = (resource.key, set_key(resource.body))
        if resource.key.kind == DECODE_POOL:
            keys += (endpoint_of(resource),)
        known = self.pools.by_key(resource.key)
        # The operator's own write of a status often comes by the watch before its answer.
        is_routed_anew = all(pool.routed != resource.routed for pool in known)
        # When the pool moved to another set or endpoint, the old keys are among those returned.
        # The version is read from `body`, since `trimmed` has removed it.
        uid, version, scope = resource.uid, version_of(body), scope_of(body)
        changed = self.pools.put(uid, version, keys, resource, scope=scope, listed_at=listed_at)
        return self._work(changed, is_routed_anew=is_routed_anew)

    def upsert_pod(self, body: Body, listed_at: int | None = None) -> set[WorkKey]:
        # PodState has only fields that planning reads: other updates of the pod enqueue nothing.
        if key := pull_key_of(body):
            return {*self._keep(self.pull_pods, body, key, pull_pod(body), listed_at)}
        return self._put(self.pods, body, pod_state(body), listed_at)

    def upsert_pull_job(self, body: Body, listed_at: int | None = None) -> set[WorkKey]:
        key = pull_key_of(body)
        return {*self._keep(self.pull_jobs, body, key, pull_job(body), listed_at)} if key else set()

    def upsert_revision(self, body: Body, listed_at: int | None = None) -> set[WorkKey]:
        return self._put(self.revisions, body, revision_state(body), listed_at)

    def upsert_budget(self, body: Body, listed_at: int | None = None) -> set[WorkKey]:
        # Kubernetes rewrites the status of a budget with every change of its pods.
        return self._put(self.budgets, body, trimmed(body, "status"), listed_at)

    def upsert_child(self, body: Body, listed_at: int | None = None) -> set[WorkKey]:
        metadata = body["metadata"]
        key = EndpointKey(metadata["namespace"], metadata["labels"][labels.ENDPOINT])
        if body["kind"] == "Secret":
            self.set_plan_keys(key, body)
            return set()
        # Only a Deployment's status is read; Kubernetes writes those of budgets and routes often.
        kept = trimmed(body) if body["kind"] == "Deployment" else trimmed(body, "status")
        return {*self._keep(self.children, body, key, kept, listed_at)}

    def upsert_node(self, body: Body, listed_at: int | None = None) -> set[WorkKey]:
        if self.nodes is None:
            return set()
        # Any node may decide whether a replica of any set fits.
        changed = self._keep(self.nodes, body, None, node_state(body), listed_at)
        return self._all_sets() if changed else set()

    def replace(
        self,
        scope: WatchScope,
        upsert: Upsert,
        listed: Sequence[Body],
        version: int,
        *,
        restored: bool,
    ) -> set[WorkKey]:
        """Bring the objects of `scope` to a complete list of `version`.

        Objects that are not in it are removed, unless they are younger: the answers to our own
        writes may be. `restored`: the cluster is in an older state than before.
        """
        affected: set[WorkKey] = set()
        if restored:
            # Whatever was known may be wrong now, for each key that had or has a pool.
            affected |= {*self.work_keys()}
            for store in self._stores():
                store.forget(scope)
        for body in listed:
            affected |= upsert(self, body, version)
        listed_uids = {body["metadata"]["uid"] for body in listed}
        for store in self._stores():
            for uid in store.uids_in(scope, version) - listed_uids:
                affected |= self.remove(uid, version)
        return affected | {*self.work_keys()} if restored else affected

    def _stores(self) -> Iterator[Store[Any, Any]]:
        yield from (self.pools, self.pods, self.revisions, self.budgets, self.children)
        yield from (self.pull_jobs, self.pull_pods)
        if self.nodes is not None:
            yield self.nodes

    def remove_deleted(self, body: Body) -> set[WorkKey]:
        """Remove an object for which a watch sent DELETED.

        A watch with a selector also sends that when an object's labels stop matching. Such an
        object may come back, hence the version.
        """
        return self.remove(body["metadata"]["uid"], version_of(body))

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
                self.storage.pop(key, None)
        work_keys = self._work(keys, is_routed_anew=True)
        work_keys |= self.pull_jobs.remove(uid, version) | self.pull_pods.remove(uid, version)
        return work_keys | self.children.remove(uid, version) | self._sets(pool_keys)

    def _put(
        self, store: Store[PoolKey, Any], body: Body, value: Any, listed_at: int | None
    ) -> set[WorkKey]:
        return self._sets(self._keep(store, body, pool_key_of(body), value, listed_at))

    @staticmethod
    def _keep(store: Store[K, Any], body: Body, key: K, value: Any, at: int | None) -> set[K]:
        uid, version, scope = body["metadata"]["uid"], version_of(body), scope_of(body)
        return store.put(uid, version, (key,), value, scope=scope, listed_at=at)

    def _work(self, keys: set[PoolKey | WorkKey], *, is_routed_anew: bool) -> set[WorkKey]:
        """What a change of a pool, indexed under `keys`, affects."""
        work = {key for key in keys if not isinstance(key, PoolKey)}
        if not is_routed_anew:
            return {key for key in work if isinstance(key, SetKey)}
        if not any(isinstance(key, PoolKey) and key.kind == PREFILL_POOL for key in keys):
            return work
        # DecodePools inherit from the PrefillPool, and cannot be read without it.
        members = (pool for key in work for pool in self.pools.by_key(key))
        return work | {endpoint_of(pool) for pool in members if pool.key.kind == DECODE_POOL}

    def _all_sets(self) -> set[WorkKey]:
        return {key for key in self.work_keys() if isinstance(key, SetKey)}

    def _sets(self, pools: Iterable[PoolKey]) -> set[WorkKey]:
        return {set_key(resource.body) for pool in pools for resource in self.pools.by_key(pool)}


def _values(store: Store[K, Any], keys: Iterable[K]) -> Iterable[Any]:
    return (value for key in keys for value in store.by_key(key))


def _sorted_by_name(store: Store[K, Any], keys: Iterable[K]) -> Iterable[Any]:
    """Sorted, so that a snapshot does not depend on the order in which events arrived."""
    return sorted(_values(store, keys), key=lambda value: value.name)
