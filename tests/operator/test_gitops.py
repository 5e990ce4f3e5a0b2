"""How kstatus (Flux, `kapply`) and Argo CD read a pool's status, in a simulated cluster."""

import re
from pathlib import Path
from typing import Any

import lupa
import pytest

from tandem_operator.observed import Failure, NodeState, PoolKey, RouterState

from .pool_yaml import DECODE, PREFILL
from .simulated_cluster import SimulatedCluster, named

PAGE = Path(__file__).parents[2] / "docs" / "run" / "kubernetes.md"
ROUTER = RouterState(True, "RouterReady", "the router serves", "http://d.default.svc:8080")


def kstatus(pool: dict[str, Any]) -> str:
    """The status that kstatus computes for a custom resource, by its documented rules."""
    status = pool.get("status", {})
    if status.get("observedGeneration", -1) != pool["metadata"]["generation"]:
        return "InProgress"
    # In the order of the list: the first that is True decides.
    for condition in status["conditions"]:
        if condition["status"] == "True" and condition["type"] in ("Reconciling", "Stalled"):
            return "InProgress" if condition["type"] == "Reconciling" else "Failed"
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    return "Current" if ready["status"] == "True" else "InProgress"


def argo_cd(pool: dict[str, Any]) -> str:
    """The health by the check of docs/run/kubernetes.md#argo-cd, run by Lua."""
    (script,) = re.findall(r"```lua\n(.*?)```", PAGE.read_text(), re.DOTALL)
    runtime = lupa.LuaRuntime(unpack_returned_tuples=True)
    runtime.globals().obj = runtime.table_from(pool, recursive=True)
    health = runtime.execute(script)
    assert health.message
    return str(health.status)


def both(cluster: SimulatedCluster, name: str = "d", kind: str = "DecodePool") -> tuple[str, str]:
    pool = cluster.objects[kind, name]
    return kstatus(pool), argo_cd(pool)


def settled(*pools: dict[str, Any]) -> SimulatedCluster:
    cluster = SimulatedCluster(*pools)
    cluster.routers["d"] = ROUTER
    cluster.settle()
    return cluster


def test_a_pool_is_in_progress_until_it_is_complete() -> None:
    cluster = SimulatedCluster()
    cluster.routers["d"] = ROUTER
    assert both(cluster) == ("InProgress", "Progressing")
    cluster.reconcile()
    assert both(cluster) == ("InProgress", "Progressing")
    cluster.kubelets()
    cluster.reconcile()
    assert cluster.condition("d", "Ready")["status"] == "True"
    assert both(cluster) == ("InProgress", "Progressing"), "ready, not yet for minReadySeconds"
    cluster.settle()
    assert both(cluster) == ("Current", "Healthy")


def test_a_rollout_is_in_progress_although_the_pool_is_ready() -> None:
    cluster = settled()
    cluster.edit("DecodePool", "d", engine={"maxNumSeqs": 3})
    assert both(cluster) == ("InProgress", "Progressing"), "the operator has not seen it"
    cluster.reconcile()
    assert cluster.condition("d", "Ready")["status"] == "True"
    assert both(cluster) == ("InProgress", "Progressing")
    cluster.settle()
    assert both(cluster) == ("Current", "Healthy")


@pytest.mark.parametrize("cause", ["no node", "quota"])
def test_scaling_from_zero_fails_only_after_the_deadline(cause: str) -> None:
    cluster = settled(PREFILL, named(DECODE, "d", replicas=0))
    assert both(cluster) == ("Current", "Healthy")
    if cause == "no node":
        cluster.nodes = (NodeState("cpu", {"cpu": "8", "memory": "64Gi"}, {}),)
    else:
        key = PoolKey("default", "DecodePool", "d")
        cluster.failures[key] = Failure("QuotaExceeded", "exceeded quota: gpus")
    cluster.edit("DecodePool", "d", replicas=1)
    for _ in range(3):
        cluster.reconcile()
        assert cluster.condition("d", "Stalled")["status"] == "False"
        assert both(cluster) == ("InProgress", "Progressing")
        cluster.now += 700
    cluster.now += 400
    cluster.reconcile()
    assert both(cluster) == ("Failed", "Degraded")
    # An autoscaler or an administrator provides the room.
    cluster.nodes = None
    cluster.failures.clear()
    cluster.settle()
    assert both(cluster) == ("Current", "Healthy")


def test_an_invalid_spec_fails_at_once_and_a_mismatch_after_the_deadline() -> None:
    cluster = settled()
    cluster.edit("DecodePool", "d", transfer={"requireRdma": True})
    cluster.reconcile()
    assert both(cluster) == ("Failed", "Degraded")
    cluster.edit("DecodePool", "d", transfer=None, engine={"dtype": "float16"})
    cluster.reconcile()
    assert both(cluster) == ("InProgress", "Progressing")
    cluster.now += 2400
    cluster.reconcile()
    assert both(cluster) == ("Failed", "Degraded")
    cluster.edit("PrefillPool", "p", engine={"dtype": "float16"})
    cluster.settle()
    assert both(cluster) == ("Current", "Healthy")


def test_a_paused_pool_is_suspended_for_argo_cd() -> None:
    cluster = settled()
    cluster.edit("DecodePool", "d", paused=True)
    cluster.settle()
    assert both(cluster) == ("Current", "Suspended")


def test_reconciling_and_stalled_are_never_true_together() -> None:
    cluster = SimulatedCluster()
    for _ in range(40):
        cluster.reconcile()
        for name, kind in (("d", "DecodePool"), ("p", "PrefillPool")):
            states = {
                kind_: cluster.condition(name, kind_, kind)["status"]
                for kind_ in ("Reconciling", "Stalled")
            }
            assert set(states.values()) != {"True"}
        cluster.now += 100
