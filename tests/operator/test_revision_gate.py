"""Pools of a set that roll together, wait for each other, or need no peer."""

from dataclasses import replace

from tandem_contract import labels
from tandem_operator.planning.revision_gate import Member, blocked_by
from tandem_operator.resources.resolve import Defaults

from .pool_yaml import DECODE, PREFILL, decode_pool, prefill_pool
from .simulated_cluster import UNIFIED, SimulatedCluster, named, revisions, settled


def test_a_newer_operator_restarts_no_pod_until_a_user_asks() -> None:
    cluster = settled()
    before = set(cluster.pods)
    cluster.defaults = Defaults(vllm_version="0.31.0")
    cluster.settle()
    assert set(cluster.pods) == before
    assert cluster.condition("d", "UpdateAvailable")["reason"] == "NewerTemplate"
    cluster.annotate("PrefillPool", "p", **{labels.RESTARTED_AT: "2026-01-01"})
    cluster.settle()
    assert not set(cluster.pods) & before, "the other side has to come along"
    assert len({pod.compat for pod in cluster.pods.values()}) == 1
    assert cluster.condition("d", "UpdateAvailable")["status"] == "False"
    assert cluster.condition("d", "Ready")["status"] == "False"  # no router in this cluster
    assert cluster.condition("p", "Ready", "PrefillPool")["status"] == "True"


def test_the_pools_of_a_set_change_their_model_together() -> None:
    cluster = settled(prefill_pool(replicas=2), DECODE)
    old = cluster.of("p")[0].compat
    cluster.edit("PrefillPool", "p", model={"name": "org/other"})
    seen_new_decode = False
    for _ in range(30):
        cluster.reconcile()
        pairs = {
            pod.compat
            for pod in cluster.of("p", deleting=False)
            if pod.ready and cluster.of("d", compat=pod.compat, deleting=False)
        }
        olds = [pod for pod in cluster.of("d", deleting=False) if pod.compat == old]
        if olds:
            assert old in pairs, "an old decode pod lost its last prefill pod"
        seen_new_decode |= any(pod.compat != old for pod in cluster.of("d"))
        cluster.kubelets()
        cluster.now += 1
    assert seen_new_decode
    assert {pod.compat for pod in cluster.pods.values()} != {old}
    assert len({pod.compat for pod in cluster.pods.values()}) == 1
    assert len(cluster.of("p")) == 2


def test_no_old_pod_is_removed_before_every_pool_has_a_ready_new_one() -> None:
    surge = {"maxSurge": 1, "maxUnavailable": 0}
    cluster = settled(PREFILL, named(DECODE, "d", rollout=surge))
    old = set(cluster.pods)
    cluster.edit("PrefillPool", "p", model={"name": "org/other"})
    cluster.reconcile()
    for pod in cluster.of("p", ready=False):
        cluster.make_ready(pod.name)
    for _ in range(3):
        cluster.reconcile()
        assert {n for n in old if not cluster.pods[n].leaving} == old
    for pod in cluster.of("d", ready=False):
        cluster.make_ready(pod.name)
    assert not cluster.reconcile().delete_pods, "ready is not yet available"
    cluster.now += 10
    plan = cluster.reconcile()
    assert [deleted.name[0] for deleted in plan.delete_pods] == ["d"]


def test_a_pair_of_single_pods_rolls_without_surge() -> None:
    rollout = {"maxSurge": 0, "maxUnavailable": 1}
    cluster = settled(prefill_pool(rollout=rollout), decode_pool(replicas=1, rollout=rollout))
    cluster.edit("PrefillPool", "p", model={"name": "org/other"})
    cluster.settle()
    assert len({pod.compat for pod in cluster.pods.values()}) == 1
    assert cluster.status("p", "PrefillPool")["currentRevision"] == cluster.of("p")[0].revision


def test_a_change_outside_the_compat_hash_rolls_one_pool() -> None:
    cluster = settled()
    (before,) = cluster.of("p")
    cluster.edit("DecodePool", "d", engine={"maxNumSeqs": 7})
    cluster.settle()
    assert cluster.of("p") == [before]
    assert len(set(revisions(cluster, "d"))) == 1


def test_a_mismatch_holds_a_running_pool_and_its_peers() -> None:
    cluster = settled()
    before = set(cluster.pods)
    cluster.edit("DecodePool", "d", engine={"dtype": "float16"})
    cluster.settle()
    assert set(cluster.pods) == before
    compatible = cluster.condition("d", "Compatible")
    assert compatible["status"] == "False"
    assert 'engine.dtype is "float16" here and "auto" in PrefillPool p' in compatible["message"]
    cluster.edit("PrefillPool", "p", engine={"dtype": "bfloat16"})
    cluster.settle()
    assert set(cluster.pods) == before
    waiting = cluster.condition("p", "Progressing", "PrefillPool")
    assert waiting["reason"] == "WaitingForPeer"
    assert "DecodePool d does not agree" in waiting["message"]
    cluster.edit("PrefillPool", "p", engine={"dtype": "float16"})
    cluster.settle()
    assert not set(cluster.pods) & before
    assert cluster.condition("d", "Compatible")["status"] == "True"


def test_a_new_pool_with_a_mismatch_gets_no_pods_and_blocks_no_other() -> None:
    cluster = settled(PREFILL, DECODE)
    cluster.apply_pool(named(DECODE, "e", engine={"blockSize": 64}))
    cluster.edit("PrefillPool", "p", model={"name": "org/other"})
    cluster.settle()
    assert cluster.of("e") == []
    assert cluster.condition("e", "Compatible")["reason"] == "Mismatch"
    assert cluster.condition("p", "Progressing", "PrefillPool")["reason"] == "Complete"
    assert cluster.status("p", "PrefillPool")["model"] == "org/other"


def test_a_paused_pool_keeps_its_revision_and_replaces_lost_pods() -> None:
    cluster = settled()
    before = set(cluster.pods)
    cluster.edit("DecodePool", "d", paused=True, engine={"maxNumSeqs": 7})
    cluster.remove_pod(cluster.of("d")[0].name)
    cluster.settle()
    assert set(cluster.pods) == before
    assert cluster.condition("d", "Progressing")["reason"] == "Paused"
    cluster.edit("DecodePool", "d", paused=True, replicas=3)
    cluster.settle()
    assert len(set(revisions(cluster, "d"))) == 1
    assert len(cluster.of("d")) == 3
    cluster.edit("PrefillPool", "p", model={"name": "org/other"})
    cluster.settle()
    message = cluster.condition("p", "Progressing", "PrefillPool")["message"]
    assert "DecodePool d is paused" in message
    cluster.edit("DecodePool", "d", paused=False)
    cluster.settle()
    assert len({pod.compat for pod in cluster.pods.values()}) == 1


def test_decode_pods_outlive_their_prefill_pool() -> None:
    cluster = settled()
    before = {pod.name for pod in cluster.of("d")}
    del cluster.objects["PrefillPool", "p"]
    cluster.remove_pod(cluster.of("p")[0].name)
    cluster.remove_pod(sorted(before)[0])
    cluster.settle()
    assert {pod.name for pod in cluster.of("d")} == before
    assert cluster.condition("d", "PeerReady")["reason"] == "PeerMissing"
    assert cluster.condition("d", "Stalled")["status"] == "False"


def test_a_decode_pool_waits_for_a_prefill_pool_that_does_not_exist() -> None:
    cluster = SimulatedCluster(DECODE)
    assert cluster.reconcile().writes == 0
    assert "there is no PrefillPool p" in cluster.condition("d", "Ready")["message"]
    cluster.apply_pool(PREFILL)
    cluster.settle()
    assert len(cluster.pods) == 3


def test_a_unified_pool_needs_no_peer() -> None:
    cluster = settled(UNIFIED)
    assert len(cluster.of("u", role="unified")) == 2
    cluster.edit("DecodePool", "u", model={"name": "org/other"})
    cluster.settle()
    assert len(cluster.of("u")) == 2
    assert cluster.condition("u", "Compatible")["reason"] == "Alone"
    assert "PeerReady" not in {c["type"] for c in cluster.status("u")["conditions"]}


def test_only_a_pool_that_moves_waits_for_those_that_keep_the_shared_hash() -> None:
    cluster = settled()

    def paused(pool: str) -> Member:
        pods = tuple(cluster.of(pool))
        return Member(pool, pool == "p", 1, pods, pods, target=None, hold_reason="is paused")

    prefill, decode = paused("p"), paused("d")
    assert blocked_by(prefill, [prefill, decode]) == ()
    moving = replace(prefill, target="other")
    assert blocked_by(moving, [moving, decode]) == ("d is paused",)
