"""Pools whose revisions and pods the older version wrote, as objects of a cluster."""

import json
from typing import Any

from tandem_contract.custom_resources import DECODE_POOL
from tandem_kube.client import Api
from tandem_kube.resources import CONTROLLER_REVISIONS, PODS, Object

from ..operator.operating import DECODE_POOLS, PREFILL_POOLS
from ..operator.test_golden_manifests import POOLS
from .history import file_of_older_version


def older_sets() -> dict[str, Any]:
    """What the older version created for each case of `POOLS`: `revisions` and the `metadata` of
    `pods`. Where the clone lacks that version, the test is skipped."""
    text = file_of_older_version("tests/operator/golden/manifests.json")
    sets: dict[str, Any] = json.loads(text)["pools"]
    return sets


async def create_older_set(
    api: Api, namespace: str, case: str, images: dict[str, str] | None = None
) -> dict[str, str]:
    """Create a case's pools, and the revisions and pods that the older version made of them.

    `images` replaces the images of containers, by their name, so that the pods can run. Returns
    pod name → uid.
    """
    older = older_sets()[case]
    owners = {}
    for pool in POOLS[case]:
        resource = DECODE_POOLS if pool["kind"] == DECODE_POOL else PREFILL_POOLS
        created = await api.create(resource, _in(namespace, pool))
        owners[pool["kind"]] = created["metadata"]["uid"]
    templates = {}
    for revision in older["revisions"]:
        body = _in(namespace, revision, owners)
        _replace_images(body["data"]["spec"], images or {})
        templates[body["metadata"]["name"]] = body["data"]["spec"]
        await api.create(CONTROLLER_REVISIONS, body)
    uids = {}
    for metadata in older["pods"]:
        spec = templates[metadata["name"].rpartition("-")[0]]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        created = await api.create(PODS, _in(namespace, pod, owners))
        uids[metadata["name"]] = created["metadata"]["uid"]
    return uids


def _in(namespace: str, body: Object, owners: dict[str, str] | None = None) -> dict[str, Any]:
    """The object in this namespace, its owners with the uids that they have there."""
    metadata = {**body["metadata"], "namespace": namespace}
    if owners:
        metadata["ownerReferences"] = [
            {**owner, "uid": owners[owner["kind"]]} for owner in metadata["ownerReferences"]
        ]
    return {**body, "metadata": metadata}


def _replace_images(spec: Any, images: dict[str, str]) -> None:
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container["image"] = images.get(container["name"], container["image"])
