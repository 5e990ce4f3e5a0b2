"""Command line, environment and volumes of an engine container, for vLLM and for the torch engine.

An engine listens at the pod's own address and never at 127.0.0.1: where pods run as processes of
one machine, each has its address and standard ports, and nothing else tells them apart.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tandem_contract import ports
from tandem_contract.durations import format_duration

from ..resources import versions
from ..resources.pools import PrefillPool
from ..resources.spec import EngineSpec, LoraAdapter, ModelSpec, PoolSpec
from . import connectors
from .connectors import POD_IP, Pool
from .tuning import tuning

SHUTDOWN: Final = 10
"""Seconds an engine has to end after a drain; within the pod's grace beyond `drain.timeout`."""

_CLAIM_MOUNT: Final = "/model"
_HOME: Final = "/home/tandem"
_SHM_OF_A_RANK: Final = 2
"""GiB: NCCL's and vLLM's own queues between ranks of one node."""
_LOADED_AT_ONCE: Final = 8
"""Adapters in one batch at most: each takes memory of the accelerator."""


@dataclass(frozen=True)
class Mounted:
    """What a container needs beside its command: environment, mounts, and the pod's volumes."""

    env: dict[str, Any] = field(default_factory=dict)
    """Name → value, or a mapping of where it comes from."""
    mounts: list[dict[str, Any]] = field(default_factory=list)
    volumes: list[dict[str, Any]] = field(default_factory=list)

    def __add__(self, other: "Mounted") -> "Mounted":
        return Mounted(
            self.env | other.env, self.mounts + other.mounts, self.volumes + other.volumes
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
    args += _lora(spec.model.lora_adapters)
    args += ["--kv-events-config", _json(_kv_events_config(pool))]
    if hands_off:
        args += ["--kv-transfer-config", _json(connectors.transfer_config(pool))]
    return words, [*args, *spec.engine.extra_args]


def environment(pool: Pool, *, hands_off: bool) -> list[dict[str, Any]]:
    """Variables of the engine container; those of the pool's spec come last and win."""
    own: dict[str, Any] = {}
    if hands_off:
        own |= connectors.environment(pool)
    own |= _all2all(pool)
    own |= needs(pool).env
    users = {variable["name"] for variable in pool.spec.engine.env}
    return [
        *downward_api(),
        *(
            {"name": name, "value" if isinstance(value, str) else "valueFrom": value}
            for name, value in own.items()
            if name not in users
        ),
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
    """What the engine is told to load: a directory in the container, a repository, or `tiny`."""
    source = model.source
    if source.tiny is not None:
        return f"tiny:{source.tiny.seed}"
    if source.path is not None:
        return source.path
    if source.pvc is not None:
        return f"{_CLAIM_MOUNT}/{source.pvc.path}" if source.pvc.path else _CLAIM_MOUNT
    repository = source.huggingface.repository if source.huggingface else None
    return repository or model.name


def needs(pool: Pool) -> Mounted:
    """Volumes with their mounts and the variables that go with them."""
    model = _model_volume(pool.spec.model)
    if pool.spec.engine.type == "torch":
        return model + _writable_home(temporary=True)
    return model + _writable_home(temporary=False) + _shared_memory(pool.spec)


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
    return Mounted(env={"HF_TOKEN": {"secretKeyRef": {"name": token.name, "key": token.key}}})


def _mounted_read_only(volume: dict[str, Any], path: str) -> Mounted:
    mount = {"name": volume["name"], "mountPath": path, "readOnly": True}
    return Mounted(mounts=[mount], volumes=[volume])


def _writable_home(*, temporary: bool) -> Mounted:
    """A home for downloads and caches, the images having none for our user.

    USER, because torch asks for the user's name and the image knows none for our number.
    `temporary`: temporary files lie there too, where the root file system is read-only.
    """
    env = {"HOME": _HOME, "USER": "tandem"}
    return Mounted(
        env={**env, "TMPDIR": _HOME} if temporary else env,
        mounts=[{"name": "home", "mountPath": _HOME}],
        volumes=[{"name": "home", "emptyDir": {}}],
    )


def _shared_memory(spec: PoolSpec) -> Mounted:
    """For the queues between ranks and for offloaded KV: the container's own 64 MiB are too few."""
    sizes = spec.parallelism
    ranks = sizes.tensor * sizes.pipeline * sizes.data
    offloaded = math.ceil(connectors.offloaded_bytes(spec) / 1024**3)
    limit = f"{_SHM_OF_A_RANK * ranks + offloaded}Gi"
    return Mounted(
        mounts=[{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - where engines look for it
        volumes=[{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}],
    )


def _flags(pool: Pool) -> Iterator[tuple[str, object]]:
    """Flags with their values; those left to the engine are left out."""
    engine = pool.spec.engine
    every = [
        ("--dtype", _unless(engine.dtype, "auto")),
        ("--block-size", engine.block_size),
        ("--max-model-len", engine.max_model_len),
        *(_vllm_flags(pool, engine) if engine.type == "vllm" else _torch_flags(pool)),
    ]
    yield from ((flag, value) for flag, value in every if value is not None and value is not False)


def _torch_flags(pool: Pool) -> Iterator[tuple[str, object]]:
    engine, drain = pool.spec.engine, pool.spec.drain.timeout
    yield "--max-num-seqs", engine.max_num_seqs
    yield "--max-num-batched-tokens", engine.max_num_batched_tokens
    # Where pods are processes, a GPU that is nobody's in the pools is in sight all the same.
    yield "--device", None if pool.spec.accelerator.count else "cpu"
    # A prefill pod drains by itself: after SIGTERM it serves out, and waits for readers of its KV.
    alone = isinstance(pool, PrefillPool)
    yield "--shutdown-timeout", format_duration(drain) if alone else f"{SHUTDOWN}s"


def _vllm_flags(pool: Pool, engine: EngineSpec) -> Iterator[tuple[str, object]]:
    spec, best = pool.spec, tuning(pool.spec, pool.role)
    version, sizes = versions.release(engine.version), spec.parallelism
    yield "--max-num-seqs", best.max_num_seqs
    yield "--max-num-batched-tokens", best.max_num_batched_tokens
    yield "--revision", spec.model.revision
    yield "--kv-cache-dtype", _unless(engine.kv_cache_dtype, "auto")
    yield "--gpu-memory-utilization", best.gpu_memory_utilization
    yield "--enable-prefix-caching", best.prefix_caching
    yield "--tensor-parallel-size", _unless(sizes.tensor, 1)
    yield "--pipeline-parallel-size", _unless(sizes.pipeline, 1)
    yield "--data-parallel-size", _unless(sizes.data, 1)
    yield "--enable-expert-parallel", sizes.expert
    if versions.ALL2ALL_FLAG.has(version):
        yield "--all2all-backend", best.all2all_backend
    if versions.SHUTDOWN_TIMEOUT.has(version):
        yield "--shutdown-timeout", SHUTDOWN


def _all2all(pool: Pool) -> dict[str, str]:
    """The exchange between experts for a vLLM that has no flag for it."""
    engine = pool.spec.engine
    if engine.type != "vllm" or versions.ALL2ALL_FLAG.has(versions.release(engine.version)):
        return {}
    backend = tuning(pool.spec, pool.role).all2all_backend
    return {"VLLM_ALL2ALL_BACKEND": backend} if backend else {}


def _lora(adapters: tuple[LoraAdapter, ...]) -> list[str]:
    """One flag with all adapters: a second one would replace the first."""
    if not adapters:
        return []
    modules = [_json({"name": adapter.name, "path": adapter.path}) for adapter in adapters]
    kept, at_once = str(len(adapters)), str(min(len(adapters), _LOADED_AT_ONCE))
    flags = ["--enable-lora", "--max-loras", at_once, "--max-cpu-loras", kept]
    return [*flags, "--lora-modules", *modules]


def _unless(value: object, default: object) -> object:
    return None if value == default else value


def _kv_events_config(pool: Pool) -> dict[str, Any]:
    # The star: vLLM connects to an endpoint without one. The torch engine binds its own host.
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.KV_EVENTS}",
        "replay_endpoint": f"tcp://*:{ports.KV_EVENTS_REPLAY}",
        "topic": f"kv@$(POD_NAME)@{pool.spec.model.name}",
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
