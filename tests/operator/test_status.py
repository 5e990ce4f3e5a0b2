"""Conditions, counters and events of pools, each in a simulated cluster."""

from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_operator.conditions import ConditionType, Reason
from tandem_operator.observed import Failure, NodeState, PoolKey, RouterState
from tandem_operator.planning.status import status_events, statuses
from tandem_operator.resources.resolve import own_version
from tandem_operator.resources.schema import problems
from tandem_operator.routing.endpoint.plan import RouterReason

from .pool_yaml import DECODE, PREFILL, decode_pool, prefill_pool
from .simulated_cluster import SimulatedCluster, named

DECODE_KEY = PoolKey("default", "DecodePool", "d")
ROUTER = RouterState(True, "RouterReady", "the router serves", "http://d.default.svc:8080")


def settled(*pools: dict[str, Any]) -> SimulatedCluster:
    cluster = SimulatedCluster(*pools)
    cluster.routers["d"] = ROUTER
    cluster.settle()
    return cluster


def status_and_reason(
    cluster: SimulatedCluster, condition_type: str, pool: str = "d", kind: str = "DecodePool"
) -> tuple[str, str]:
    condition = cluster.condition(pool, condition_type, kind)
    return condition["status"], condition["reason"]


def test_a_ready_pair() -> None:
    cluster = settled()
    status = cluster.status("d")
    counters = {
        name: status[f"{name}Replicas"]
        for name in ("desired", "ready", "updated", "paired", "draining")
    }
    assert counters == {"desired": 2, "ready": 2, "updated": 2, "paired": 2, "draining": 0}
    assert status["replicas"] == 2
    assert status["endpoint"] == ROUTER.url
    assert status["selector"] == (
        "tandem.dev/pool=d,tandem.dev/role in (decode,unified),!tandem.dev/draining"
    )
    assert status["currentRevision"] == status["updateRevision"]
    assert (status["model"], status["tensorParallel"], status["connector"]) == (
        "org/model", 1, "nixl",
    )  # fmt: skip
    assert status["accelerator"] == "1xgpu"
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Ready": "True", "PodsReady": "True", "Compatible": "True", "PeerReady": "True",
        "RouterReady": "True", "Progressing": "False", "Reconciling": "False", "Stalled": "False",
        "Draining": "False",
        "ScalingActive": "False", "TransportVerified": "Unknown", "UpdateAvailable": "False",
    }  # fmt: skip
    prefill = {c["type"] for c in cluster.status("p", "PrefillPool")["conditions"]}
    assert "RouterReady" not in prefill
    assert status_and_reason(cluster, "Ready", "p", "PrefillPool") == ("True", "AllReady")


@pytest.mark.parametrize("kind", ["PrefillPool", "DecodePool"])
def test_the_status_is_valid_for_the_schema(kind: str) -> None:
    cluster = settled(PREFILL, decode_pool(replicas=None, scaling={"maxReplicas": 3}))
    for (object_kind, _), body in cluster.objects.items():
        if object_kind == kind:
            assert not problems(kind, body)


def test_last_transition_time_changes_only_with_the_status() -> None:
    cluster = settled()
    before = cluster.condition("d", "Ready")["lastTransitionTime"]
    cluster.now += 100
    cluster.make_unready(cluster.of("d")[0].name)
    cluster.reconcile()
    between = cluster.condition("d", "Ready")
    assert between["status"] == "False"
    assert between["message"].startswith("1 of 2 pods are ready: d-")
    assert " starts or loads its weights: kubectl logs d-" in between["message"]
    assert between["lastTransitionTime"] != before
    cluster.now += 100
    cluster.make_unready(cluster.of("d")[1].name)
    cluster.reconcile()
    assert cluster.condition("d", "Ready")["lastTransitionTime"] == between["lastTransitionTime"]


def test_no_prefill_pod_is_ready() -> None:
    cluster = settled()
    cluster.make_unready(cluster.of("p")[0].name)
    cluster.reconcile()
    assert status_and_reason(cluster, "PeerReady") == ("False", "PeerNotReady")
    assert status_and_reason(cluster, "Ready") == ("False", "PeerNotReady")
    assert cluster.status("d")["pairedReplicas"] == 0


def test_a_prefill_pool_scaled_to_zero_leaves_decode_ready() -> None:
    cluster = settled()
    cluster.edit("PrefillPool", "p", replicas=0)
    cluster.settle()
    assert status_and_reason(cluster, "PeerReady") == ("True", "PeerScaledToZero")
    assert status_and_reason(cluster, "Ready") == ("True", "AllReady")


def test_a_prefill_pool_that_no_decode_pool_names() -> None:
    cluster = settled(PREFILL)
    assert status_and_reason(cluster, "Ready", "p", "PrefillPool") == ("True", "AllReady")
    assert status_and_reason(cluster, "PeerReady", "p", "PrefillPool") == ("False", "PeerMissing")
    assert status_and_reason(cluster, "Compatible", "p", "PrefillPool") == ("True", "Alone")


def test_a_prefill_pool_names_the_decode_pools_that_disagree() -> None:
    other = named(DECODE, "e", engine={"dtype": "float16"})
    cluster = settled(PREFILL, DECODE, other)
    assert status_and_reason(cluster, "Compatible", "p", "PrefillPool") == ("True", "Agrees")
    message = cluster.condition("p", "Compatible", "PrefillPool")["message"]
    assert message.startswith("DecodePools agree with this pool, except e:")
    cluster = settled(PREFILL, DECODE)
    message = cluster.condition("p", "Compatible", "PrefillPool")["message"]
    assert message == "DecodePools agree with this pool"


def test_router_ready_is_the_routers_own_state() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    assert status_and_reason(cluster, "RouterReady") == ("Unknown", "RouterPending")
    cluster.routers["d"] = RouterState(False, "EnvoyNotReady", "0 of 2 Envoys are ready", None)
    cluster.settle()
    assert status_and_reason(cluster, "Ready") == ("False", "EnvoyNotReady")
    assert "endpoint" not in cluster.status("d")


def test_a_restarted_operator_keeps_the_routers_state_until_it_reconciles_the_endpoint() -> None:
    cluster = settled()
    url = "http://d.default.svc:8080"
    cluster.routers["d"] = RouterState(True, "RouterReady", "requests are routed", url)
    cluster.settle()
    before = cluster.status("d")
    cluster.routers.clear()
    cluster.settle()
    assert cluster.status("d") == before
    assert before["endpoint"] == url


def test_a_refused_write_is_reported_with_the_api_servers_message() -> None:
    cluster = SimulatedCluster()
    key = PoolKey("default", "DecodePool", "d")
    cluster.failures[key] = Failure("QuotaExceeded", "exceeded quota: gpus, requested: 1, used: 8")
    cluster.reconcile()
    assert status_and_reason(cluster, "PodsReady") == ("False", "QuotaExceeded")
    assert status_and_reason(cluster, "Reconciling") == ("True", "QuotaExceeded")
    assert status_and_reason(cluster, "Stalled") == ("False", "NotStalled")
    assert "exceeded quota: gpus" in cluster.condition("d", "Ready")["message"]
    cluster.now += 2400
    cluster.reconcile()
    assert status_and_reason(cluster, "Stalled") == ("True", "QuotaExceeded")
    assert status_and_reason(cluster, "Reconciling") == ("False", "QuotaExceeded")
    cluster.failures.clear()
    cluster.settle()
    assert status_and_reason(cluster, "Stalled") == ("False", "NotStalled")


def test_an_unschedulable_pod_is_reported_with_the_schedulers_message() -> None:
    cluster = SimulatedCluster()
    cluster.reconcile()
    words = "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    cluster._change(cluster.of("d")[0].name, trouble=words)
    cluster.reconcile()
    assert status_and_reason(cluster, "PodsReady") == ("False", "Unschedulable")
    message = cluster.condition("d", "PodsReady")["message"]
    assert message.endswith(f": {cluster.of('d')[0].name}: {words}")


def test_a_replica_larger_than_any_node() -> None:
    cluster = SimulatedCluster(prefill_pool(accelerator={"count": 8}), decode_pool())
    node = NodeState("small", {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}, {})
    cluster.nodes = (node,)
    cluster.reconcile()
    cluster.reconcile()
    assert status_and_reason(cluster, "PodsReady", "p", "PrefillPool") == ("False", "FitsNoNode")
    assert status_and_reason(cluster, "Stalled", "p", "PrefillPool") == ("False", "NotStalled")
    cluster.now += 2400
    cluster.reconcile()
    assert status_and_reason(cluster, "Stalled", "p", "PrefillPool") == ("True", "FitsNoNode")
    message = cluster.condition("p", "Ready", "PrefillPool")["message"]
    assert "requests nvidia.com/gpu: 8" in message
    assert "small, has 4" in message
    cluster.nodes = None
    cluster.reconcile()
    assert status_and_reason(cluster, "PodsReady", "p", "PrefillPool") == ("False", "PodsNotReady")


def test_failing_pods_are_reported_with_their_trouble() -> None:
    cluster = settled()
    for _ in range(2):
        pod = next(iter(sorted(cluster.of("d", phase="Running"), key=lambda p: -p.attempt)))
        cluster.fail(pod.name, "container engine: Error (exit code 2)")
        cluster.reconcile()
        for pending in cluster.of("d", phase="Pending"):
            cluster.make_ready(pending.name)
    cluster.fail(
        max(cluster.of("d"), key=lambda p: p.attempt).name, "container engine: (exit code 2)"
    )
    cluster.reconcile()
    assert status_and_reason(cluster, "PodsReady") == ("False", "PodsFail")
    assert "exit code 2" in cluster.condition("d", "PodsReady")["message"]


def test_progressing_says_why_new_pods_are_not_ready_while_old_ones_serve() -> None:
    cluster = settled(PREFILL, decode_pool(rollout={"maxSurge": 1, "maxUnavailable": 0}))
    cluster.edit("DecodePool", "d", engine={"extraArgs": ["--no-such-flag"]})
    cluster.reconcile()
    # The first failure is replaced at once, the second waits.
    for _ in range(2):
        (new,) = [pod for pod in cluster.of("d") if not pod.ready]
        cluster.fail(new.name, "container engine: Error (exit code 2)")
        cluster.reconcile()
    assert status_and_reason(cluster, "PodsReady") == ("True", "AllReady")
    message = cluster.condition("d", "Progressing")["message"]
    assert f"{new.name}: container engine: Error (exit code 2)" in message


def test_a_pod_whose_containers_do_not_start_is_named_with_the_command_that_says_why() -> None:
    cluster = settled()
    cluster.remove_pod(cluster.of("d")[0].name)
    cluster.reconcile()
    (pod,) = [pod for pod in cluster.of("d") if not pod.ready]
    cluster.schedule(pod.name)
    cluster.reconcile()
    message = cluster.condition("d", "PodsReady")["message"]
    assert message.endswith(f"waits for images or volumes: kubectl describe pod {pod.name}")


@pytest.mark.parametrize(("version", "hints"), [("0.0.1", True), (own_version(), False)])
def test_failing_torch_engines_of_another_version_are_named(version: str, hints: bool) -> None:
    model = {"name": "tiny", "source": {"tiny": {}}}
    torch = prefill_pool(model=model, engine={"type": "torch"})
    cluster = settled(torch, decode_pool(rollout={"maxSurge": 1, "maxUnavailable": 0}))
    image = f"registry/tandem-engine:{version}"
    for kind, name in (("PrefillPool", "p"), ("DecodePool", "d")):
        cluster.edit(kind, name, engine={"type": "torch", "image": image, "maxNumSeqs": 3})
    cluster.reconcile()
    # The first failure is replaced at once, the second waits.
    for _ in range(2):
        for pod in [pod for pod in cluster.of("d") if not pod.ready]:
            cluster.fail(pod.name, "container engine: unrecognized arguments: --new")
        cluster.reconcile()
    message = cluster.condition("d", "Progressing")["message"]
    assert "unrecognized arguments: --new" in message
    assert (f"image is of version {version}, the operator of {own_version()}" in message) is hints


def test_a_pool_stalls_after_the_deadline_until_it_makes_progress() -> None:
    cluster = settled(PREFILL, decode_pool(rollout={"progressDeadline": "10m"}))
    cluster.edit("DecodePool", "d", engine={"maxNumSeqs": 3})
    cluster.now += 5000
    plan = cluster.reconcile()
    assert status_and_reason(cluster, "Progressing") == ("True", "RollingOut")
    assert plan.requeue_after == 600
    cluster.reconcile()
    cluster.now += 601
    cluster.reconcile()
    assert status_and_reason(cluster, "Progressing") == ("False", "ProgressDeadlineExceeded")
    assert status_and_reason(cluster, "Stalled") == ("True", "ProgressDeadlineExceeded")
    assert status_and_reason(cluster, "Ready")[0] == "True", "the old pods serve"
    cluster.now += 601
    assert cluster.reconcile().requeue_after is None
    assert status_and_reason(cluster, "Progressing")[0] == "False"
    cluster.now += 1
    cluster.settle()
    assert status_and_reason(cluster, "Progressing") == ("False", "Complete")
    assert status_and_reason(cluster, "Stalled")[0] == "False"


def test_transport_stays_verified_once_bytes_moved() -> None:
    cluster = settled()
    cluster.kv_bytes_moved[DECODE_KEY] = 4096.0
    cluster.settle()
    assert status_and_reason(cluster, "TransportVerified") == ("True", "BytesMoved")
    writes = cluster.status_writes
    cluster.kv_bytes_moved[DECODE_KEY] = 8192.0
    cluster.settle()
    assert cluster.status_writes == writes
    cluster.kv_bytes_moved.clear()
    cluster.settle()
    assert status_and_reason(cluster, "TransportVerified") == ("True", "BytesMoved")


def test_draining_pods_are_counted_separately() -> None:
    cluster = settled()
    cluster.edit("DecodePool", "d", replicas=1)
    cluster.reconcile()
    cluster.reconcile()
    status = cluster.status("d")
    assert (status["replicas"], status["drainingReplicas"]) == (1, 1)
    assert status_and_reason(cluster, "Draining") == ("True", "PodsDrain")
    assert labels.DRAINING in cluster.of("d", deleting=True)[0].labels


def test_a_rolling_pool_is_ready_while_enough_pods_are() -> None:
    cluster = settled(
        PREFILL, decode_pool(replicas=4, rollout={"maxSurge": 0, "maxUnavailable": 1})
    )
    cluster.edit("DecodePool", "d", engine={"maxNumSeqs": 3})
    cluster.reconcile()
    cluster.reconcile()
    assert status_and_reason(cluster, "PodsReady") == ("True", "RollingOut")
    assert status_and_reason(cluster, "Progressing") == ("True", "RollingOut")


def test_events_are_sent_for_changed_conditions_only() -> None:
    cluster = settled()
    events = [(event.type, event.reason) for event in cluster.events]
    assert events.count(("Normal", "AllReady")) == 2
    cluster.events.clear()
    cluster.reconcile()
    assert cluster.events == []
    cluster.edit("DecodePool", "d", engine={"dtype": "float16"})
    cluster.settle()
    # One event of each pool: Stalled and Ready have the same reason and message.
    assert [(event.type, event.reason) for event in cluster.events] == [("Warning", "Mismatch")] * 2


def test_a_refused_write_is_told_once() -> None:
    def reconciling(reason: str) -> dict[str, list[dict[str, str]]]:
        entry = {"type": "Reconciling", "status": "True", "reason": reason, "message": "no"}
        return {"conditions": [entry]}

    refused = reconciling("QuotaExceeded")
    assert status_events(refused, refused) == ()
    [event] = status_events(reconciling("Starting"), refused)
    assert (event.type, event.reason) == ("Warning", "QuotaExceeded")


def test_pods_that_a_larger_pool_waits_for_are_no_warning_and_lost_ones_are() -> None:
    cluster = settled()
    cluster.events.clear()
    cluster.edit("DecodePool", "d", replicas=3)
    cluster.settle()
    events = [(event.type, event.reason) for event in cluster.events]
    assert ("Normal", "PodsNotReady") in events
    assert {type_ for type_, _ in events} == {"Normal"}
    cluster.events.clear()
    cluster.make_unready(cluster.of("d")[0].name)
    cluster.reconcile()
    assert [(e.type, e.reason) for e in cluster.events] == [("Warning", "PodsNotReady")]


def test_compatible_notes_a_limit_that_cannot_be_checked() -> None:
    cluster = settled(prefill_pool(accelerator={"count": 4}), DECODE)
    message = cluster.condition("d", "Compatible")["message"]
    assert "prefill's tensor size 4 is above decode's 1" in message


def test_compatible_notes_a_prefill_engine_that_refuses_priorities() -> None:
    policy = {"extraArgs": ["--scheduling-policy", "priority"]}

    def message(prefill: Any, decode: Any) -> str:
        cluster = settled(prefill_pool(engine=prefill), decode_pool(engine=decode))
        return str(cluster.condition("d", "Compatible")["message"])

    note = "prefill has no --scheduling-policy priority"
    assert note in message({}, policy)
    assert note not in message(policy, policy)
    assert note not in message({}, {})


def test_every_condition_and_reason_is_in_the_runbook() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run" / "pools.md").read_text()
    missing = [
        str(name) for name in (*ConditionType, *Reason, *RouterReason) if f"`{name}`" not in page
    ]
    assert not missing


def test_the_status_names_the_generation_that_was_planned() -> None:
    cluster = settled()
    plan = cluster.plan()
    cluster.edit("DecodePool", "d", replicas=3)
    key = PoolKey("default", "DecodePool", "d")
    status = statuses(cluster.observe(), plan)[key]
    assert status["observedGeneration"] == 1
    assert {entry["observedGeneration"] for entry in status["conditions"]} == {1}
