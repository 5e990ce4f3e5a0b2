"""Reading a backend from a pod's labels, annotations and status."""

from typing import Any

import pytest

from tandem_contract import labels
from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_epp.backends.pod_backend import InvalidPod, pod_backends, with_domain
from tandem_epp.backends.pods import DiscoveredBackend


def pod(
    ready: str = "True",
    address: str | None = "10.0.0.1",
    phase: str = "Running",
    annotations: dict[str, str] | None = None,
    deleting: bool = False,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "x-0", "namespace": "n", "uid": "u1"}
    if annotations:
        metadata["annotations"] = annotations
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]
    status: dict[str, Any] = {"phase": phase, "conditions": conditions}
    if address:
        status["podIP"] = address
    return {"metadata": metadata, "status": status}


def parsed(body: dict[str, Any]) -> DiscoveredBackend:
    backends = pod_backends(body, (8000,))
    assert isinstance(backends, tuple)
    (backend,) = backends
    return backend


def test_a_pod_without_labels_is_unified_and_serves_any_model() -> None:
    backend = Backend("x-0", "http://10.0.0.1:8000")
    assert parsed(pod()) == DiscoveredBackend(backend, "u1", serving=True)


def test_a_pod_of_the_operator() -> None:
    body = pod(annotations={labels.SERVED_MODELS: '["org/m", "m"]'})
    body["metadata"]["labels"] = {
        labels.ROLE: "decode",
        labels.LLMD_ROLE: "both",
        labels.MODEL: "org-m",
        labels.KV_COMPAT: "abc",
    }
    backend = parsed(body).backend
    assert (backend.role, backend.models, backend.compat) == (Role.DECODE, ("org/m", "m"), "abc")


@pytest.mark.parametrize(
    ("written", "role"),
    [
        ("prefill", Role.PREFILL),
        ("decode", Role.DECODE),
        ("unified", Role.UNIFIED),
        ("both", Role.UNIFIED),
        ("prefill-decode", Role.UNIFIED),
        ("encode-prefill", Role.PREFILL),
    ],
)
@pytest.mark.parametrize("key", [labels.ROLE, labels.LLMD_ROLE])
def test_roles_of_both_labels(key: str, written: str, role: Role) -> None:
    body = pod()
    body["metadata"]["labels"] = {key: written}
    assert parsed(body).backend.role is role


def test_labels_tell_the_node_and_what_it_was_selected_by() -> None:
    body = pod()
    body["metadata"]["labels"] = {"tier": "a", "zone": "own"}
    body["spec"] = {"nodeName": "n1", "nodeSelector": {"zone": "z1", "gpu": "h100"}}
    found = parsed(body).backend.labels
    assert found == {labels.HOSTNAME: "n1", "zone": "own", "gpu": "h100", "tier": "a"}
    body["metadata"]["labels"][labels.HOSTNAME] = "h"
    assert parsed(body).backend.labels[labels.HOSTNAME] == "h"


def test_port_and_model_of_pods_without_the_operator() -> None:
    body = pod(annotations={labels.TARGET_PORT: "8080"}, address="fd00::1")
    body["metadata"]["labels"] = {labels.MODEL: "m"}
    backend = parsed(body).backend
    assert (backend.url, backend.models) == ("http://[fd00::1]:8080", ("m",))


@pytest.mark.parametrize(
    ("body", "serving"),
    [
        (pod(), True),
        (pod(ready="False"), False),
        (pod(deleting=True), False),
    ],
)
def test_a_pod_serves_while_it_is_ready_and_not_being_deleted(
    body: dict[str, Any], serving: bool
) -> None:
    assert parsed(body).serving is serving


def test_a_draining_pod_does_not_serve() -> None:
    body = pod()
    body["metadata"]["labels"] = {labels.DRAINING: "true"}
    assert not parsed(body).serving


@pytest.mark.parametrize("body", [pod(address=None), pod(phase="Failed"), pod(phase="Succeeded")])
def test_a_pod_without_an_address_or_with_ended_containers_is_no_backend(
    body: dict[str, Any],
) -> None:
    assert pod_backends(body, (8000,)) is None
    assert pod_backends({"metadata": {"name": "x", "uid": "u"}}, (8000,)) is None


@pytest.mark.parametrize(
    ("pod_labels", "annotations", "reason"),
    [
        ({labels.ROLE: "router"}, {}, "label tandem.dev/role: unknown role 'router', use "),
        ({labels.LLMD_ROLE: "encode"}, {}, "label llm-d.ai/role: unknown role 'encode', use "),
        (
            {},
            {labels.TARGET_PORT: "http"},
            "tandem.dev/target-port: 'http' is not a port",
        ),
        ({}, {labels.TARGET_PORT: "70000"}, "'70000' is not a port"),
        ({}, {labels.SERVED_MODELS: "m"}, "served-models: 'm' is not a JSON list of model names"),
        ({}, {labels.SERVED_MODELS: "[1]"}, "is not a JSON list of model names"),
    ],
)
def test_an_invalid_pod_names_the_label_or_annotation(
    pod_labels: dict[str, str], annotations: dict[str, str], reason: str
) -> None:
    body = pod(annotations=annotations)
    body["metadata"]["labels"] = pod_labels
    invalid = pod_backends(body, (8000,))
    assert isinstance(invalid, InvalidPod)
    assert reason in invalid.reason


def test_the_node_and_the_domain() -> None:
    body = pod()
    body["spec"] = {"nodeName": "node-1", "nodeSelector": {"rack": "r1", "gpu": "h100"}}
    body["metadata"]["labels"] = {"zone": "z1"}
    found = parsed(body)
    assert (found.backend.node, found.backend.domain) == ("node-1", None)

    def domain(label: str) -> str | None:
        return with_domain(found, label).backend.domain

    assert domain("zone") == "z1"
    assert domain("rack") == "r1", "all nodes that it selects have it"
    assert domain("other") is None
    body["metadata"]["labels"][labels.FABRIC_DOMAIN] = "island-1"
    assert with_domain(parsed(body), "zone").backend.domain == "island-1"


def test_a_pods_label_comes_before_its_node_selector() -> None:
    body = pod()
    body["spec"] = {"nodeSelector": {"rack": "r1"}}
    body["metadata"]["labels"] = {"rack": "r2"}
    assert with_domain(parsed(body), "rack").backend.domain == "r2"


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, {"x-0-rank-0": 8000, "x-0-rank-1": 8001, "x-0-rank-2": 8002}),
        ({labels.LLMD_ACTIVE_PORTS: "8002, 8000,9"}, {"x-0-rank-0": 8000, "x-0-rank-2": 8002}),
        ({labels.GAIE_ACTIVE_PORTS: "8001"}, {"x-0-rank-1": 8001}),
        (
            {labels.GAIE_ACTIVE_PORTS: "8001", labels.LLMD_ACTIVE_PORTS: "8000"},
            {"x-0-rank-0": 8000},
        ),
        ({labels.LLMD_ACTIVE_PORTS: "9"}, {}),
        ({labels.TARGET_PORT: "8080", labels.LLMD_ACTIVE_PORTS: "8000"}, {"x-0": 8080}),
    ],
)
def test_each_target_port_is_a_backend_of_its_own(
    annotations: dict[str, str], expected: dict[str, int]
) -> None:
    backends = pod_backends(pod(annotations=annotations), (8000, 8001, 8002))
    assert isinstance(backends, tuple)
    assert {b.backend.name: int(b.backend.url.rpartition(":")[2]) for b in backends} == expected
    assert {b.uid for b in backends} <= {"u1"}


def test_active_ports_that_are_no_ports_make_the_pod_unusable() -> None:
    invalid = pod_backends(pod(annotations={labels.LLMD_ACTIVE_PORTS: "8000,http"}), (8000,))
    assert isinstance(invalid, InvalidPod)
    assert "llm-d.ai/active-ports: 'http' is not a port" in invalid.reason
