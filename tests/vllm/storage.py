"""The storage connector's packages and configuration for real vLLM in tests."""

import importlib.util
import json
from pathlib import Path
from typing import Any, Final

from tandem_contract import vllm_storage
from tandem_operator.pods.connectors import TRANSFER_FLAG

from .engines import Vllm

CHUNK: Final = 256
"""Tokens of a chunk: the default."""
_PACKAGES: Final = ("tandem_contract", "tandem_kvstore", "tandem_vllm_storage", "xxhash", "obstore")


def packages(directory: Path) -> str:
    """A directory for PYTHONPATH with what vLLM's own environment does not have."""
    target = directory / "python"
    if not target.exists():
        target.mkdir()
        for name in _PACKAGES:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            source = Path(spec.origin).parent
            (target / name).symlink_to(source)
    return str(target)


def transfer_config(endpoint: str, **extra: Any) -> str:
    """`--kv-transfer-config` of an engine that loads and saves."""
    return json.dumps(
        {
            "kv_connector": vllm_storage.CONNECTOR,
            "kv_connector_module_path": vllm_storage.MODULE_PATH,
            "kv_role": "kv_both",
            "kv_load_failure_policy": vllm_storage.LOAD_FAILURE_POLICY,
            "kv_connector_extra_config": {"endpoint": endpoint, **extra},
        }
    )


def data_objects(store: Path) -> list[Path]:
    """Files with KV: of chunks so small, the data follow the manifest, which a hash names."""
    return [path for path in store.rglob("?" * 64) if path.is_file()]


def add_storage(engine: Vllm, endpoint: str, directory: Path) -> None:
    """Put the storage connector behind the one that the operator configured for the engine."""
    container = engine.container_document
    args = container["args"]
    index = args.index(TRANSFER_FLAG) + 1
    first = json.loads(args[index])
    engine_id = first.pop("engine_id")
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": first["kv_role"],
        "kv_load_failure_policy": vllm_storage.LOAD_FAILURE_POLICY,
        "kv_buffer_device": first["kv_buffer_device"],
        "engine_id": engine_id,
        "kv_connector_extra_config": {"connectors": [first, json.loads(transfer_config(endpoint))]},
    }
    args[index] = json.dumps(multi)
    env = {"PYTHONPATH": packages(directory), "VLLM_SERVER_DEV_MODE": "1"}
    container["env"] += [{"name": name, "value": value} for name, value in env.items()]
