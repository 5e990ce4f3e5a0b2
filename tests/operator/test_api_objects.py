"""Parsing of API objects, complete and incomplete ones."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_operator.observed import PullReport
from tandem_operator.planning.api_objects import (
    node_state,
    pod_state,
    pool_resource,
    pull_pod,
    revision_state,
    rfc3339,
    timestamp,
)

NOON = 1_767_268_800.0


def pod(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "d-abc-0",
            "uid": "u1",
            "creationTimestamp": "2026-01-01T12:00:00Z",
            "labels": {
                "tandem.dev/pool": "d", "tandem.dev/role": "decode",
                "tandem.dev/revision": "abc", "tandem.dev/kv-compat": "k",
            },
            "annotations": {"tandem.dev/attempt": "3"},
            "ownerReferences": [{"uid": "x"}, {"uid": "pool", "controller": True}],
        },
        "spec": {"nodeName": "n1"},
        "status": status,
    }  # fmt: skip


def condition(kind: str, status: str, **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, "lastTransitionTime": "2026-01-01T12:01:00Z", **more}


def test_a_ready_pod() -> None:
    state = pod_state(
        pod(phase="Running", podIP="10.0.0.1", conditions=[condition("Ready", "True")])
    )
    assert (state.pool, state.role, state.revision, state.compat) == ("d", "decode", "abc", "k")
    assert (state.owner, state.attempt, state.node, state.address) == ("pool", 3, "n1", "10.0.0.1")
    assert (state.ready, state.ready_since, state.active) == (True, NOON + 60, True)
    assert state.created == NOON
    assert state.trouble is None


def test_a_pod_being_deleted_is_neither_ready_nor_active() -> None:
    body = pod(phase="Running", conditions=[condition("Ready", "True")])
    body["metadata"]["deletionTimestamp"] = "2026-01-01T12:05:00Z"
    body["metadata"]["labels"]["tandem.dev/draining"] = "true"
    state = pod_state(body)
    assert (state.ready, state.active, state.leaving) == (False, False, True)
    assert (state.deleting, state.draining, state.leaves_by) == (True, False, NOON + 300)


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        ({"conditions": [condition("PodScheduled", "False", reason="NoRoom", message="0/1")]},
         "NoRoom: 0/1"),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
         "Evicted: low on memory"),
        ({"containerStatuses": [{"name": "engine", "state": {"waiting": {
            "reason": "ImagePullBackOff", "message": "no such image"}}}]},
         "container engine: ImagePullBackOff: no such image"),
        ({"containerStatuses": [{"name": "engine", "state": {"waiting": {
            "reason": "ContainerCreating"}}}]}, None),
        ({"containerStatuses": [{"name": "engine", "state": {"terminated": {
            "exitCode": 2, "reason": "Error"}}}]}, "container engine: Error (exit code 2)"),
        ({"containerStatuses": [{"name": "engine", "state": {"terminated": {
            "exitCode": 1, "reason": "Error", "message": "x" * 600 + "no such model\n"}}}]},
         f"container engine: Error: {'x' * 498}no such model (exit code 1)"),
        ({"containerStatuses": [{"name": "engine", "state": {"terminated": {
            "exitCode": 137, "reason": "Error", "message": "INFO: GET /health 200\n"}}}]},
         "container engine: killed by SIGKILL (exit code 137)"),
        ({"containerStatuses": [{"name": "engine", "state": {"terminated": {
            "exitCode": 137, "reason": "OOMKilled", "message": "INFO: GET /health 200\n"}}}]},
         "container engine: OOMKilled: killed by SIGKILL (exit code 137)"),
        ({"containerStatuses": [{"name": "engine", "state": {"terminated": {
            "exitCode": 0, "reason": "Completed"}}}]}, None),
    ],
)  # fmt: skip
def test_trouble_is_reported_as_the_cluster_states_it(
    status: dict[str, Any], trouble: str | None
) -> None:
    assert pod_state(pod(**status)).trouble == trouble


def test_the_end_of_a_pod() -> None:
    ended = {"state": {"terminated": {"exitCode": 1, "finishedAt": "2026-01-01T12:02:00Z"}}}
    assert pod_state(pod(phase="Failed", containerStatuses=[ended])).ended == NOON + 120
    assert (
        pod_state(pod(phase="Failed", conditions=[condition("Ready", "False")])).ended == NOON + 60
    )
    assert pod_state(pod(phase="Failed")).ended == NOON
    assert pod_state(pod(phase="Running", containerStatuses=[ended])).ended is None


def test_a_download_reports_once_its_container_has_succeeded() -> None:
    def reports(code: int) -> object:
        ended = {"exitCode": code, "message": '{"bytes": 5, "files": 2, "commit": "c"}'}
        container = {"name": "resolve", "state": {"terminated": ended}}
        return pull_pod(pod(initContainerStatuses=[container])).reports

    assert reports(0) == {"resolve": PullReport(bytes=5, files=2, commit="c")}
    assert reports(1) == {}


def test_a_revision() -> None:
    body = {
        "metadata": {"name": "p-abc", "uid": "u", "labels": {
            "tandem.dev/pool": "p", "tandem.dev/role": "prefill", "tandem.dev/revision": "abc"}},
        "revision": 3,
        "data": {"metadata": {}, "spec": {"containers": []}},
    }  # fmt: skip
    revision = revision_state(body)
    assert (revision.kind, revision.pool, revision.revision, revision.number) == (
        "PrefillPool",
        "p",
        "abc",
        3,
    )
    assert revision.template == body["data"]
    assert revision_state({**body, "data": {"other": 1}}).template == {}


def test_a_node() -> None:
    node = node_state(
        {
            "metadata": {"name": "n", "labels": {"zone": "a"}},
            "spec": {"taints": [{"key": "x", "effect": "NoSchedule"}]},
            "status": {"allocatable": {"cpu": "8"}},
        }
    )
    assert (node.name, node.allocatable) == ("n", {"cpu": "8"})
    assert node.taints == ({"key": "x", "effect": "NoSchedule"},)


def test_a_pool() -> None:
    body = {"kind": "DecodePool", "metadata": {"name": "d", "namespace": "x", "uid": "u"}}
    pool = pool_resource(body)
    assert (pool.key.kind, pool.key.name, pool.deleting, pool.status) == (
        "DecodePool", "d", False, {},
    )  # fmt: skip
    with pytest.raises(KeyError):
        pool_resource({**body, "kind": "Pod"})


@pytest.mark.parametrize("text", [None, 5, "", "yesterday"])
def test_text_that_is_no_time_gives_none(text: object) -> None:
    assert timestamp(text) is None


def test_times_round_trip() -> None:
    assert rfc3339(NOON) == "2026-01-01T12:00:00Z"
    assert timestamp(rfc3339(NOON)) == timestamp("2026-01-01T13:00:00+01:00") == NOON


JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(
        st.sampled_from(["conditions", "type", "state", "waiting", "labels", "nodeName"]), inner),
    max_leaves=5,
)  # fmt: skip


@given(status=JUNK, spec=JUNK)
def test_a_pod_of_any_shape_is_parsed(status: Any, spec: Any) -> None:
    pod = pod_state({"metadata": {"name": "n", "uid": "u"}, "spec": spec, "status": status})
    assert not pod.ready
