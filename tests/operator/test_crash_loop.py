"""A revision whose pods get ready and then crash, rolled out over one that serves."""

from typing import Any

import pytest

from .pool_yaml import PREFILL
from .simulated_cluster import DECODE, SimulatedCluster, named, revisions, settled

pytestmark = pytest.mark.long

ROLLOUTS = pytest.mark.parametrize(
    "rollout",
    [{"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": 1, "maxUnavailable": 0},
     {"maxSurge": 1, "maxUnavailable": 1}],
)  # fmt: skip


def run_for(cluster: SimulatedCluster, seconds: int, *, bad: str, life: int) -> int:
    """Let time pass. New pods get ready after 2 s; those of revision `bad` crash `life` seconds
    later. Returns the fewest pods that were ready at any moment."""
    fewest = len(cluster.of("d"))
    for _ in range(seconds):
        cluster.reconcile()
        for pod in list(cluster.pods.values()):
            if pod.deleting:
                cluster.remove_pod(pod.name)
            elif pod.active and not pod.ready and cluster.now - pod.created >= 2:
                cluster.make_ready(pod.name)
            elif pod.ready and pod.revision == bad and cluster.now - (pod.ready_since or 0) >= life:
                cluster.fail(pod.name)
        fewest = min(fewest, len([pod for pod in cluster.of("d") if pod.ready]))
        cluster.now += 1
    return fewest


def rolling_out_a_bad_revision(rollout: dict[str, Any]) -> tuple[SimulatedCluster, str, str]:
    """A pool of 4 in which a new revision was just begun: the cluster, old and new revision."""
    limits = {**rollout, "progressDeadline": "10m"}
    cluster = settled(PREFILL, named(DECODE, "d", replicas=4, rollout=limits))
    (old,) = set(revisions(cluster, "d"))
    cluster.edit("DecodePool", "d", engine={"maxNumSeqs": 3})
    cluster.reconcile()
    (new,) = set(revisions(cluster, "d")) - {old}
    return cluster, old, new


@ROLLOUTS
def test_a_revision_that_crashes_once_ready_does_not_walk_through_the_pool(
    rollout: dict[str, Any],
) -> None:
    cluster, old, new = rolling_out_a_bad_revision(rollout)
    fewest = run_for(cluster, 590, bad=new, life=5)
    assert fewest >= 4 - rollout["maxUnavailable"]
    assert cluster.condition("d", "Stalled")["status"] == "False"
    run_for(cluster, 20, bad=new, life=5)
    stalled = cluster.condition("d", "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "ProgressDeadlineExceeded")
    assert "exit code 1" in stalled["message"]
    assert cluster.status("d")["currentRevision"] == old
    # Its pods go on to get ready and to crash, which is no progress.
    run_for(cluster, 2000, bad=new, life=5)
    assert cluster.condition("d", "Stalled")["status"] == "True"
    cluster.edit("DecodePool", "d", engine=None)
    cluster.settle()
    assert set(revisions(cluster, "d")) == {old}
    assert cluster.condition("d", "Stalled")["status"] == "False"


@ROLLOUTS
def test_the_old_revision_comes_back_when_available_pods_of_the_new_one_crash(
    rollout: dict[str, Any],
) -> None:
    cluster, old, new = rolling_out_a_bad_revision(rollout)
    # New pods become available, and older ones make room for the next.
    while len([pod for pod in cluster.of("d", revision=old) if pod.active]) > 2:
        run_for(cluster, 1, bad=new, life=10_000)
    for pod in cluster.of("d", revision=new, ready=True):
        cluster.fail(pod.name)
    run_for(cluster, 30, bad=new, life=5)
    ready = [pod for pod in cluster.of("d", revision=old) if pod.ready]
    assert len(ready) >= 4 - rollout["maxUnavailable"]
    assert cluster.status("d")["currentRevision"] == old


def test_min_ready_seconds_of_the_pool_decides() -> None:
    cluster = settled(PREFILL, named(DECODE, "d", replicas=1, rollout={"minReadySeconds": 60}))
    (old,) = cluster.of("d")
    cluster.edit("DecodePool", "d", engine={"maxNumSeqs": 3})
    cluster.reconcile()
    (new,) = [pod for pod in cluster.of("d") if pod.name != old.name]
    cluster.make_ready(new.name)
    cluster.now += 59
    plan = cluster.reconcile()
    assert (plan.delete_pods, plan.requeue_after) == ((), 1.0)
    assert cluster.status("d")["currentRevision"] == old.revision
    cluster.now += 1
    assert [delete.name for delete in cluster.reconcile().delete_pods] == [old.name]
    assert cluster.status("d")["currentRevision"] == new.revision
