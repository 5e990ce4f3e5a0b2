"""Conditions, counters and events of pools, each from a whole small cluster."""

from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_operator.conditions import ConditionType, Reason
from tandem_operator.observed import Failure, NodeState, PoolKey, RouterState
from tandem_operator.resources.schema import problems
from tandem_operator.routing.endpoint.plan import RouterReason

from .pool_yaml import DECODE, PREFILL, decode_pool, prefill_pool
from .set_world import World

ROUTER = RouterState(True, "RouterReady", "the router serves", "http://d.default.svc:8080")


def settled(*pools: dict[str, Any]) -> World:
    world = World(*pools)
    world.routers["d"] = ROUTER
    world.settle()
    return world


def stated(world: World, which: str, pool: str = "d", kind: str = "DecodePool") -> tuple[str, str]:
    found = world.condition(pool, which, kind)
    return found["status"], found["reason"]


def test_a_ready_pair() -> None:
    world = settled()
    status = world.status("d")
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
        "RouterReady": "True", "Progressing": "False", "Stalled": "False", "Draining": "False",
        "ScalingActive": "False", "TransportVerified": "Unknown", "UpdateAvailable": "False",
    }  # fmt: skip
    prefill = {c["type"] for c in world.status("p", "PrefillPool")["conditions"]}
    assert "RouterReady" not in prefill
    assert stated(world, "Ready", "p", "PrefillPool") == ("True", "AllReady")


@pytest.mark.parametrize("kind", ["PrefillPool", "DecodePool"])
def test_what_is_written_is_valid_for_the_schema(kind: str) -> None:
    world = settled(PREFILL, decode_pool(replicas=None, scaling={"maxReplicas": 3}))
    for (found, _), body in world.objects.items():
        if found == kind:
            assert not problems(kind, body)


def test_a_conditions_time_moves_with_its_status_alone() -> None:
    world = settled()
    before = world.condition("d", "Ready")["lastTransitionTime"]
    world.now += 100
    world.make_unready(world.of("d")[0].name)
    world.reconcile()
    between = world.condition("d", "Ready")
    assert (between["status"], between["message"]) == ("False", "1 of 2 pods are ready")
    assert between["lastTransitionTime"] != before
    world.now += 100
    world.make_unready(world.of("d")[1].name)
    world.reconcile()
    assert world.condition("d", "Ready")["lastTransitionTime"] == between["lastTransitionTime"]


def test_no_prefill_pod_is_ready() -> None:
    world = settled()
    world.make_unready(world.of("p")[0].name)
    world.reconcile()
    assert stated(world, "PeerReady") == ("False", "PeerNotReady")
    assert stated(world, "Ready") == ("False", "PeerNotReady")
    assert world.status("d")["pairedReplicas"] == 0


def test_a_prefill_pool_scaled_to_zero_leaves_decode_ready() -> None:
    world = settled()
    world.edit("PrefillPool", "p", replicas=0)
    world.settle()
    assert stated(world, "PeerReady") == ("True", "PeerScaledToZero")
    assert stated(world, "Ready") == ("True", "AllReady")


def test_a_prefill_pool_that_nobody_names() -> None:
    world = settled(PREFILL)
    assert stated(world, "Ready", "p", "PrefillPool") == ("True", "AllReady")
    assert stated(world, "PeerReady", "p", "PrefillPool") == ("False", "PeerMissing")
    assert stated(world, "Compatible", "p", "PrefillPool") == ("True", "Alone")


def test_the_router_speaks_for_itself() -> None:
    world = World()
    world.settle()
    assert stated(world, "RouterReady") == ("Unknown", "RouterPending")
    world.routers["d"] = RouterState(False, "EnvoyNotReady", "0 of 2 Envoys are ready", None)
    world.settle()
    assert stated(world, "Ready") == ("False", "EnvoyNotReady")
    assert "endpoint" not in world.status("d")


def test_the_api_servers_words_on_a_refused_write() -> None:
    world = World()
    key = PoolKey("default", "DecodePool", "d")
    world.failures[key] = Failure("QuotaExceeded", "exceeded quota: gpus, requested: 1, used: 8")
    world.reconcile()
    assert stated(world, "PodsReady") == ("False", "QuotaExceeded")
    assert stated(world, "Stalled") == ("True", "QuotaExceeded")
    assert "exceeded quota: gpus" in world.condition("d", "Ready")["message"]
    world.failures.clear()
    world.settle()
    assert stated(world, "Stalled") == ("False", "NotStalled")


def test_an_unschedulable_pod_in_the_schedulers_words() -> None:
    world = World()
    world.reconcile()
    words = "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    world._change(world.of("d")[0].name, trouble=words)
    world.reconcile()
    assert stated(world, "PodsReady") == ("False", "Unschedulable")
    assert words in world.condition("d", "PodsReady")["message"]


def test_a_replica_larger_than_any_node() -> None:
    world = World(prefill_pool(accelerator={"count": 8}), decode_pool())
    node = NodeState("small", {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}, {})
    world.nodes = (node,)
    world.reconcile()
    world.reconcile()
    assert stated(world, "PodsReady", "p", "PrefillPool") == ("False", "FitsNoNode")
    assert stated(world, "Stalled", "p", "PrefillPool") == ("True", "FitsNoNode")
    message = world.condition("p", "Ready", "PrefillPool")["message"]
    assert "requests nvidia.com/gpu: 8" in message
    assert "small, has 4" in message
    world.nodes = None
    world.reconcile()
    assert stated(world, "PodsReady", "p", "PrefillPool") == ("False", "PodsNotReady")


def test_failing_pods_say_why() -> None:
    world = settled()
    for _ in range(2):
        pod = next(iter(sorted(world.of("d", phase="Running"), key=lambda p: -p.attempt)))
        world.fail(pod.name, "container engine: Error (exit code 2)")
        world.reconcile()
        for other in world.of("d", phase="Pending"):
            world.make_ready(other.name)
    world.fail(max(world.of("d"), key=lambda p: p.attempt).name, "container engine: (exit code 2)")
    world.reconcile()
    assert stated(world, "PodsReady") == ("False", "PodsFail")
    assert "exit code 2" in world.condition("d", "PodsReady")["message"]


def test_a_rollout_says_why_its_new_pod_does_not_come_while_the_old_ones_serve() -> None:
    world = settled()
    world.edit("DecodePool", "d", engine={"extraArgs": ["--no-such-flag"]})
    world.reconcile()
    # The first failure is replaced at once, the second waits.
    for _ in range(2):
        (new,) = [pod for pod in world.of("d") if not pod.ready]
        world.fail(new.name, "container engine: Error (exit code 2)")
        world.reconcile()
    assert stated(world, "PodsReady") == ("True", "AllReady")
    message = world.condition("d", "Progressing")["message"]
    assert f"{new.name}: container engine: Error (exit code 2)" in message


def test_no_progress_for_too_long_stalls_until_something_happens() -> None:
    world = settled(PREFILL, decode_pool(rollout={"progressDeadline": "10m"}))
    world.edit("DecodePool", "d", engine={"maxNumSeqs": 3})
    world.now += 5000
    plan = world.reconcile()
    assert stated(world, "Progressing") == ("True", "RollingOut")
    assert plan.requeue_after == 600
    world.reconcile()
    world.now += 601
    world.reconcile()
    assert stated(world, "Progressing") == ("False", "ProgressDeadlineExceeded")
    assert stated(world, "Stalled") == ("True", "ProgressDeadlineExceeded")
    assert stated(world, "Ready")[0] == "True", "the old pods serve"
    world.now += 601
    assert world.reconcile().requeue_after is None
    assert stated(world, "Progressing")[0] == "False"
    world.now += 1
    world.settle()
    assert stated(world, "Progressing") == ("False", "Complete")
    assert stated(world, "Stalled")[0] == "False"


def test_the_transport_is_verified_once_bytes_moved_and_stays_so() -> None:
    world = settled()
    world.kv_bytes_moved["d"] = 4096.0
    world.settle()
    assert stated(world, "TransportVerified") == ("True", "BytesMoved")
    writes = world.status_writes
    world.kv_bytes_moved["d"] = 8192.0
    world.settle()
    assert world.status_writes == writes
    world.kv_bytes_moved.clear()
    world.settle()
    assert stated(world, "TransportVerified") == ("True", "BytesMoved")


def test_draining_pods_are_counted_apart() -> None:
    world = settled()
    world.edit("DecodePool", "d", replicas=1)
    world.reconcile()
    world.reconcile()
    status = world.status("d")
    assert (status["replicas"], status["drainingReplicas"]) == (1, 1)
    assert stated(world, "Draining") == ("True", "PodsDrain")
    assert labels.DRAINING in world.of("d", deleting=True)[0].labels


def test_while_rolling_a_pool_stays_ready_as_long_as_enough_pods_are() -> None:
    world = settled(PREFILL, decode_pool(replicas=4, rollout={"maxSurge": 0, "maxUnavailable": 1}))
    world.edit("DecodePool", "d", engine={"maxNumSeqs": 3})
    world.reconcile()
    world.reconcile()
    assert stated(world, "PodsReady") == ("True", "RollingOut")
    assert stated(world, "Progressing") == ("True", "RollingOut")


def test_events_come_with_transitions_and_not_otherwise() -> None:
    world = settled()
    told = [(event.type, event.reason) for event in world.events]
    assert told.count(("Normal", "AllReady")) == 2
    world.events.clear()
    world.reconcile()
    assert world.events == []
    world.edit("DecodePool", "d", engine={"dtype": "float16"})
    world.settle()
    # One of each pool: that it stalls and that it is not ready any more is the same to tell.
    assert [(event.type, event.reason) for event in world.events] == [("Warning", "Mismatch")] * 2


def test_a_note_on_what_cannot_be_checked() -> None:
    world = settled(prefill_pool(accelerator={"count": 4}), DECODE)
    message = world.condition("d", "Compatible")["message"]
    assert "prefill's tensor size 4 is above decode's 1" in message


def test_every_condition_and_reason_is_in_the_runbook() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conditions.md").read_text()
    missing = [
        str(one) for one in (*ConditionType, *Reason, *RouterReason) if f"`{one}`" not in page
    ]
    assert not missing
