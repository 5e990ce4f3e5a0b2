"""One set from object to pods: names, revisions, numbers, labels, replacement, adoption."""

from tandem_contract import labels
from tandem_operator.observed import Failure, PoolKey
from tandem_operator.planning.actions import Mode
from tandem_operator.planning.plan import plan_set

from .pool_yaml import DECODE, PREFILL, decode_pool
from .set_world import UNIFIED, World, named, revisions, settled


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


def test_a_pool_whose_pods_are_refused_keeps_its_revision_and_its_number() -> None:
    world = settled()
    (held,) = world.of("p")
    world.edit("PrefillPool", "p", drain={"timeout": "7s"})
    key = PoolKey("default", "PrefillPool", "p")
    refused = {key: Failure("Refused", "no")}
    assert world.plan().create_revisions
    plan = plan_set(world.observe(), world.defaults, refused)
    assert (plan.create_revisions, plan.delete_pods) == ((), ())
    assert plan.pools[key].mode is Mode.HOLD
    assert plan.pools[key].refused == refused[key]
    world.gone(held.name)
    (back,) = plan_set(world.observe(), world.defaults, refused).create_pods
    assert back.body["metadata"]["labels"][labels.REVISION] == held.revision
