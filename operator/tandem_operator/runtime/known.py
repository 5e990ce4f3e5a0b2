"""What the operator knows of the cluster: small values by set and by endpoint. No I/O.

    see(kind, body), lose(kind, body)   ◄── watches, answers to our own writes
    observe(key), observe_endpoint(key) ──► what planning is given

`see` and `lose` return the keys whose loops have something to look at.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

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
from ..routing.router_observed import ApiKind, EndpointPool, ObservedEndpoint, Ref, UnreadPool
from .store import Store

_KIND_OF_ROLE: Final[Mapping[str, Kind]] = {Role.PREFILL.value: PREFILL_POOL}

WorkKey = SetKey | EndpointKey
"""What a loop works on."""


class Known:
    """Every object the operator cares about, as last seen."""

    def __init__(
        self,
        *,
        nodes: bool,
        kinds: frozenset[ApiKind] = frozenset(),
        defaults: Defaults = DEFAULTS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.pools: Store[PoolKey | WorkKey, PoolResource] = Store()
        self.pods: Store[PoolKey, PodState] = Store()
        self.revisions: Store[PoolKey, RevisionState] = Store()
        self.budgets: Store[PoolKey, Body] = Store()
        self.children: Store[EndpointKey, Body] = Store()
        self.nodes: Store[None, NodeState] | None = Store() if nodes else None
        """None when they may not be read."""
        self.kinds = kinds
        """Optional kinds that the cluster has."""
        self.failures: dict[PoolKey, Failure] = {}
        self.child_failures: dict[EndpointKey, Mapping[Ref, Failure]] = {}
        self.transports: dict[PoolKey, float] = {}
        """KV bytes that a DecodePool's engines have pulled."""
        self._routers: dict[EndpointKey, RouterState] = {}
        self._defaults = defaults
        self._clock = clock

    def keys(self) -> list[WorkKey]:
        """Every set and endpoint there is."""
        return [key for key in self.pools.all_keys() if not isinstance(key, PoolKey)]

    def observe(self, key: SetKey) -> Observed:
        """The set as known now."""
        members = sorted(self.pools.of(key), key=lambda pool: pool.key)
        prefill = next((pool for pool in members if pool.key.kind == PREFILL_POOL), None)
        decodes = tuple(pool for pool in members if pool.key.kind == DECODE_POOL)
        pools = self.pool_keys(key)
        return Observed(
            key=key,
            now=self._clock(),
            prefill=prefill,
            decodes=decodes,
            pods=tuple(_by_name(self.pods, pools)),
            revisions=tuple(_by_name(self.revisions, pools)),
            budgets=tuple(_each(self.budgets, pools)),
            nodes=None if self.nodes is None else tuple(self.nodes.values()),
            routers={
                endpoint.name: self._routers[endpoint]
                for endpoint in map(endpoint_of, decodes)
                if endpoint in self._routers
            },
            transports={
                pool.key.name: self.transports[pool.key]
                for pool in decodes
                if pool.key in self.transports
            },
            failures={pool: self.failures[pool] for pool in pools if pool in self.failures},
        )

    def pool_keys(self, key: SetKey) -> tuple[PoolKey, ...]:
        """The pools of a set; the PrefillPool it is called after even when it does not exist."""
        named = PoolKey(key.namespace, key.kind, key.name)
        return tuple(sorted({named, *(pool.key for pool in self.pools.of(key))}))

    def observe_endpoint(self, key: EndpointKey, secret: bytes) -> ObservedEndpoint:
        """The endpoint as known now; `secret` is the plan key to add, should one be due."""
        pools, unread = [], []
        for resource in sorted(self.pools.of(key), key=lambda pool: pool.key):
            if resource.deleting:
                continue
            pool = self._read(resource)
            if pool is None:
                unread.append(UnreadPool(resource.uid, resource.key.name))
            else:
                pools.append(EndpointPool(resource.uid, pool))
        return ObservedEndpoint(
            key=key,
            now=self._clock(),
            pools=tuple(pools),
            unread=tuple(unread),
            children={ref_of(body): body for body in self.children.of(key)},
            kinds=self.kinds,
            secret=secret,
            failures=self.child_failures.get(key, {}),
        )

    def _read(self, resource: PoolResource) -> DecodePool | None:
        """The DecodePool with what it inherits; None when it cannot be read."""
        above = self.pools.of(set_key(resource.body))
        prefill = next((pool.body for pool in above if pool.key.kind == PREFILL_POOL), None)
        reading = validate_set(prefill, [resource.body], self._defaults).decodes[resource.key.name]
        return reading.pool if isinstance(reading.pool, DecodePool) else None

    def routed(self, key: EndpointKey, state: RouterState) -> set[SetKey]:
        """Remember an endpoint's state; the sets whose pools say it in their status."""
        if self._routers.get(key) == state:
            return set()
        self._routers[key] = state
        return {set_key(pool.body) for pool in self.pools.of(key)}

    def moved(self, pool: PoolKey, total: float) -> set[SetKey]:
        """Remember how many KV bytes a DecodePool's pods pulled; the sets that say so."""
        if self.transports.get(pool) == total:
            return set()
        self.transports[pool] = total
        return {set_key(resource.body) for resource in self.pools.of(pool)}

    def pod_counts(self) -> Iterable[tuple[str, str, str, str, int]]:
        """Namespace, pool, role, state and number of pods, for the metrics."""
        for key in self.pods.all_keys():
            counts = Counter((pod.role, _state(pod)) for pod in self.pods.of(key))
            for (role, state), count in counts.items():
                yield key.namespace, key.name, role, state, count

    def see_pool(self, body: Body) -> set[WorkKey]:
        resource = pool_resource(_lean(body))
        keys: tuple[PoolKey | WorkKey, ...] = (resource.key, set_key(resource.body))
        if resource.key.kind == DECODE_POOL:
            keys += (endpoint_of(resource),)
        changed = self.pools.put(resource.uid, _version(body), keys, resource)
        return {key for key in changed if not isinstance(key, PoolKey)}

    def see_pod(self, body: Body) -> set[WorkKey]:
        return self._put(self.pods, body, pod_state(body))

    def see_revision(self, body: Body) -> set[WorkKey]:
        revision = revision_state(body)
        return self._put(self.revisions, body, revision) if revision is not None else set()

    def see_budget(self, body: Body) -> set[WorkKey]:
        return self._put(self.budgets, body, _lean(body, "status"))

    def see_child(self, body: Body) -> set[WorkKey]:
        metadata = body["metadata"]
        key = EndpointKey(metadata["namespace"], metadata["labels"][labels.ENDPOINT])
        return set(self.children.put(metadata["uid"], _version(body), (key,), _lean(body)))

    def see_node(self, body: Body) -> set[WorkKey]:
        if self.nodes is None:
            return set()
        uid = body["metadata"]["uid"]
        changed = self.nodes.put(uid, _version(body), (None,), node_state(body))
        return self._all_sets() if changed else set()

    def uids(self) -> set[str]:
        """Of everything that is known."""
        stores = (self.pools, self.pods, self.revisions, self.budgets, self.children, self.nodes)
        return {uid for store in stores if store is not None for uid in store.uids()}

    def leave(self, body: Body) -> set[WorkKey]:
        """A watch says that an object is deleted, or that its labels left the selector; those may
        come back."""
        return self.lose(body["metadata"]["uid"], _version(body))

    def lose(self, uid: str, version: float = math.inf) -> set[WorkKey]:
        """An object is deleted."""
        keys = self.pools.drop(uid, version)
        by_pool = self.pods.drop(uid, version) | self.revisions.drop(uid, version)
        by_pool |= self.budgets.drop(uid, version)
        if self.nodes is not None and self.nodes.drop(uid, version):
            return self._all_sets()
        for key in keys:
            if isinstance(key, PoolKey):
                self.failures.pop(key, None)
                self.transports.pop(key, None)
        found = {key for key in keys if not isinstance(key, PoolKey)} | self.children.drop(
            uid, version
        )
        return found | self._sets(by_pool)

    def _put(self, store: Store[PoolKey, Any], body: Body, value: Any) -> set[WorkKey]:
        key = pool_key_of(body)
        return self._sets(store.put(body["metadata"]["uid"], _version(body), (key,), value))

    def _all_sets(self) -> set[WorkKey]:
        return {key for key in self.keys() if isinstance(key, SetKey)}

    def _sets(self, pools: Iterable[PoolKey]) -> set[WorkKey]:
        return {set_key(resource.body) for pool in pools for resource in self.pools.of(pool)}


def endpoint_of(pool: PoolResource) -> EndpointKey:
    """The endpoint a DecodePool serves behind: its own name unless it says another."""
    name = _field(pool.body, "spec", "routing", "endpoint")
    return EndpointKey(pool.key.namespace, name or pool.key.name)


def pool_key_of(body: Body) -> PoolKey:
    """The pool whose labels an object carries."""
    metadata = body["metadata"]
    marks = metadata.get("labels") or {}
    kind: Kind = DECODE_POOL
    if marks.get(labels.ROLE) == Role.PREFILL:
        kind = PREFILL_POOL
    return PoolKey(metadata["namespace"], kind, marks.get(labels.POOL, ""))


def ref_of(body: Body) -> Ref:
    return Ref(body["apiVersion"], body["kind"], body["metadata"]["name"])


def _state(pod: PodState) -> str:
    if pod.leaving:
        return "draining"
    if pod.over:
        return "failed"
    return "ready" if pod.ready else "pending"


def _field(body: Body, *path: str) -> str | None:
    """Text at `path`; None when it or anything above it is missing or of another type."""
    value: Any = body
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) and value else None


def _each(store: Store[PoolKey, Any], keys: Iterable[PoolKey]) -> Iterable[Any]:
    return (value for key in keys for value in store.of(key))


def _by_name(store: Store[PoolKey, Any], keys: Iterable[PoolKey]) -> Iterable[Any]:
    """In an order that does not change with the order in which events came."""
    return sorted(_each(store, keys), key=lambda value: value.name)


def _version(body: Body) -> int:
    """Kubernetes promises since 1.35 what etcd always gave: versions are numbers that grow."""
    return int(body["metadata"]["resourceVersion"])


def _lean(body: Body, *without: str) -> Body:
    """The object without what nobody here reads and everybody changes."""
    dropped = ("managedFields", "resourceVersion")
    metadata = {k: v for k, v in body["metadata"].items() if k not in dropped}
    return {**{k: v for k, v in body.items() if k not in without}, "metadata": metadata}
