"""A whole set from object to pods: names, revisions, pairs, mishaps, and a process that dies."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract import labels
from tandem_operator.actions import Mode
from tandem_operator.resolve import Defaults

from .full_pools import FULL, paths
from .pool_yaml import DECODE, PREFILL, decode_pool, prefill_pool
from .set_world import World


def named(pool: dict[str, Any], name: str, **spec: Any) -> dict[str, Any]:
    made = copy.deepcopy(pool)
    made["metadata"]["name"] = name
    made["spec"] |= spec
    return made


UNIFIED = named(DECODE, "u", role="unified", model={"name": "org/model"})
del UNIFIED["spec"]["prefillRef"]


def settled(*pools: dict[str, Any]) -> World:
    world = World(*pools)
    world.settle()
    return world


def revisions(world: World, pool: str) -> list[str]:
    return [pod.revision for pod in world.of(pool)]


def test_a_new_set_gets_its_revisions_budget_and_pods_in_one_pass() -> None:
    world = World()
    plan = world.reconcile()
    assert {one.name for one in plan.create_pods} == set(world.pods)
    (p,) = world.of("p")
    d0, d1 = world.of("d")
    assert p.name == f"p-{p.revision}-0"
    assert (d0.name, d1.name) == (f"d-{d0.revision}-0", f"d-{d0.revision}-1")
    assert set(world.revisions) == {f"p-{p.revision}", f"d-{d0.revision}"}
    assert p.compat == d0.compat
    assert {b["spec"]["minAvailable"] for b in world.budgets.values()} == {1}
    body = world.bodies[p.name]
    assert body["metadata"]["ownerReferences"][0]["uid"] == p.owner
    assert body["metadata"]["labels"][labels.endpoint_label("d")] == "prefill"
    assert world.bodies[d0.name]["metadata"]["labels"][labels.endpoint_label("d")] == "decode"


def test_at_rest_nothing_is_written() -> None:
    world = settled()
    before = world.status_writes
    plan = world.reconcile()
    assert (plan.writes, plan.requeue_after, world.status_writes) == (0, None, before)
    assert not plan.touches_pods


def test_a_pods_template_is_the_revisions_and_not_this_operators() -> None:
    world = settled()
    (name,) = [one for one in world.revisions if one.startswith("d-")]
    world.revisions[name]["data"]["spec"]["dnsPolicy"] = "Default"
    world.gone(world.of("d")[0].name)
    (create,) = world.reconcile().create_pods
    assert create.body["spec"]["dnsPolicy"] == "Default"
    assert world.condition("d", "UpdateAvailable")["status"] == "True"


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


def test_scaling_takes_the_highest_index_and_fills_the_lowest() -> None:
    world = settled()
    world.edit("DecodePool", "d", replicas=4)
    world.settle()
    revision = world.of("d")[0].revision
    world.gone(f"d-{revision}-1")
    world.edit("DecodePool", "d", replicas=2)
    world.settle()
    assert [pod.name for pod in world.of("d")] == [f"d-{revision}-0", f"d-{revision}-2"]
    world.edit("DecodePool", "d", replicas=3)
    world.settle()
    assert [pod.name[-1] for pod in world.of("d")] == ["0", "1", "2"]
    assert world.status("d")["readyReplicas"] == 3


def test_a_leaving_pods_index_is_not_used_again_before_it_is_gone() -> None:
    world = settled()
    (pod,) = world.of("p")
    world._delete(pod.name)
    (create,) = world.reconcile().create_pods
    assert create.name.endswith("-1")


def test_to_zero_and_back() -> None:
    world = settled()
    world.edit("DecodePool", "d", replicas=0)
    world.settle()
    assert world.of("d") == []
    assert world.condition("d", "Ready")["reason"] == "ScaledToZero"
    assert world.condition("d", "Ready")["status"] == "True"
    assert not world.budgets
    world.edit("DecodePool", "d", replicas=1)
    world.settle()
    assert len(world.of("d")) == 1


def test_scaling_without_replicas_starts_with_the_fewest() -> None:
    world = settled(
        PREFILL, decode_pool(replicas=None, scaling={"minReplicas": 3, "maxReplicas": 5})
    )
    assert len(world.of("d")) == 3
    assert world.status("d")["scaling"]["reason"] == "minReplicas"


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


def test_an_old_pod_lost_in_mid_rollout_comes_back_old() -> None:
    world = settled()
    old = world.of("d")[0].revision
    world.edit("DecodePool", "d", engine={"maxNumSeqs": 7})
    world.reconcile()
    world.gone(f"d-{old}-0")
    (create,) = world.reconcile().create_pods
    assert create.name == f"d-{old}-0"


def test_going_back_uses_the_revision_there_is() -> None:
    world = settled()
    first = world.of("d")[0].revision
    world.edit("DecodePool", "d", engine={"maxNumSeqs": 7})
    world.settle()
    world.edit("DecodePool", "d", engine=None)
    world.settle()
    assert set(revisions(world, "d")) == {first}
    assert len([one for one in world.revisions if one.startswith("d-")]) == 2


def test_history_keeps_five_and_whatever_is_used() -> None:
    world = settled()
    for n in range(1, 10):
        world.edit("DecodePool", "d", engine={"maxNumSeqs": n})
        world.settle()
    kept = [one for one in world.revisions if one.startswith("d-")]
    assert len(kept) == 6
    assert f"d-{world.of('d')[0].revision}" in kept


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


@pytest.mark.parametrize(
    "broken",
    [{"replicas": "two"}, {"replicas": -1}, {"model": 5}, {"engine": "x"}, {"accelerator": []},
     {"rollout": {"maxSurge": "x%"}},
     {"transfer": {"connector": "storage"}}, {"engine": {"version": "0.1"}}],
)  # fmt: skip
def test_what_cannot_be_read_is_left_alone_and_stalls_nobody(broken: dict[str, Any]) -> None:
    world = settled(PREFILL, DECODE, named(DECODE, "e"))
    before = set(world.pods)
    world.objects["DecodePool", "d"]["spec"] |= broken
    world.objects["DecodePool", "d"]["metadata"]["generation"] += 1
    lost = world.of("e")[0].name
    world.gone(lost)
    world.edit("DecodePool", "e", replicas=3)
    world.settle()
    assert before <= set(world.pods)
    assert len(world.of("e")) == 3
    assert world.condition("d", "Stalled")["reason"] in ("InvalidSpec", "Mismatch")
    assert world.condition("d", "Stalled")["message"]


def test_failed_pods_are_replaced_later_each_time() -> None:
    world = settled(UNIFIED)
    world.fail(world.of("u")[0].name)
    plan = world.reconcile()
    assert len(plan.create_pods) == len(plan.delete_pods) == 1
    for wait in (10.0, 20.0, 40.0):
        pod = next(pod for pod in world.of("u") if not pod.ready)
        world.fail(pod.name)
        plan = world.reconcile()
        assert (plan.writes, plan.requeue_after) == (0, wait)
        world.now += wait
        plan = world.reconcile()
        assert [one.name for one in plan.delete_pods] == [pod.name]
        assert len(plan.create_pods) == 1
    world.settle()
    survivor = max(world.of("u"), key=lambda one: one.attempt)
    assert survivor.attempt == 4
    world.now += 1000
    world.fail(survivor.name)
    assert world.reconcile().create_pods


def test_a_lost_pod_is_replaced_at_once() -> None:
    world = settled(UNIFIED)
    pod = world.of("u")[0]
    world._change(pod.name, phase="Unknown", ready=False)
    plan = world.reconcile()
    assert [one.reason for one in plan.delete_pods] == ["over"]
    assert len(plan.create_pods) == 1


def test_orphans_are_adopted_and_not_made_again() -> None:
    world = settled()
    for pod in world.of("d"):
        world._change(pod.name, owner=None)
    for body in world.revisions.values():
        del body["metadata"]["ownerReferences"]
    plan = world.reconcile()
    assert sorted(one.kind for one in plan.adopt) == [
        "ControllerRevision", "ControllerRevision", "Pod", "Pod",
    ]  # fmt: skip
    assert not plan.touches_pods
    assert world.plan().writes == 0
    patch = plan.adopt[0].patch["metadata"]
    assert patch["uid"] == plan.adopt[0].uid


def test_pods_of_another_owner_are_nobodys_business() -> None:
    world = settled()
    pod = world.of("d")[0]
    world._change(pod.name, owner="somebody")
    plan = world.reconcile()
    assert [one.name for one in plan.create_pods] != [pod.name]
    assert len(plan.create_pods) == 1
    assert not plan.adopt


def test_pools_of_two_kinds_may_share_a_name() -> None:
    world = settled(
        named(PREFILL, "x", replicas=3), named(DECODE, "x", prefillRef={"name": "x"}, replicas=3)
    )
    assert len(world.of("x", role="prefill")) == len(world.of("x", role="decode")) == 3
    assert set(world.budgets) == {"x-prefill", "x-decode"}


def test_an_endpoint_is_relabelled_on_live_prefill_pods() -> None:
    world = settled()
    world.edit("DecodePool", "d", routing={"endpoint": "chat"})
    world.settle()
    (pod,) = world.of("p")
    assert pod.name in world.bodies
    ends = {key for key in pod.labels if key.startswith(labels.ENDPOINT_PREFIX)}
    assert ends == {labels.endpoint_label("chat")}


def test_a_pod_labelled_draining_by_hand_leaves_and_is_replaced() -> None:
    world = settled()
    pod = world.of("d")[0]
    world._label(pod.name, {labels.DRAINING: "true"})
    plan = world.reconcile()
    assert [(one.name, one.reason) for one in plan.delete_pods] == [(pod.name, "draining")]
    assert len(plan.create_pods) == 1


def test_a_pool_being_deleted_gets_nothing_and_no_status() -> None:
    world = settled()
    world.objects["DecodePool", "d"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for pod in world.of("d"):
        world.gone(pod.name)
    plan = world.reconcile()
    assert not plan.create_pods
    assert {key.name for key in plan.pools} == {"p"}


def test_a_drain_that_does_not_end_is_said() -> None:
    world = settled()
    pod = world.of("d")[0]
    world._delete(pod.name)
    world.reconcile()
    plan = world.reconcile()
    assert plan.requeue_after is not None
    world.now += 10_000
    world.reconcile()
    stuck = world.condition("d", "Draining")
    assert (stuck["reason"], pod.name in stuck["message"]) == ("DrainStuck", True)


def test_modes() -> None:
    world = settled()
    world.edit("DecodePool", "d", paused=True)
    assert {one.mode for one in world.plan().pools.values()} == {Mode.ROLL, Mode.HOLD}


@pytest.mark.parametrize("writes", range(14))
def test_a_process_that_dies_after_any_write_is_followed_by_the_same_end(writes: int) -> None:
    def end(*, dies: bool) -> tuple[set[str], set[str], set[str]]:
        world = World()
        for change in ({}, {"replicas": 4}, {"engine": {"maxNumSeqs": 3}}, {"replicas": 1}):
            world.edit("DecodePool", "d", **change)
            if dies:
                world.reconcile(writes=writes)
            world.settle()
        return set(world.pods), set(world.revisions), set(world.budgets)

    assert end(dies=True) == end(dies=False)


CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("PrefillPool", "p", {"model": {"name": "org/other"}}),
    ("PrefillPool", "p", {"model": {"name": "org/model"}}),
    ("PrefillPool", "p", {"replicas": 3}),
    ("PrefillPool", "p", {"replicas": 0}),
    ("PrefillPool", "p", {"rollout": {"maxSurge": 0, "maxUnavailable": 1}}),
    ("DecodePool", "d", {"engine": {"maxNumSeqs": 3}}),
    ("DecodePool", "d", {"engine": {"dtype": "float16"}}),
    ("DecodePool", "d", {"replicas": 1}),
    ("DecodePool", "d", {"replicas": 4}),
    ("DecodePool", "d", {"paused": True}),
    ("DecodePool", "d", {"routing": {"endpoint": "chat"}}),
]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_whatever_happens_the_set_comes_to_its_spec_and_to_rest(data: st.DataObject) -> None:
    world = World(PREFILL, DECODE)
    for _ in range(data.draw(st.integers(1, 10))):
        kind, name, change = data.draw(st.sampled_from(CHANGES))
        if data.draw(st.booleans()):
            world.edit(kind, name, **change)
        world.reconcile(writes=data.draw(st.none() | st.integers(0, 8)))
        for pod in sorted(world.pods):
            mishap(world, pod, data.draw(st.sampled_from(MISHAPS)))
        world.now += data.draw(st.sampled_from([1, 30, 900]))
        for pool in ("p", "d"):
            assert len([one for one in world.of(pool) if one.active]) <= 4 + 4
    world.edit("DecodePool", "d", paused=False, engine=None)
    for pod in sorted(world.pods):
        if world.pods[pod].phase == "Failed":
            world.now += 300
    world.settle()
    for kind, pool in (("PrefillPool", "p"), ("DecodePool", "d")):
        wanted = world.objects[kind, pool]["spec"]["replicas"]
        status = world.status(pool, kind)
        found = world.of(pool)
        assert [one.ready for one in found] == [True] * wanted
        assert {one.revision for one in found} <= {status["updateRevision"]}
        assert status["currentRevision"] == status["updateRevision"]
        assert status["readyReplicas"] == status["updatedReplicas"] == wanted
    assert len({pod.compat for pod in world.pods.values()}) <= 1


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["30s", "nixl", "multi", "torch", "vllm", "1", "0%", "/m"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "spec", "count", "containers", "env"]) | st.text(),
                      inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_value_anywhere_in_one_pool_leaves_the_others_pods_to_their_plan(
    data: st.DataObject,
) -> None:
    world = World(
        *(named(pool, pool["metadata"]["name"], paused=False) for pool in (FULL[0], FULL[4])),
        named(DECODE, "other"),
    )
    kind, name = data.draw(st.sampled_from([("PrefillPool", "p"), ("DecodePool", "d")]))
    spec = world.objects[kind, name]["spec"]
    # Another prefillRef is another set.
    *parents, last = data.draw(
        st.sampled_from([path for path in paths(spec) if path[0] != "prefillRef"])
    )
    node: Any = spec
    for step in parents:
        node = node[step]
    node[last] = data.draw(JUNK)
    world.reconcile()
    if kind == "DecodePool":
        assert len(world.of("other")) == 2
    assert set(world.status(name, kind)) >= {"conditions", "replicas", "selector"}


MISHAPS = ["nothing", "nothing", "ready", "ready", "unready", "fail", "gone", "orphaned"]


def mishap(world: World, name: str, what: str) -> None:
    pod = world.pods[name]
    if what == "gone":
        world.gone(name)
    elif what == "orphaned":
        world._change(name, owner=None)
    elif pod.active and what == "ready":
        world.make_ready(name)
    elif pod.active and what == "unready":
        world.make_unready(name)
    elif pod.active and what == "fail":
        world.fail(name)
