"""Command line, environment and volumes of an engine container, for vLLM and for the torch engine.

An engine listens at the pod's own address and never at 127.0.0.1: where pods run as processes of
one machine, each has its address and standard ports, and nothing else tells them apart.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tandem_contract import ports

from .pools import DecodePool, PrefillPool
from .spec import EngineSpec, ModelSpec, Seconds

POD_IP: Final = "$(POD_IP)"
ENGINE_ID: Final = "$(POD_NAME)-$(POD_UID)"
"""Another for each incarnation: a pod whose engine ended is replaced, never restarted in place."""

_CLAIM_MOUNT: Final = "/model"
_HOME: Final = "/home/tandem"
_CONNECTORS: Final = {
    "nixl": "NixlConnector", "nixl-push": "NixlPushConnector", "lmcache": "LMCacheConnectorV1",
    "mooncake": "MooncakeConnector", "offloading": "OffloadingConnector",
    "multi": "MultiConnector",
}  # fmt: skip
"""transfer.connector → vLLM's class."""
_LEASED: Final = frozenset({"nixl", "nixl-push"})

Pool = PrefillPool | DecodePool


@dataclass(frozen=True)
class Mounted:
    """What a container needs beside its command: environment, mounts, and the pod's volumes."""

    env: list[dict[str, Any]] = field(default_factory=list)
    mounts: list[dict[str, Any]] = field(default_factory=list)
    volumes: list[dict[str, Any]] = field(default_factory=list)

    def __add__(self, other: "Mounted") -> "Mounted":
        return Mounted(
            self.env + other.env, self.mounts + other.mounts, self.volumes + other.volumes
        )


def command(pool: Pool, port: int, *, hands_off: bool) -> tuple[list[str], list[str]]:
    """Command and arguments of the engine of `pool`, serving at `port`.

    `hands_off`: whether the pool has a peer to hand KV to or take it from.
    """
    spec = pool.spec
    model = model_argument(spec.model)
    names = spec.model.served_names
    if spec.engine.type == "torch":
        words, args = ["tandem-engine"], ["--model", model]
        args += [word for name in names for word in ("--served-model-name", name)]
    else:
        words, args = ["vllm", "serve"], [model, "--served-model-name", *names]
    args += ["--host", POD_IP, "--port", str(port)]
    for flag, value in _flags(pool):
        args += [flag] if value is True else [flag, str(value)]
    args += ["--kv-events-config", _json(_kv_events_config(pool))]
    if hands_off:
        args += ["--kv-transfer-config", _json(_kv_transfer_config(pool))]
    return words, [*args, *spec.engine.extra_args]


def environment(pool: Pool) -> list[dict[str, Any]]:
    """Variables of the engine container; those of the pool's spec come last."""
    return [
        *downward_api(),
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": POD_IP},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(pool.spec.transfer.side_channel_port)},
        *needs(pool).env,
        *pool.spec.engine.env,
    ]


def downward_api() -> list[dict[str, Any]]:
    """POD_IP, POD_NAME and POD_UID."""
    paths = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name", "POD_UID": "metadata.uid"}
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in paths.items()
    ]


def model_argument(model: ModelSpec) -> str:
    """What the engine is told to load: a directory in the container, or a repository."""
    source = model.source
    if source.path is not None:
        return source.path
    if source.pvc is not None:
        return f"{_CLAIM_MOUNT}/{source.pvc.path}" if source.pvc.path else _CLAIM_MOUNT
    repository = source.huggingface.repository if source.huggingface else None
    return repository or model.name


def needs(pool: Pool) -> Mounted:
    """Volumes with their mounts and the variables that go with them."""
    model = _model_volume(pool.spec.model)
    return model if pool.spec.engine.type == "torch" else model + _vllm_directories()


def _model_volume(model: ModelSpec) -> Mounted:
    source = model.source
    if source.path is not None:
        # The same path inside and outside, so that the command line reads as it does on the host.
        volume = {"name": "model", "hostPath": {"path": source.path, "type": "Directory"}}
        return _mounted_read_only(volume, source.path)
    if source.pvc is not None:
        claim = {"claimName": source.pvc.claim_name, "readOnly": True}
        return _mounted_read_only({"name": "model", "persistentVolumeClaim": claim}, _CLAIM_MOUNT)
    token = source.huggingface.token_secret_ref if source.huggingface else None
    if token is None:
        return Mounted()
    reference = {"secretKeyRef": {"name": token.name, "key": token.key}}
    return Mounted(env=[{"name": "HF_TOKEN", "valueFrom": reference}])


def _mounted_read_only(volume: dict[str, Any], path: str) -> Mounted:
    mount = {"name": volume["name"], "mountPath": path, "readOnly": True}
    return Mounted(mounts=[mount], volumes=[volume])


def _vllm_directories() -> Mounted:
    """A home to write caches to, its image having none for our user, and shared memory for ranks.

    USER, because torch asks for the user's name and the image knows none for our number.
    """
    return Mounted(
        env=[{"name": "HOME", "value": _HOME}, {"name": "USER", "value": "tandem"}],
        mounts=[
            {"name": "home", "mountPath": _HOME},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - where engines look for it
        ],
        volumes=[
            {"name": "home", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    )


def _flags(pool: Pool) -> Iterator[tuple[str, object]]:
    """Flags with their values; those left to the engine are left out."""
    engine = pool.spec.engine
    every = [
        ("--dtype", _unless(engine.dtype, "auto")),
        ("--block-size", engine.block_size),
        ("--max-model-len", engine.max_model_len),
        ("--max-num-seqs", engine.max_num_seqs),
        ("--max-num-batched-tokens", engine.max_num_batched_tokens),
        *(_vllm_flags(pool, engine) if engine.type == "vllm" else _torch_flags(pool)),
    ]
    yield from ((flag, value) for flag, value in every if value is not None and value is not False)


def _torch_flags(pool: Pool) -> Iterator[tuple[str, object]]:
    # Where pods are processes, a GPU that is nobody's in the pools is in sight all the same.
    yield "--device", None if pool.spec.accelerator.count else "cpu"


def _vllm_flags(pool: Pool, engine: EngineSpec) -> Iterator[tuple[str, object]]:
    sizes, model = pool.spec.parallelism, pool.spec.model
    yield "--revision", model.revision
    yield "--kv-cache-dtype", _unless(engine.kv_cache_dtype, "auto")
    yield "--gpu-memory-utilization", engine.gpu_memory_utilization
    yield "--tensor-parallel-size", _unless(sizes.tensor, 1)
    yield "--pipeline-parallel-size", _unless(sizes.pipeline, 1)
    yield "--data-parallel-size", _unless(sizes.data, 1)
    yield "--enable-expert-parallel", sizes.expert
    yield "--all2all-backend", sizes.all2all_backend
    yield "--enable-lora", bool(model.lora_adapters)
    for adapter in model.lora_adapters:
        yield "--lora-modules", _json({"name": adapter.name, "path": adapter.path})


def _unless(value: object, default: object) -> object:
    return None if value == default else value


def _kv_events_config(pool: Pool) -> dict[str, Any]:
    # vLLM binds an endpoint with a star and connects to any other. The torch engine runs where a
    # star would be every pod's at once, and binds its own address.
    host = POD_IP if pool.spec.engine.type == "torch" else "*"
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{host}:{ports.KV_EVENTS}",
        "replay_endpoint": f"tcp://{host}:{ports.KV_EVENTS_REPLAY}",
        "topic": f"kv@$(POD_NAME)@{pool.spec.model.name}",
    }


def _kv_transfer_config(pool: Pool) -> dict[str, Any]:
    transfer = pool.spec.transfer
    role = "kv_producer" if isinstance(pool, PrefillPool) else "kv_consumer"
    config: dict[str, Any] = {
        "kv_connector": _CONNECTORS[transfer.connector],
        "kv_role": role,
        "engine_id": ENGINE_ID,
        # Said even where it is ours already: vLLM's own default has changed before.
        "kv_load_failure_policy": transfer.load_failure_policy,
    }
    if transfer.buffer_device is not None:
        config["kv_buffer_device"] = transfer.buffer_device
    extra = _leased(transfer.connector, transfer.lease_duration)
    if transfer.backends:
        extra["backends"] = list(transfer.backends)
    if transfer.connectors:
        extra["connectors"] = [
            {
                "kv_connector": _CONNECTORS[link.connector],
                "kv_role": role,
                "kv_connector_extra_config": {
                    **_leased(link.connector, transfer.lease_duration),
                    **link.extra_config,
                },
            }
            for link in transfer.connectors
        ]
    return {**config, "kv_connector_extra_config": extra}


def _leased(connector: str, lease: Seconds) -> dict[str, Any]:
    if connector not in _LEASED:
        return {}
    return {"kv_lease_duration": int(lease) if lease.is_integer() else float(lease)}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
