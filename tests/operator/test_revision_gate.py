"""Pools of a set that move together, wait for each other, or stand alone."""

from tandem_contract import labels
from tandem_operator.resources.resolve import Defaults

from .pool_yaml import DECODE, PREFILL, decode_pool, prefill_pool
from .set_world import UNIFIED, World, named, revisions, settled


def test_a_newer_operator_restarts_nothing_until_it_is_asked() -> None:
    world = settled()
    before = set(world.pods)
    world.defaults = Defaults(vllm_version="0.31.0")
    world.settle()
    assert set(world.pods) == before
    assert world.condition("d", "UpdateAvailable")["reason"] == "NewerTemplate"
    world.annotate("PrefillPool", "p", **{labels.RESTARTED_AT: "2026-01-01"})
    world.settle()
    assert not set(world.pods) & before, "the other side has to come along"
    assert len({pod.compat for pod in world.pods.values()}) == 1
    assert world.condition("d", "UpdateAvailable")["status"] == "False"
    assert world.condition("d", "Ready")["status"] == "False"  # no router in this world
    assert world.condition("p", "Ready", "PrefillPool")["status"] == "True"


def test_a_set_changes_its_model_together() -> None:
    world = settled(prefill_pool(replicas=2), DECODE)
    old = world.of("p")[0].compat
    world.edit("PrefillPool", "p", model={"name": "org/other"})
    seen_new_decode = False
    for _ in range(30):
        world.reconcile()
        pairs = {
            pod.compat
            for pod in world.of("p", deleting=False)
            if pod.ready and world.of("d", compat=pod.compat, deleting=False)
        }
        olds = [pod for pod in world.of("d", deleting=False) if pod.compat == old]
        if olds:
            assert old in pairs, "an old decode pod lost its last prefill pod"
        seen_new_decode |= any(pod.compat != old for pod in world.of("d"))
        world.kubelets()
        world.now += 1
    assert seen_new_decode
    assert {pod.compat for pod in world.pods.values()} != {old}
    assert len({pod.compat for pod in world.pods.values()}) == 1
    assert len(world.of("p")) == 2


def test_no_old_pod_leaves_before_every_pool_has_a_new_one_ready() -> None:
    world = settled()
    old = set(world.pods)
    world.edit("PrefillPool", "p", model={"name": "org/other"})
    world.reconcile()
    for pod in world.of("p", ready=False):
        world.make_ready(pod.name)
    for _ in range(3):
        world.reconcile()
        assert {n for n in old if not world.pods[n].leaving} == old
    for pod in world.of("d", ready=False):
        world.make_ready(pod.name)
    plan = world.reconcile()
    assert [one.name[0] for one in plan.delete_pods] == ["d"]


def test_without_surge_a_single_pair_still_changes() -> None:
    rollout = {"maxSurge": 0, "maxUnavailable": 1}
    world = settled(prefill_pool(rollout=rollout), decode_pool(replicas=1, rollout=rollout))
    world.edit("PrefillPool", "p", model={"name": "org/other"})
    world.settle()
    assert len({pod.compat for pod in world.pods.values()}) == 1
    assert world.status("p", "PrefillPool")["currentRevision"] == world.of("p")[0].revision


def test_a_change_outside_the_compat_hash_rolls_alone() -> None:
    world = settled()
    (before,) = world.of("p")
    world.edit("DecodePool", "d", engine={"maxNumSeqs": 7})
    world.settle()
    assert world.of("p") == [before]
    assert len(set(revisions(world, "d"))) == 1


def test_a_contradiction_holds_a_running_pool_and_those_it_pairs_with() -> None:
    world = settled()
    before = set(world.pods)
    world.edit("DecodePool", "d", engine={"dtype": "float16"})
    world.settle()
    assert set(world.pods) == before
    compatible = world.condition("d", "Compatible")
    assert compatible["status"] == "False"
    assert 'engine.dtype is "float16" here and "auto" in PrefillPool p' in compatible["message"]
    world.edit("PrefillPool", "p", engine={"dtype": "bfloat16"})
    world.settle()
    assert set(world.pods) == before
    waiting = world.condition("p", "Progressing", "PrefillPool")
    assert waiting["reason"] == "WaitingForPeer"
    assert "DecodePool d does not agree" in waiting["message"]
    world.edit("PrefillPool", "p", engine={"dtype": "float16"})
    world.settle()
    assert not set(world.pods) & before
    assert world.condition("d", "Compatible")["status"] == "True"


def test_a_new_pool_that_disagrees_gets_no_pods_and_stalls_nobody() -> None:
    world = settled(PREFILL, DECODE)
    world.apply_pool(named(DECODE, "e", engine={"blockSize": 64}))
    world.edit("PrefillPool", "p", model={"name": "org/other"})
    world.settle()
    assert world.of("e") == []
    assert world.condition("e", "Stalled")["reason"] == "Mismatch"
    assert world.condition("p", "Progressing", "PrefillPool")["reason"] == "Complete"
    assert world.status("p", "PrefillPool")["model"] == "org/other"


def test_paused_pods_keep_their_revision_and_lost_ones_come_back() -> None:
    world = settled()
    before = set(world.pods)
    world.edit("DecodePool", "d", paused=True, engine={"maxNumSeqs": 7})
    world.gone(world.of("d")[0].name)
    world.settle()
    assert set(world.pods) == before
    assert world.condition("d", "Progressing")["reason"] == "Paused"
    world.edit("DecodePool", "d", paused=True, replicas=3)
    world.settle()
    assert len(set(revisions(world, "d"))) == 1
    assert len(world.of("d")) == 3
    world.edit("PrefillPool", "p", model={"name": "org/other"})
    world.settle()
    message = world.condition("p", "Progressing", "PrefillPool")["message"]
    assert "DecodePool d is paused" in message
    world.edit("DecodePool", "d", paused=False)
    world.settle()
    assert len({pod.compat for pod in world.pods.values()}) == 1


def test_decode_pods_outlive_their_prefill_pool() -> None:
    world = settled()
    before = {pod.name for pod in world.of("d")}
    del world.objects["PrefillPool", "p"]
    world.gone(world.of("p")[0].name)
    world.gone(sorted(before)[0])
    world.settle()
    assert {pod.name for pod in world.of("d")} == before
    assert world.condition("d", "PeerReady")["reason"] == "PeerMissing"
    assert world.condition("d", "Stalled")["status"] == "False"


def test_a_decode_pool_waits_for_a_prefill_pool_that_does_not_exist() -> None:
    world = World(DECODE)
    assert world.reconcile().writes == 0
    assert "there is no PrefillPool p" in world.condition("d", "Ready")["message"]
    world.apply_pool(PREFILL)
    world.settle()
    assert len(world.pods) == 3


def test_a_unified_pool_alone() -> None:
    world = settled(UNIFIED)
    assert len(world.of("u", role="unified")) == 2
    world.edit("DecodePool", "u", model={"name": "org/other"})
    world.settle()
    assert len(world.of("u")) == 2
    assert world.condition("u", "Compatible")["reason"] == "Alone"
    assert "PeerReady" not in {c["type"] for c in world.status("u")["conditions"]}
