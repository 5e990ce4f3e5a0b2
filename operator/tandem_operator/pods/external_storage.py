"""External storage in a pod: what the engine is told of the store, and what it needs for it. Pure.

The torch engine has its own flag. vLLM loads a connector of Tandem's: an init container copies its
packages onto a volume that PYTHONPATH of the engine names. The init container's image is pinned in
the ControllerRevision like the sidecar's: its default is no part of the user's spec, so an upgrade
of Tandem restarts no engine.

The bounds of the namespace change in running pods: they stand as JSON in an annotation, which the
operator patches. A downwardAPI volume makes a file of it, which engines read again.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from tandem_contract import labels
from tandem_contract import vllm_storage as storage
from tandem_contract.connectors import ConnectorName
from tandem_contract.quantities import quantity

from ..resources.pools import Pool
from ..resources.spec_parts import Storage
from .container_needs import ContainerNeeds, read_only_mount

STORAGE_FLAG: Final = "--kv-storage-config"
"""The torch engine's flag whose value is `torch_config`."""
STORE_KEYS_DIR: Final = "/var/run/tandem/kv-store"
"""Where the Secret with the keys of the external store is mounted."""
PACKAGES: Final = "tandem-python"
"""Name of the volume with the packages of vLLM's storage connector."""
PACKAGES_MOUNT: Final = {"name": PACKAGES, "mountPath": storage.PACKAGES_PATH}
"""That volume in the init container, which writes it."""

_BOUNDS: Final = "storage-bounds"
_BOUNDS_DIRECTORY: Final = "/var/run/tandem/storage-bounds"
_BOUNDS_NAME: Final = "bounds.json"
_BOUNDS_FIELD: Final = f"metadata.annotations['{labels.STORAGE_BOUNDS}']"
_BOUNDS_VOLUME: Final = {
    "name": _BOUNDS,
    "downwardAPI": {"items": [{"path": _BOUNDS_NAME, "fieldRef": {"fieldPath": _BOUNDS_FIELD}}]},
}


def bounds_text(store: Storage | None) -> str | None:
    """The annotation's value, as the engines' `bounds_file` has it; None without a store."""
    if store is None:
        return None
    bounds: dict[str, float] = {}
    if store.capacity is not None and (size := quantity(store.capacity)) is not None:
        bounds[storage.CAPACITY] = math.ceil(size)
    if store.max_age is not None:
        bounds[storage.MAX_AGE] = store.max_age
    return json.dumps(bounds)


def reads_bounds(template: Mapping[str, Any]) -> bool:
    """Whether the engine of a pod template reads the annotation; false for a template of an earlier
    operator, and where the user's `template` replaces the volume."""
    volumes = template["spec"].get("volumes")
    return isinstance(volumes, list) and _BOUNDS_VOLUME in volumes


def with_bounds(template: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    """The pod template with the annotation `text`, if its engine reads it."""
    if not reads_bounds(template):
        return template
    metadata = template["metadata"]
    annotations = {**(metadata.get("annotations") or {}), labels.STORAGE_BOUNDS: text}
    return {**template, "metadata": {**metadata, "annotations": annotations}}


def has_bounds_of(template: Mapping[str, Any], pool: Pool, rendered: Mapping[str, Any]) -> bool:
    """Whether pods of `template` can get the pool's bounds without being replaced.

    `rendered`: the pool's template as this operator renders it.
    """
    states_none = bounds_text(pool.spec.transfer.storage) in (None, json.dumps({}))
    return states_none or reads_bounds(template) or not reads_bounds(rendered)


def torch_config(pool: Pool) -> dict[str, Any] | None:
    """The value of the torch engine's `--kv-storage-config`; None without external storage."""
    return _settings(pool) if pool.spec.engine.type == "torch" else None


def vllm_link(pool: Pool) -> dict[str, Any] | None:
    """The configuration of vLLM's storage connector; None without external storage.

    Its role is `kv_both` on both sides of a hand-off: a prefill pod loads, too, and a decode pod
    stores its answers.
    """
    if not needs_packages(pool):
        return None
    return {
        "kv_connector": storage.CONNECTOR,
        "kv_connector_module_path": storage.MODULE_PATH,
        "kv_role": "kv_both",
        "kv_load_failure_policy": storage.LOAD_FAILURE_POLICY,
        "kv_connector_extra_config": _settings(pool) or {},
    }


def needs_packages(pool: Pool) -> bool:
    """Whether the pool's engine is a vLLM that loads the storage connector."""
    return pool.spec.engine.type == "vllm" and pool.spec.transfer.storage is not None


def engine_needs(pool: Pool) -> ContainerNeeds:
    """The keys of the store and the bounds as files, which the engine reads again when they
    change, and the packages of vLLM's connector."""
    needs = ContainerNeeds()
    if (store := pool.spec.transfer.storage) is None:
        return needs
    needs += read_only_mount(_BOUNDS_VOLUME, _BOUNDS_DIRECTORY)
    if store.credentials_secret_ref is not None:
        volume = {
            "name": "kv-store",
            "secret": {"secretName": store.credentials_secret_ref["name"]},
        }
        needs += read_only_mount(volume, STORE_KEYS_DIR)
    if needs_packages(pool):
        needs += ContainerNeeds(env={"PYTHONPATH": storage.PACKAGES_PATH})
        needs += read_only_mount({"name": PACKAGES, "emptyDir": {}}, storage.PACKAGES_PATH)
    return needs


def _settings(pool: Pool) -> dict[str, Any] | None:
    if (store := pool.spec.transfer.storage) is None:
        return None
    config = {
        storage.ENDPOINT: store.endpoint,
        storage.KV_NAMESPACE: store.kv_namespace,
        storage.PROTOCOL: store.protocol,
        storage.REGION: store.region,
        storage.CREDENTIALS_DIR: STORE_KEYS_DIR if store.credentials_secret_ref else None,
        storage.BOUNDS_FILE: f"{_BOUNDS_DIRECTORY}/{_BOUNDS_NAME}",
    }
    stated = {
        link.connector: link.extra_config for link in pool.spec.transfer.links
    }.get(ConnectorName.STORAGE, {})  # fmt: skip
    # What the pool leaves out is the engine's to choose. The user's extraConfig wins over what is
    # derived from other fields.
    return {**{key: value for key, value in config.items() if value is not None}, **stated}
