"""Pods that fit on no node and the reason, and pods that fit."""

from typing import Any

import pytest

from tandem_operator.observed import NodeState
from tandem_operator.planning.node_fit import no_fit_reason, pod_requests


def node(name: str = "n", **more: Any) -> NodeState:
    allocatable = more.pop("allocatable", {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"})
    return NodeState(name, allocatable, more.pop("labels", {}), **more)


def pod(gpus: int = 1, **spec: Any) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus)}
    return {"containers": [{"name": "engine", "resources": {"limits": limits}}], **spec}


GPU_TAINT = {"key": "gpu", "value": "only", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("spec", "nodes"),
    [
        (pod(4), [node()]),
        ({"containers": [{"name": "engine"}]}, [node(allocatable={})]),
        (pod(), [node(allocatable={}), node("m")]),
        (
            pod(),
            [node(taints=({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},))],
        ),
        (pod(), [node(taints=({"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"},))]),
        (pod(), [node(taints=({"key": "x", "effect": "PreferNoSchedule"},))]),
        (pod(tolerations=[{"operator": "Exists"}]), [node(taints=(GPU_TAINT,))]),
        (pod(tolerations=[{"key": "gpu", "operator": "Exists"}]), [node(taints=(GPU_TAINT,))]),
        (pod(tolerations=[GPU_TAINT]), [node(taints=(GPU_TAINT,))]),
        (pod(nodeSelector={"zone": "a"}), [node(labels={"zone": "a"})]),
    ],
)
def test_pods_that_fit(spec: dict[str, Any], nodes: list[NodeState]) -> None:
    assert no_fit_reason(spec, nodes) is None


@pytest.mark.parametrize(
    ("spec", "nodes", "reason"),
    [
        (pod(8), [node("a"), node("b", allocatable={"nvidia.com/gpu": "2"})],
         "a replica requests nvidia.com/gpu: 8; of the 2 nodes that its selectors and"
         " tolerations admit, the largest, a, has 4"),
        (pod(), [node(allocatable={"cpu": "4"})],
         "a replica requests nvidia.com/gpu: 1, and no node has nvidia.com/gpu"),
        (pod(), [], "there is no node in the cluster"),
        (pod(nodeSelector={"zone": "a"}), [node(labels={"zone": "b"})],
         "no node has the labels zone=a of the node selector"),
        (pod(), [node(taints=(GPU_TAINT,))],
         "every node has a taint that the pods do not tolerate: gpu=only:NoSchedule"),
        (pod(tolerations=[{**GPU_TAINT, "effect": "NoExecute"}]), [node(taints=(GPU_TAINT,))],
         "every node has a taint that the pods do not tolerate: gpu=only:NoSchedule"),
        (pod(tolerations=[{**GPU_TAINT, "value": "x"}]), [node(taints=(GPU_TAINT,))],
         "every node has a taint that the pods do not tolerate: gpu=only:NoSchedule"),
    ],
)  # fmt: skip
def test_pods_that_fit_no_node(spec: dict[str, Any], nodes: list[NodeState], reason: str) -> None:
    assert no_fit_reason(spec, nodes) == reason


def test_resources_that_fit_only_on_different_nodes() -> None:
    spec = pod(2)
    spec["containers"][0]["resources"]["requests"] = {"memory": "100Gi"}
    nodes = [
        node("gpus"),
        node("big", allocatable={"memory": "200Gi"}),
        node("none", allocatable={}),
    ]
    reason = no_fit_reason(spec, nodes)
    assert reason is not None
    assert reason.startswith(
        "a replica requests nvidia.com/gpu: 2, memory: 100Gi, and no node has all"
    )
    assert reason.endswith("gpus comes nearest and lacks memory")


def affinity(*expressions: dict[str, Any]) -> dict[str, Any]:
    terms = {"nodeSelectorTerms": [{"matchExpressions": list(expressions)}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        ({"key": "zone", "operator": "In", "values": ["a"]}, True),
        ({"key": "zone", "operator": "In", "values": ["b"]}, False),
        ({"key": "zone", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "zone", "operator": "Exists"}, True),
        ({"key": "zone", "operator": "DoesNotExist"}, False),
        ({"key": "zone", "operator": "Gt", "values": ["3"]}, True),
    ],
)
def test_required_node_affinity(expression: dict[str, Any], *, fits: bool) -> None:
    spec = pod(affinity=affinity(expression))
    assert (no_fit_reason(spec, [node(labels={"zone": "a"})]) is None) == fits


def test_requests_of_a_pod_with_init_containers_and_sidecars() -> None:
    def container(cpu: str, **more: Any) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}, **more}

    spec = {
        "initContainers": [container("100m", restartPolicy="Always"), container("3")],
        "containers": [container("1"), container("1500m")],
        "overhead": {"cpu": "100m"},
    }
    assert {name: str(amount) for name, amount in pod_requests(spec).items()} == {"cpu": "3.200"}
