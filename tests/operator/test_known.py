from typing import Any

import pytest

from tandem_contract import labels
from tandem_operator.observed import EndpointKey, Failure, PoolKey, RouterState, SetKey
from tandem_operator.runtime.known import Known

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
def known() -> Known:
    made = Known(nodes=False, clock=lambda: 1000.0)
    made.see_pool(prefill())
    made.see_pool(decode())
    return made


def test_a_set_is_its_pools_and_all_that_carries_their_labels(known: Known) -> None:
    known.see_pod(pod("d-1", "d", "decode"))
    known.see_pod(pod("d-0", "d", "decode"))
    known.see_pod(pod("p-0", "p", "prefill"))
    known.see_pod(pod("x-0", "x", "decode"))
    # A DecodePool may have a PrefillPool's name; its pods are another set's.
    known.see_pod(pod("p-d-0", "p", "decode"))
    known.failures[DECODE] = Failure("QuotaExceeded", "full")
    found = known.observe(SET)
    assert found.prefill is not None
    assert [pool.key.name for pool in found.decodes] == ["d"]
    assert [one.name for one in found.pods] == ["d-0", "d-1", "p-0"]
    assert found.failures == {DECODE: Failure("QuotaExceeded", "full")}
    assert found.nodes is None
    assert found.now == 1000.0


def test_keys_are_what_there_is_to_work_on(known: Known) -> None:
    assert set(known.keys()) == {SET, ENDPOINT}
    assert known.pool_keys(SET) == (DECODE, PREFILL)
    assert known.pool_keys(SetKey("n", "nobody")) == (PoolKey("n", "PrefillPool", "nobody"),)


def test_only_what_matters_is_a_change(known: Known) -> None:
    assert known.see_pool(prefill(2)) == set()
    assert known.see_pool(prefill(3, replicas=2)) == {SET}
    assert known.see_pod(pod("p-0", "p", "prefill", 4)) == {SET}
    assert known.see_pod(pod("p-0", "p", "prefill", 5, startTime="now")) == set()
    assert known.see_pod(pod("p-0", "p", "prefill", 6, phase="Running")) == {SET}
    assert known.lose("Pod-p-0") == {SET}
    assert known.lose("Pod-p-0") == set()


def test_a_pool_that_moves_concerns_both_sets_and_both_endpoints(known: Known) -> None:
    moved = decode(2, reference="q", routing={"endpoint": "e"})
    assert known.see_pool(moved) == {SET, SetKey("n", "q"), ENDPOINT, EndpointKey("n", "e")}
    assert known.observe(SET).decodes == ()


@pytest.mark.parametrize("spec", [None, [], "x", {"prefillRef": 3}, {"routing": {"endpoint": []}}])
def test_a_pool_that_cannot_be_read_has_a_set_of_its_own(spec: object) -> None:
    known = Known(nodes=False)
    keys = known.see_pool(body("DecodePool", "d", 1, spec=spec))
    assert ENDPOINT in keys
    (found,) = [key for key in keys if isinstance(key, SetKey)]
    assert known.observe(found).decodes
    assert [one.name for one in known.observe_endpoint(ENDPOINT, b"").unread] == ["d"]


def test_what_the_router_says_concerns_the_sets_of_its_pools(known: Known) -> None:
    state = RouterState(True, "Ready", "", "http://d")
    assert known.routed(ENDPOINT, state) == {SET}
    assert known.routed(ENDPOINT, state) == set()
    assert known.observe(SET).routers == {"d": state}


def test_bytes_that_moved_are_told_once(known: Known) -> None:
    assert known.moved(DECODE, 0.0) == {SET}
    assert known.moved(DECODE, 0.0) == set()
    assert known.moved(DECODE, 7.0) == {SET}
    assert known.observe(SET).transports == {"d": 7.0}
    known.lose("DecodePool-d")
    assert known.transports == {}


def test_a_node_that_comes_or_goes_concerns_every_set() -> None:
    known = Known(nodes=True)
    known.see_pool(prefill())
    node = body("Node", "big", 1, spec={}, status={"allocatable": {"cpu": "8"}})
    assert known.see_node(node) == {SET}
    assert known.lose("Node-big") == {SET}
    assert known.observe(SET).nodes == ()


def test_pods_are_counted_by_state(known: Known) -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}
    known.see_pod(pod("d-0", "d", "decode", **ready))
    known.see_pod(pod("d-1", "d", "decode", phase="Failed"))
    known.see_pod(pod("d-2", "d", "decode"))
    assert set(known.pod_counts()) == {
        ("n", "d", "decode", "ready", 1),
        ("n", "d", "decode", "failed", 1),
        ("n", "d", "decode", "pending", 1),
    }
