"""Sets under random edits, failures, crashes of the operator and broken objects."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract import labels

from .full_pools import FULL, paths
from .pool_yaml import DECODE, PREFILL
from .simulated_cluster import SimulatedCluster, named, revisions, settled

BROKEN = pytest.mark.parametrize(
    "broken",
    [{"replicas": "two"}, {"replicas": -1}, {"model": 5}, {"engine": "x"}, {"accelerator": []},
     {"rollout": {"maxSurge": "x%"}}, {"transfer": {"requireRdma": True}},
     {"transfer": {"connector": "storage"}}, {"engine": {"version": "0.1"}}],
)  # fmt: skip


def break_spec(cluster: SimulatedCluster, **broken: Any) -> None:
    """Give DecodePool `d` a spec that an older operator or schema accepted."""
    cluster.objects["DecodePool", "d"]["spec"] |= broken
    cluster.objects["DecodePool", "d"]["metadata"]["generation"] += 1


@BROKEN
def test_an_unreadable_pool_keeps_its_revision_and_blocks_no_other(broken: dict[str, Any]) -> None:
    cluster = settled(PREFILL, DECODE, named(DECODE, "e"))
    before = set(cluster.pods)
    break_spec(cluster, **broken)
    lost = cluster.of("e")[0].name
    cluster.remove_pod(lost)
    cluster.edit("DecodePool", "e", replicas=3)
    cluster.settle()
    assert before <= set(cluster.pods)
    assert len(cluster.of("e")) == 3
    assert cluster.condition("d", "Compatible")["reason"] in ("InvalidSpec", "Mismatch")
    assert cluster.condition("d", "Ready")["message"]


@BROKEN
def test_lost_and_failed_pods_of_an_unreadable_pool_are_replaced(broken: dict[str, Any]) -> None:
    cluster = settled(PREFILL, DECODE)
    before = set(cluster.pods)
    break_spec(cluster, **broken)
    lost, failed = cluster.of("d")
    cluster.remove_pod(lost.name)
    cluster.fail(failed.name)
    cluster.settle()
    assert set(revisions(cluster, "d")) == {lost.revision}
    assert [pod.ready for pod in cluster.of("d")] == [True, True]
    assert len(cluster.pods) == len(before)
    assert cluster.condition("d", "PodsReady")["status"] == "True"


@BROKEN
def test_an_unreadable_pool_scales_and_drains(broken: dict[str, Any]) -> None:
    cluster = settled(PREFILL, DECODE)
    (revision,) = set(revisions(cluster, "d"))
    break_spec(cluster, **broken)
    if "replicas" not in broken:
        cluster.objects["DecodePool", "d"]["spec"]["replicas"] = 4
        cluster.objects["DecodePool", "d"]["metadata"]["generation"] += 1
        cluster.settle()
        assert revisions(cluster, "d") == [revision] * 4
        cluster.objects["DecodePool", "d"]["spec"]["replicas"] = 1
        cluster.objects["DecodePool", "d"]["metadata"]["generation"] += 1
        cluster.reconcile()
        leaving = [pod for pod in cluster.of("d") if pod.leaving]
        assert len(leaving) == 3
        assert all(labels.DRAINING in pod.labels for pod in leaving)
        cluster.settle()
        assert revisions(cluster, "d") == [revision]
    drained = cluster.of("d")[0]
    cluster._label(drained.name, {labels.DRAINING: "true"})
    cluster.settle()
    assert drained.name not in cluster.pods
    assert set(revisions(cluster, "d")) == {revision}


def test_an_unreadable_pool_in_mid_rollout_keeps_both_revisions_complete() -> None:
    cluster = settled(PREFILL, named(DECODE, "d", replicas=4))
    (old,) = set(revisions(cluster, "d"))
    cluster.edit("DecodePool", "d", engine={"maxNumSeqs": 3})
    cluster.reconcile()
    break_spec(cluster, transfer={"requireRdma": True})
    for pod in cluster.of("d", revision=old)[:2]:
        cluster.remove_pod(pod.name)
    cluster.settle()
    assert len([pod for pod in cluster.of("d") if pod.ready]) >= 4
    cluster.edit("DecodePool", "d", transfer=None)
    cluster.settle()
    assert old not in revisions(cluster, "d")
    assert len(cluster.of("d")) == 4


@pytest.mark.parametrize("writes", range(14))
def test_a_crash_after_any_write_leads_to_the_same_result(writes: int) -> None:
    assert after_changes(crash_after=writes) == after_changes(crash_after=None)


@cache
def after_changes(crash_after: int | None) -> tuple[set[str], set[str], set[str]]:
    """Pods, revisions and budgets after some changes; at each, a pass may end after some writes."""
    cluster = SimulatedCluster()
    for change in ({}, {"replicas": 4}, {"engine": {"maxNumSeqs": 3}}, {"replicas": 1}):
        cluster.edit("DecodePool", "d", **change)
        if crash_after is not None:
            cluster.reconcile(writes=crash_after)
        cluster.settle()
    return set(cluster.pods), set(cluster.revisions), set(cluster.budgets)


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
def test_after_any_events_the_set_reaches_its_spec_and_stays_there(data: st.DataObject) -> None:
    cluster = SimulatedCluster(PREFILL, DECODE)
    for _ in range(data.draw(st.integers(1, 10))):
        kind, name, change = data.draw(st.sampled_from(CHANGES))
        if data.draw(st.booleans()):
            cluster.edit(kind, name, **change)
        cluster.reconcile(writes=data.draw(st.none() | st.integers(0, 8)))
        for pod in sorted(cluster.pods):
            mishap(cluster, pod, data.draw(st.sampled_from(MISHAPS)))
        cluster.now += data.draw(st.sampled_from([1, 30, 900]))
        for pool in ("p", "d"):
            assert len([pod_state for pod_state in cluster.of(pool) if pod_state.active]) <= 4 + 4
    cluster.edit("DecodePool", "d", paused=False, engine=None)
    for pod in sorted(cluster.pods):
        if cluster.pods[pod].phase == "Failed":
            cluster.now += 300
    cluster.settle()
    for kind, pool in (("PrefillPool", "p"), ("DecodePool", "d")):
        replicas = cluster.objects[kind, pool]["spec"]["replicas"]
        status = cluster.status(pool, kind)
        pods = cluster.of(pool)
        assert [pod_state.ready for pod_state in pods] == [True] * replicas
        assert {pod_state.revision for pod_state in pods} <= {status["updateRevision"]}
        assert status["currentRevision"] == status["updateRevision"]
        assert status["readyReplicas"] == status["updatedReplicas"] == replicas
    assert len({pod.compat for pod in cluster.pods.values()}) <= 1


FULL_DECODE = next(pool for pool in FULL if pool["kind"] == "DecodePool")
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
def test_any_value_anywhere_in_one_pool_does_not_affect_the_others(
    data: st.DataObject,
) -> None:
    cluster = SimulatedCluster(
        *(named(pool, pool["metadata"]["name"], paused=False) for pool in (FULL[0], FULL_DECODE)),
        named(DECODE, "other"),
    )
    kind, name = data.draw(st.sampled_from([("PrefillPool", "p"), ("DecodePool", "d")]))
    spec = cluster.objects[kind, name]["spec"]
    # A changed prefillRef moves the pool to another set.
    *parents, last = data.draw(
        st.sampled_from([path for path in paths(spec) if path[0] != "prefillRef"])
    )
    node: Any = spec
    for step in parents:
        node = node[step]
    node[last] = data.draw(JUNK)
    cluster.reconcile()
    if kind == "DecodePool":
        assert len(cluster.of("other")) == 2
    assert set(cluster.status(name, kind)) >= {"conditions", "replicas", "selector"}


MISHAPS = ["nothing", "nothing", "ready", "ready", "unready", "fail", "gone", "orphaned"]


def mishap(cluster: SimulatedCluster, name: str, event: str) -> None:
    pod = cluster.pods[name]
    if event == "gone":
        cluster.remove_pod(name)
    elif event == "orphaned":
        cluster._change(name, owner=None)
    elif pod.active and event == "ready":
        cluster.make_ready(name)
    elif pod.active and event == "unready":
        cluster.make_unready(name)
    elif pod.active and event == "fail":
        cluster.fail(name)
