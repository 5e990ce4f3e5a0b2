"""External storage in pools on a cluster: what an upgrade changes, and what changes pods."""

from tandem_operator.resources.resolve import Defaults

from .pool_yaml import DECODE, prefill_pool
from .simulated_cluster import SimulatedCluster, settled

STORED = prefill_pool(transfer={"storage": {"endpoint": "http://store:8080"}})


def packages_images(cluster: SimulatedCluster) -> set[str]:
    """The images of the storage connector that the pinned templates name."""
    return {
        container["image"]
        for body in cluster.revisions.values()
        for container in body["data"]["spec"]["initContainers"]
        if container["name"] == "storage-packages"
    }


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
