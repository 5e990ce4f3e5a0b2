"""Reading what an InferencePool selects."""

from typing import Any

import pytest

from tandem_epp.backends.inference_pool import InvalidPool, PoolPods, PoolReference, pool_pods


def pool(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "n"}, "spec": spec}


SELECTOR = {"matchLabels": {"b": "2", "a": "1"}}


def test_a_pool_of_v1() -> None:
    body = pool(
        selector=SELECTOR, targetPorts=[{"number": 8000}, {"number": 8001}], appProtocol="http"
    )
    assert pool_pods(body) == PoolPods("a=1,b=2", (8000, 8001))


def test_a_pool_whose_pods_speak_http2() -> None:
    body = pool(selector=SELECTOR, targetPorts=[{"number": 8000}], appProtocol="kubernetes.io/h2c")
    assert pool_pods(body) == PoolPods("a=1,b=2", (8000,), http2=True)


def test_a_pool_of_the_older_group() -> None:
    body = pool(selector={"app": "vllm"}, targetPortNumber=8000)
    assert pool_pods(body) == PoolPods("app=vllm", (8000,))


def test_a_pool_that_is_being_deleted_selects_nothing() -> None:
    body = pool(selector=SELECTOR, targetPorts=[{"number": 8000}])
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert pool_pods(body) is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"selector": SELECTOR, "targetPorts": [{"number": 0}]}, "spec.targetPorts"),
        ({"selector": SELECTOR}, "spec.targetPorts"),
        ({"selector": {"matchLabels": {}}, "targetPorts": [{"number": 1}]}, "spec.selector"),
        ({"targetPortNumber": 8000}, "spec.selector"),
    ],
)
def test_a_pool_that_cannot_be_served_says_why(spec: dict[str, Any], reason: str) -> None:
    invalid = pool_pods(pool(**spec))
    assert isinstance(invalid, InvalidPool)
    assert reason in invalid.reason


def test_the_version_follows_from_the_group() -> None:
    paths = {
        PoolReference("n", "p").resource.path("n"),
        PoolReference("n", "p", "inference.networking.x-k8s.io").resource.path("n"),
    }
    assert paths == {
        "/apis/inference.networking.k8s.io/v1/namespaces/n/inferencepools",
        "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/n/inferencepools",
    }
