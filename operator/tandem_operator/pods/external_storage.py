"""External storage in a pod: what the engine is told of the store, and what it needs for it. Pure.

The torch engine has its own flag. vLLM loads a connector of Tandem's: an init container copies its
packages onto a volume that PYTHONPATH of the engine names. The init container's image is pinned in
the ControllerRevision like the sidecar's: its default is no part of the user's spec, so an upgrade
of Tandem restarts no engine.
"""

from typing import Any, Final

from tandem_contract import vllm_storage as storage
from tandem_contract.connectors import ConnectorName

from ..resources.pools import Pool
from .container_needs import ContainerNeeds, read_only_mount

STORAGE_FLAG: Final = "--kv-storage-config"
"""The torch engine's flag whose value is `torch_config`."""
STORE_KEYS_DIR: Final = "/var/run/tandem/kv-store"
"""Where the Secret with the keys of the external store is mounted."""
PACKAGES: Final = "tandem-python"
"""Name of the volume with the packages of vLLM's storage connector."""
PACKAGES_MOUNT: Final = {"name": PACKAGES, "mountPath": storage.PACKAGES_PATH}
"""That volume in the init container, which writes it."""


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
    stated = {
        link.connector: link.extra_config for link in pool.spec.transfer.links
    }.get(ConnectorName.STORAGE, {})  # fmt: skip
    return {
        "kv_connector": storage.CONNECTOR,
        "kv_connector_module_path": storage.MODULE_PATH,
        "kv_role": "kv_both",
        "kv_load_failure_policy": storage.LOAD_FAILURE_POLICY,
        # The user's extraConfig wins over what is derived from other fields.
        "kv_connector_extra_config": {**(_settings(pool) or {}), **stated},
    }


def needs_packages(pool: Pool) -> bool:
    """Whether the pool's engine is a vLLM that loads the storage connector."""
    return pool.spec.engine.type == "vllm" and pool.spec.transfer.storage is not None


def engine_needs(pool: Pool) -> ContainerNeeds:
    """The keys of the store as files, which the engine reads again when they change, and the
    packages of vLLM's connector."""
    needs = ContainerNeeds()
    store = pool.spec.transfer.storage
    if store is not None and store.credentials_secret_ref is not None:
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
        storage.CREDENTIALS_DIR: STORE_KEYS_DIR if store.credentials_secret_ref else None,
    }
    # What the pool leaves out is the engine's to choose.
    return {key: value for key, value in config.items() if value is not None}
