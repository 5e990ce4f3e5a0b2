"""The storage connector's packages and configuration for real vLLM in tests."""

import json
from pathlib import Path
from typing import Any, Final

from tandem_contract import vllm_storage

from ..images.dockerfile import build_packages
from .engines import VENV, Vllm

CHUNK: Final = 256
"""Tokens of a chunk: the default."""


def packages(directory: Path) -> str:
    """A directory for PYTHONPATH with what the init container brings."""
    target = directory / "python"
    if not target.exists():
        build_packages(target, "--python", str(VENV / "bin/python"))
    return str(target)


def transfer_config(endpoint: str, role: str = "kv_both", **extra: Any) -> str:
    """`--kv-transfer-config` of an engine that loads and saves, or as `role` says."""
    return json.dumps(
        {
            "kv_connector": vllm_storage.CONNECTOR,
            "kv_connector_module_path": vllm_storage.MODULE_PATH,
            "kv_role": role,
            "kv_load_failure_policy": vllm_storage.LOAD_FAILURE_POLICY,
            "kv_connector_extra_config": {"endpoint": endpoint, **extra},
        }
    )


def data_objects(store: Path) -> list[Path]:
    """Files with KV: of small chunks, the data follow the manifest, which a hash names; of others,
    they are objects of their own."""
    own = [path for path in store.rglob("?" * 64 + "-*") if path.is_file()]
    return own or [path for path in store.rglob("?" * 64) if path.is_file()]


def mount_packages(engine: Vllm, directory: Path) -> None:
    """Put the packages where PYTHONPATH of the rendered container says, which is no path here."""
    env = engine.container_document["env"]
    [variable] = [entry for entry in env if entry["name"] == "PYTHONPATH"]
    assert variable["value"] == vllm_storage.PACKAGES_PATH
    variable["value"] = packages(directory)
    env.append({"name": "VLLM_SERVER_DEV_MODE", "value": "1"})
