from typing import Any

import pytest

from tandem_contract import labels
from tandem_operator.observed import EndpointKey, Failure, PoolKey, RouterState, SetKey
from tandem_operator.runtime.cache import ClusterCache

SET = SetKey("n", "p")
ENDPOINT = EndpointKey("n", "d")
PREFILL = PoolKey("n", "PrefillPool", "p")
DECODE = PoolKey("n", "DecodePool", "d")


def body(kind: str, name: str, version: int, **more: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "n",
        "uid": f"{kind}-{name}",
        "generation": 1,
        "resourceVersion": str(version),
        "managedFields": [version],
        "labels": {},
        **more.pop("metadata", {}),
    }
    return {"apiVersion": labels.API_VERSION, "kind": kind, "metadata": metadata, **more}


def prefill(version: int = 1, **spec: Any) -> dict[str, Any]:
    return body("PrefillPool", "p", version, spec=spec)


def decode(version: int = 1, reference: str = "p", **spec: Any) -> dict[str, Any]:
    return body("DecodePool", "d", version, spec={"prefillRef": {"name": reference}, **spec})


def pod(name: str, pool: str, role: str, version: int = 1, **status: Any) -> dict[str, Any]:
    marks = {"labels": {labels.POOL: pool, labels.ROLE: role}}
    return body("Pod", name, version, metadata=marks, spec={}, status=status)


@pytest.fixture
def cache() -> ClusterCache:
    cluster_cache = ClusterCache(nodes=False, clock=lambda: 1000.0)
    cluster_cache.upsert_pool(prefill())
    cluster_cache.upsert_pool(decode())
    return cluster_cache


def test_observe_returns_the_pools_of_a_set_and_objects_with_their_labels(
    cache: ClusterCache,
) -> None:
    cache.upsert_pod(pod("d-1", "d", "decode"))
    cache.upsert_pod(pod("d-0", "d", "decode"))
    cache.upsert_pod(pod("p-0", "p", "prefill"))
    cache.upsert_pod(pod("x-0", "x", "decode"))
    # A DecodePool may have a PrefillPool's name; its pods are another set's.
    cache.upsert_pod(pod("p-d-0", "p", "decode"))
    cache.failures[DECODE] = Failure("QuotaExceeded", "full")
    observed = cache.observe(SET)
    assert observed.prefill is not None
    assert [pool.key.name for pool in observed.decodes] == ["d"]
    assert [pod_state.name for pod_state in observed.pods] == ["d-0", "d-1", "p-0"]
    assert observed.failures == {DECODE: Failure("QuotaExceeded", "full")}
    assert observed.nodes is None
    assert observed.now == 1000.0


def test_work_keys_are_all_sets_and_endpoints(cache: ClusterCache) -> None:
    assert set(cache.work_keys()) == {SET, ENDPOINT}
    assert cache.pool_keys(SET) == (DECODE, PREFILL)
    assert cache.pool_keys(SetKey("n", "missing")) == (PoolKey("n", "PrefillPool", "missing"),)


def test_only_relevant_changes_affect_a_key(cache: ClusterCache) -> None:
    assert cache.upsert_pool(prefill(2)) == set()
    assert cache.upsert_pool(prefill(3, replicas=2)) == {SET}
    assert cache.upsert_pod(pod("p-0", "p", "prefill", 4)) == {SET}
    assert cache.upsert_pod(pod("p-0", "p", "prefill", 5, startTime="now")) == set()
    assert cache.upsert_pod(pod("p-0", "p", "prefill", 6, phase="Running")) == {SET}
    assert cache.remove("Pod-p-0") == {SET}
    assert cache.remove("Pod-p-0") == set()


def test_a_pool_that_moves_affects_both_sets_and_both_endpoints(cache: ClusterCache) -> None:
    moved = decode(2, reference="q", routing={"endpoint": "e"})
    assert cache.upsert_pool(moved) == {SET, SetKey("n", "q"), ENDPOINT, EndpointKey("n", "e")}
    assert cache.observe(SET).decodes == ()


def test_a_prefill_pool_affects_the_endpoints_of_decode_pools_that_inherit_from_it() -> None:
    cache = ClusterCache(nodes=False)
    cache.upsert_pool(decode())
    assert cache.upsert_pool(prefill()) == {SET, ENDPOINT}
    assert cache.upsert_pool({**prefill(2), "status": {"readyReplicas": 1}}) == {SET}
    edited = {**prefill(3, model={"name": "m"})}
    edited["metadata"]["generation"] = 2
    assert cache.upsert_pool(edited) == {SET, ENDPOINT}
    assert cache.remove("PrefillPool-p") == {SET, ENDPOINT}


def test_a_pools_status_and_size_affect_its_set_alone(cache: ClusterCache) -> None:
    assert cache.upsert_pool({**decode(2), "status": {"readyReplicas": 1}}) == {SET}
    scaled = decode(3, replicas=4)
    scaled["metadata"]["generation"] = 2
    assert cache.upsert_pool(scaled) == {SET}
    edited = {**decode(4, model={"name": "m"}), "status": {"readyReplicas": 2}}
    assert cache.upsert_pool(edited) == {SET, ENDPOINT}


@pytest.mark.parametrize("spec", [None, [], "x", {"prefillRef": 3}, {"routing": {"endpoint": []}}])
def test_an_invalid_pool_has_a_set_of_its_own(spec: object) -> None:
    cache = ClusterCache(nodes=False)
    keys = cache.upsert_pool(body("DecodePool", "d", 1, spec=spec))
    assert ENDPOINT in keys
    (set_key,) = [key for key in keys if isinstance(key, SetKey)]
    assert cache.observe(set_key).decodes
    assert [pool.name for pool in cache.observe_endpoint(ENDPOINT, b"").unreadable_pools] == ["d"]


def test_a_router_state_affects_the_sets_of_its_pools(cache: ClusterCache) -> None:
    state = RouterState(True, "Ready", "", "http://d")
    assert cache.set_router_state(ENDPOINT, state) == {SET}
    assert cache.set_router_state(ENDPOINT, state) == set()
    assert cache.observe(SET).routers == {"d": state}


def test_kv_bytes_affect_a_set_only_when_they_change(cache: ClusterCache) -> None:
    assert cache.set_probed(cache.kv_bytes_moved, DECODE, 0.0) == {SET}
    assert cache.set_probed(cache.kv_bytes_moved, DECODE, 0.0) == set()
    assert cache.set_probed(cache.kv_bytes_moved, DECODE, 7.0) == {SET}
    assert cache.observe(SET).kv_bytes_moved == {DECODE: 7.0}
    cache.remove("DecodePool-d")
    assert cache.kv_bytes_moved == {}


@pytest.mark.parametrize(
    ("kind", "expected"), [("Deployment", {ENDPOINT}), ("PodDisruptionBudget", set())]
)
def test_an_endpoint_is_planned_for_the_status_of_its_deployments_alone(
    cache: ClusterCache, kind: str, expected: set[EndpointKey]
) -> None:
    marks = {"labels": {labels.ENDPOINT: "d"}}
    assert cache.upsert_child(body(kind, "d-epp", 1, metadata=marks)) == {ENDPOINT}
    ready = body(kind, "d-epp", 2, metadata=marks, status={"availableReplicas": 1})
    assert cache.upsert_child(ready) == expected


def test_an_endpoint_without_pools_is_planned_while_it_has_objects(cache: ClusterCache) -> None:
    known = {*cache.work_keys()}
    marks = {"labels": {labels.ENDPOINT: "left"}}
    cache.upsert_child(body("Service", "left", 1, metadata=marks))
    assert {*cache.work_keys()} - known == {EndpointKey("n", "left")}
    cache.remove("Service-left")
    assert {*cache.work_keys()} == known


def test_adding_or_removing_a_node_affects_every_set() -> None:
    cache = ClusterCache(nodes=True)
    cache.upsert_pool(prefill())
    node = body("Node", "big", 1, spec={}, status={"allocatable": {"cpu": "8"}})
    assert cache.upsert_node(node) == {SET}
    assert cache.remove("Node-big") == {SET}
    assert cache.observe(SET).nodes == ()


def test_pods_are_counted_by_state(cache: ClusterCache) -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}
    cache.upsert_pod(pod("d-0", "d", "decode", **ready))
    cache.upsert_pod(pod("d-1", "d", "decode", phase="Failed"))
    cache.upsert_pod(pod("d-2", "d", "decode"))
    assert set(cache.pod_counts()) == {
        ("n", "d", "decode", "ready", 1),
        ("n", "d", "decode", "failed", 1),
        ("n", "d", "decode", "pending", 1),
    }
