"""Rollouts in a cluster without a spare accelerator, and the requests of pods."""

from typing import Any

import pytest

from tandem_operator.pods.manifests import template
from tandem_operator.resources.resolve import Defaults

from .pool_yaml import DECODE, PREFILL, pair
from .simulated_cluster import SimulatedCluster, named, revisions, settled

WORDS = "Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu."


def run_with_accelerators(cluster: SimulatedCluster, accelerators: int) -> None:
    """Reconcile for 1000 seconds; pods beyond the accelerators stay unscheduled."""
    for _ in range(100):
        cluster.reconcile()
        for pod in list(cluster.pods.values()):
            if pod.deleting:
                cluster.remove_pod(pod.name)
        running = len([pod for pod in cluster.pods.values() if pod.scheduled])
        for pod in sorted(cluster.pods.values(), key=lambda pod: pod.created):
            if not pod.scheduled and running < accelerators:
                cluster.make_ready(pod.name)
                running += 1
            elif not pod.scheduled:
                cluster._change(pod.name, trouble=WORDS)
        cluster.now += 10


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_a_rollout_completes_on_a_full_cluster(replicas: int) -> None:
    cluster = settled(PREFILL, named(DECODE, "d", replicas=replicas))
    cluster.edit("DecodePool", "d", engine={"maxNumSeqs": 3})
    run_with_accelerators(cluster, replicas + 1)
    assert cluster.condition("d", "Progressing")["reason"] == "Complete"
    assert len(set(revisions(cluster, "d"))) == 1


def test_a_single_replica_that_stalls_names_the_field() -> None:
    rollout = {"progressDeadline": "5m"}
    cluster = settled(PREFILL, named(DECODE, "d", replicas=1, rollout=rollout))
    (old,) = cluster.of("d")
    cluster.edit("DecodePool", "d", engine={"maxNumSeqs": 3})
    run_with_accelerators(cluster, 2)
    assert cluster.pods[old.name].ready
    stalled = cluster.condition("d", "Stalled")
    assert stalled["status"] == "True"
    assert "rollout.maxSurge: 0" in stalled["message"]
    cluster.edit("DecodePool", "d", rollout={"maxSurge": 0, "maxUnavailable": 1})
    run_with_accelerators(cluster, 2)
    assert cluster.condition("d", "Progressing")["reason"] == "Complete"


def requests_of(kind: str, **spec: Any) -> dict[str, Any]:
    """Requests by container, of the pods of a DecodePool with this spec."""
    (pool_set,) = pair({}, spec)
    pod = template(pool_set.decodes[0], Defaults(vllm_version="0.32.0"))["spec"]
    listed = [*pod["initContainers"], *pod["containers"]]
    container = next(entry for entry in listed if entry["name"] == kind)
    requests: dict[str, Any] = container["resources"]["requests"]
    return requests


def test_engine_and_sidecar_have_requests_unless_the_user_states_them() -> None:
    assert requests_of("sidecar") == {"cpu": "100m", "memory": "96Mi"}
    assert requests_of("engine") == {"cpu": "1", "memory": "4Gi"}
    assert requests_of("sidecar", accelerator={"count": 0})["cpu"] == "50m"
    stated = {"resources": {"requests": {"cpu": 8}, "limits": {"memory": "1Gi"}}}
    assert requests_of("engine", engine=stated) == {"cpu": 8}
    own = {"name": "sidecar", "resources": {"limits": {"memory": "50Mi"}}}
    part = {"spec": {"initContainers": [own]}}
    assert requests_of("sidecar", template=part) == {"cpu": "100m"}
