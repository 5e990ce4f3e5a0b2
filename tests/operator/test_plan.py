"""Plans of one set: names, revisions, numbers of pods, labels, replacement, adoption."""

from tandem_contract import labels
from tandem_operator.observed import Failure, PoolKey
from tandem_operator.planning.actions import Mode
from tandem_operator.planning.plan import plan_set

from .pool_yaml import DECODE, PREFILL, decode_pool
from .simulated_cluster import UNIFIED, SimulatedCluster, named, revisions, settled


def test_a_new_set_gets_its_revisions_budget_and_pods_in_one_pass() -> None:
    cluster = SimulatedCluster()
    plan = cluster.reconcile()
    assert {create.name for create in plan.create_pods} == set(cluster.pods)
    assert {key.name for key in plan.owners} == {"p", "d"}
    (p,) = cluster.of("p")
    d0, d1 = cluster.of("d")
    assert p.name == f"p-{p.revision}-0"
    assert (d0.name, d1.name) == (f"d-{d0.revision}-0", f"d-{d0.revision}-1")
    assert set(cluster.revisions) == {f"p-{p.revision}", f"d-{d0.revision}"}
    assert p.compat == d0.compat
    assert {b["spec"]["minAvailable"] for b in cluster.budgets.values()} == {1}
    body = cluster.bodies[p.name]
    assert body["metadata"]["ownerReferences"][0]["uid"] == p.owner
    assert body["metadata"]["labels"][labels.endpoint_label("d")] == "prefill"
    assert cluster.bodies[d0.name]["metadata"]["labels"][labels.endpoint_label("d")] == "decode"


def test_a_set_that_matches_its_spec_needs_no_write() -> None:
    cluster = settled()
    before = cluster.status_writes
    plan = cluster.reconcile()
    assert (plan.writes, plan.requeue_after, cluster.status_writes) == (0, None, before)
    assert not plan.touches_pods
    assert plan.owners == ()


def test_pods_are_created_from_the_pinned_template_not_a_newly_rendered_one() -> None:
    cluster = settled()
    (name,) = [name for name in cluster.revisions if name.startswith("d-")]
    cluster.revisions[name]["data"]["spec"]["dnsPolicy"] = "Default"
    cluster.remove_pod(cluster.of("d")[0].name)
    (create,) = cluster.reconcile().create_pods
    assert create.body["spec"]["dnsPolicy"] == "Default"
    assert cluster.condition("d", "UpdateAvailable")["status"] == "True"


def test_scaling_removes_the_highest_index_and_adds_the_lowest_free_one() -> None:
    cluster = settled()
    cluster.edit("DecodePool", "d", replicas=4)
    cluster.settle()
    revision = cluster.of("d")[0].revision
    cluster.remove_pod(f"d-{revision}-1")
    cluster.edit("DecodePool", "d", replicas=2)
    cluster.settle()
    assert [pod.name for pod in cluster.of("d")] == [f"d-{revision}-0", f"d-{revision}-2"]
    cluster.edit("DecodePool", "d", replicas=3)
    cluster.settle()
    assert [pod.name[-1] for pod in cluster.of("d")] == ["0", "1", "2"]
    assert cluster.status("d")["readyReplicas"] == 3


def test_the_index_of_a_terminating_pod_is_not_reused() -> None:
    cluster = settled()
    (pod,) = cluster.of("p")
    cluster._delete(pod.name)
    (create,) = cluster.reconcile().create_pods
    assert create.name.endswith("-1")


def test_scaling_to_zero_and_back() -> None:
    cluster = settled()
    cluster.edit("DecodePool", "d", replicas=0)
    cluster.settle()
    assert cluster.of("d") == []
    assert cluster.condition("d", "Ready")["reason"] == "ScaledToZero"
    assert cluster.condition("d", "Ready")["status"] == "True"
    assert not cluster.budgets
    cluster.edit("DecodePool", "d", replicas=1)
    cluster.settle()
    assert len(cluster.of("d")) == 1


def test_a_pool_with_scaling_starts_with_min_replicas() -> None:
    cluster = settled(
        PREFILL, decode_pool(replicas=None, scaling={"minReplicas": 3, "maxReplicas": 5})
    )
    assert len(cluster.of("d")) == 3
    assert cluster.status("d")["scaling"]["reason"] == "minReplicas"


def test_an_old_pod_lost_during_a_rollout_is_replaced_with_the_old_revision() -> None:
    cluster = settled()
    old = cluster.of("d")[0].revision
    cluster.edit("DecodePool", "d", engine={"maxNumSeqs": 7})
    cluster.reconcile()
    cluster.remove_pod(f"d-{old}-0")
    (create,) = cluster.reconcile().create_pods
    assert create.name == f"d-{old}-0"


def test_a_rollback_reuses_the_pinned_revision() -> None:
    cluster = settled()
    first = cluster.of("d")[0].revision
    cluster.edit("DecodePool", "d", engine={"maxNumSeqs": 7})
    cluster.settle()
    cluster.edit("DecodePool", "d", engine=None)
    cluster.settle()
    assert set(revisions(cluster, "d")) == {first}
    assert len([name for name in cluster.revisions if name.startswith("d-")]) == 2


def test_history_keeps_five_unused_revisions() -> None:
    cluster = settled()
    for n in range(1, 10):
        cluster.edit("DecodePool", "d", engine={"maxNumSeqs": n})
        cluster.settle()
    names = [name for name in cluster.revisions if name.startswith("d-")]
    assert len(names) == 6
    assert f"d-{cluster.of('d')[0].revision}" in names


def test_failed_pods_are_replaced_with_growing_delay() -> None:
    cluster = settled(UNIFIED)
    cluster.fail(cluster.of("u")[0].name)
    plan = cluster.reconcile()
    assert len(plan.create_pods) == len(plan.delete_pods) == 1
    for wait in (10.0, 20.0, 40.0):
        pod = next(pod for pod in cluster.of("u") if not pod.ready)
        cluster.fail(pod.name)
        plan = cluster.reconcile()
        assert (plan.writes, plan.requeue_after) == (0, wait)
        cluster.now += wait
        plan = cluster.reconcile()
        assert [delete.name for delete in plan.delete_pods] == [pod.name]
        assert len(plan.create_pods) == 1
    cluster.settle()
    survivor = max(cluster.of("u"), key=lambda pod: pod.attempt)
    assert survivor.attempt == 4
    cluster.now += 1000
    cluster.fail(survivor.name)
    assert cluster.reconcile().create_pods


def test_a_lost_pod_is_replaced_at_once() -> None:
    cluster = settled(UNIFIED)
    pod = cluster.of("u")[0]
    cluster._change(pod.name, phase="Unknown", ready=False)
    plan = cluster.reconcile()
    assert [delete.reason for delete in plan.delete_pods] == ["over"]
    assert len(plan.create_pods) == 1


def test_orphans_are_adopted_instead_of_created_again() -> None:
    cluster = settled()
    for pod in cluster.of("d"):
        cluster._change(pod.name, owner=None)
    for body in cluster.revisions.values():
        del body["metadata"]["ownerReferences"]
    plan = cluster.reconcile()
    assert sorted(adopt.kind for adopt in plan.adopt) == [
        "ControllerRevision", "ControllerRevision", "Pod", "Pod",
    ]  # fmt: skip
    assert not plan.touches_pods
    assert cluster.plan().writes == 0
    patch = plan.adopt[0].patch["metadata"]
    assert patch["uid"] == plan.adopt[0].uid


def test_pods_of_another_owner_are_ignored() -> None:
    cluster = settled()
    pod = cluster.of("d")[0]
    cluster._change(pod.name, owner="somebody")
    plan = cluster.reconcile()
    assert [create.name for create in plan.create_pods] != [pod.name]
    assert len(plan.create_pods) == 1
    assert not plan.adopt


def test_pools_of_two_kinds_may_share_a_name() -> None:
    cluster = settled(
        named(PREFILL, "x", replicas=3), named(DECODE, "x", prefillRef={"name": "x"}, replicas=3)
    )
    assert len(cluster.of("x", role="prefill")) == len(cluster.of("x", role="decode")) == 3
    assert set(cluster.budgets) == {"x-prefill", "x-decode"}


def test_an_endpoint_is_relabelled_on_live_prefill_pods() -> None:
    cluster = settled()
    cluster.edit("DecodePool", "d", routing={"endpoint": "chat"})
    cluster.settle()
    (pod,) = cluster.of("p")
    assert pod.name in cluster.bodies
    ends = {key for key in pod.labels if key.startswith(labels.ENDPOINT_PREFIX)}
    assert ends == {labels.endpoint_label("chat")}


def test_a_pod_labelled_draining_by_a_user_is_deleted_and_replaced() -> None:
    cluster = settled()
    pod = cluster.of("d")[0]
    cluster._label(pod.name, {labels.DRAINING: "true"})
    plan = cluster.reconcile()
    assert [(delete.name, delete.reason) for delete in plan.delete_pods] == [(pod.name, "draining")]
    assert len(plan.create_pods) == 1


def test_a_pool_being_deleted_gets_no_write_and_no_status() -> None:
    cluster = settled()
    cluster.objects["DecodePool", "d"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for pod in cluster.of("d"):
        cluster.remove_pod(pod.name)
    plan = cluster.reconcile()
    assert not plan.create_pods
    assert {key.name for key in plan.pools} == {"p"}


def test_a_stuck_drain_is_reported() -> None:
    cluster = settled()
    pod = cluster.of("d")[0]
    cluster._delete(pod.name)
    cluster.reconcile()
    plan = cluster.reconcile()
    assert plan.requeue_after is not None
    cluster.now += 10_000
    cluster.reconcile()
    stuck = cluster.condition("d", "Draining")
    assert (stuck["reason"], pod.name in stuck["message"]) == ("DrainStuck", True)


def test_modes() -> None:
    cluster = settled()
    cluster.edit("DecodePool", "d", paused=True)
    assert {pool.mode for pool in cluster.plan().pools.values()} == {Mode.ROLL, Mode.HOLD}


def test_a_pool_whose_pods_the_api_server_refuses_keeps_revision_and_pods() -> None:
    cluster = settled()
    (held,) = cluster.of("p")
    cluster.edit("PrefillPool", "p", drain={"timeout": "7s"})
    key = PoolKey("default", "PrefillPool", "p")
    refused = {key: Failure("Refused", "no")}
    assert cluster.plan().create_revisions
    plan = plan_set(cluster.observe(), cluster.defaults, refused)
    assert (plan.create_revisions, plan.delete_pods) == ((), ())
    assert plan.pools[key].mode is Mode.HOLD
    assert plan.pools[key].refused == refused[key]
    cluster.remove_pod(held.name)
    (back,) = plan_set(cluster.observe(), cluster.defaults, refused).create_pods
    assert back.body["metadata"]["labels"][labels.REVISION] == held.revision
