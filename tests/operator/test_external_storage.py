"""External storage in pools on a cluster: what changes pods, what they get while they run."""

import json
from typing import Any

import msgspec
import pytest

from tandem_contract import labels
from tandem_contract.vllm_storage import SETTINGS
from tandem_engine.tiers.settings import KvStorageConfig
from tandem_operator.observed import PodName, PoolKey, StorageReport
from tandem_operator.planning.status import status_events
from tandem_operator.resources.resolve import Defaults
from tandem_vllm_storage.settings import StorageSettings

from .pool_yaml import DECODE, prefill_pool
from .simulated_cluster import SimulatedCluster, named, settled

STORED = prefill_pool(transfer={"storage": {"endpoint": "http://store:8080"}})


def packages_images(cluster: SimulatedCluster) -> set[str]:
    """The images of the storage connector that the pinned templates name."""
    return {
        container["image"]
        for body in cluster.revisions.values()
        for container in body["data"]["spec"]["initContainers"]
        if container["name"] == "storage-packages"
    }


@pytest.mark.parametrize(
    ("engine", "settings"), [("torch", KvStorageConfig), ("vllm", StorageSettings)]
)
def test_the_operator_knows_every_setting_of_the_engines(
    engine: str, settings: type[msgspec.Struct]
) -> None:
    assert sorted(SETTINGS[engine]) == sorted(settings.__struct_fields__)


def test_an_upgrade_with_another_storage_image_restarts_no_engine() -> None:
    cluster = settled(STORED, DECODE)
    pods, images = set(cluster.pods), packages_images(cluster)
    assert len(images) == 1
    cluster.defaults = Defaults(vllm_storage_image="tandem-vllm-storage:next")
    cluster.settle()
    assert set(cluster.pods) == pods
    assert packages_images(cluster) == images
    assert cluster.condition("d", "UpdateAvailable")["status"] == "True"


def test_another_storage_image_of_the_pool_rolls_its_pods() -> None:
    cluster = settled(STORED, DECODE)
    before = set(cluster.pods)
    store = {"endpoint": "http://store:8080", "image": "registry/storage:2"}
    cluster.edit("PrefillPool", "p", transfer={"storage": store})
    cluster.settle()
    assert not before & set(cluster.pods)
    assert "registry/storage:2" in packages_images(cluster)


def stored(**store: Any) -> dict[str, Any]:
    """`transfer` with a store."""
    return {"storage": {"endpoint": "http://store:8080", **store}}


def bounds(cluster: SimulatedCluster) -> list[dict[str, Any]]:
    return [json.loads(pod.storage_bounds or "null") for pod in cluster.pods.values()]


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        ({"capacity": "2Gi"}, {"capacity_bytes": 2 << 30}),
        ({"capacity": 1000, "maxAge": "24h"}, {"capacity_bytes": 1000, "max_age_seconds": 86400.0}),
        ({"maxAge": "90m"}, {"max_age_seconds": 5400.0}),
    ],
)
def test_running_pods_of_both_sides_get_the_bounds_and_none_is_replaced(
    store: dict[str, Any], expected: dict[str, Any]
) -> None:
    cluster = settled(STORED, DECODE)
    assert bounds(cluster) == [{}] * len(cluster.pods)
    before, revisions = set(cluster.pods), set(cluster.revisions)
    compat = {pod.compat for pod in cluster.pods.values()}
    cluster.edit("PrefillPool", "p", transfer=stored(**store))
    cluster.settle()
    assert (set(cluster.pods), set(cluster.revisions)) == (before, revisions)
    assert bounds(cluster) == [expected] * len(cluster.pods)
    assert {pod.compat for pod in cluster.pods.values()} == compat
    assert cluster.condition("d", "Progressing")["reason"] == "Complete"
    assert cluster.condition("d", "UpdateAvailable")["status"] == "False"
    cluster.edit("PrefillPool", "p", transfer=stored())
    cluster.settle()
    assert bounds(cluster) == [{}] * len(before)


def test_new_pods_get_the_present_bounds() -> None:
    cluster = settled(STORED, DECODE)
    cluster.edit("PrefillPool", "p", transfer=stored(capacity="1Gi"))
    cluster.remove_pod(cluster.of("p")[0].name)
    cluster.settle()
    assert bounds(cluster) == [{"capacity_bytes": 1 << 30}] * len(cluster.pods)


def test_pods_of_an_unreadable_pool_keep_the_bounds_that_they_have() -> None:
    cluster = settled(named(STORED, "p", replicas=2), DECODE)
    cluster.edit("PrefillPool", "p", transfer=stored(capacity="1Gi"))
    cluster.settle()
    broken = {**stored(capacity="5Gi"), "requireRdma": True}
    cluster.edit("PrefillPool", "p", transfer=broken)
    cluster.remove_pod(cluster.of("p")[0].name)
    cluster.settle()
    assert bounds(cluster) == [{"capacity_bytes": 1 << 30}] * len(cluster.pods)


def test_pods_of_an_earlier_operator_stay_until_they_need_bounds() -> None:
    cluster = settled(STORED, DECODE)
    for body in cluster.revisions.values():
        template = body["data"]
        template["metadata"]["annotations"].pop(labels.STORAGE_BOUNDS)
        volumes = template["spec"]["volumes"]
        template["spec"]["volumes"] = [v for v in volumes if v["name"] != "storage-bounds"]
    for name in cluster.pods:
        cluster._change(name, storage_bounds=None)
    before = set(cluster.pods)
    cluster.settle()
    assert set(cluster.pods) == before
    assert bounds(cluster) == [None] * len(before)
    cluster.edit("PrefillPool", "p", transfer=stored(capacity="1Gi"))
    cluster.settle()
    assert not before & set(cluster.pods)
    assert bounds(cluster) == [{"capacity_bytes": 1 << 30}] * len(before)


def test_the_status_tells_whether_engines_can_use_the_store() -> None:
    cluster = settled(STORED, DECODE)
    key = PoolKey("default", "PrefillPool", "p")

    def condition() -> tuple[str, str, str]:
        cluster.settle()
        now = cluster.condition("p", "StorageReachable", "PrefillPool")
        return now["status"], now["reason"], now["message"]

    unused = ("Unknown", "StoreUnused", "no ready engine has used http://store:8080 yet")
    assert condition() == unused
    cluster.storage[key] = StorageReport(0)
    assert condition() == unused
    cluster.storage[key] = StorageReport(2)
    answers = ("True", "StoreAnswers", "the engines can use http://store:8080")
    assert condition() == answers
    before = cluster.status("p", "PrefillPool")
    words = "the store refused the credentials"
    cluster.storage[key] = StorageReport(2, (PodName("p-0"),), words)
    status, reason, message = condition()
    assert (status, reason) == ("False", "StoreFails")
    assert "1 of 2 engines cannot use http://store:8080" in message
    assert message.endswith(f"p-0: {words}")
    [event] = status_events(before, cluster.status("p", "PrefillPool"))
    assert (event.type, event.reason) == ("Warning", "StoreFails")
    # Requests are computed instead: the pool is as ready as before.
    assert cluster.condition("p", "Ready", "PrefillPool")["status"] == "True"
    # A restarted operator has asked no engine yet.
    cluster.storage.clear()
    assert condition()[:2] == ("False", "StoreFails")


def test_pools_without_a_store_have_no_such_condition() -> None:
    cluster = settled()
    types = [condition["type"] for condition in cluster.status("d")["conditions"]]
    assert "StorageReachable" not in types
