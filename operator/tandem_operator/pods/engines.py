"""Command line, environment and volumes of an engine container, for vLLM and for the torch engine.

An engine listens at the pod's own address and never at 127.0.0.1: `tandem up` runs pods as
processes of one machine, where each pod has its own address and all use the standard ports.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tandem_contract import ports
from tandem_contract.durations import format_duration
from tandem_contract.paths import Role

from ..resources import vllm_versions
from ..resources.pools import DecodePool, Pool, PrefillPool
from ..resources.spec import EngineSpec, LoraAdapter, ModelSpec, PoolSpec, S3Source
from . import connectors, external_storage
from .connectors import POD_IP
from .container_needs import ContainerNeeds, read_only_mount
from .models import model_argument, model_mount

SHUTDOWN: Final = 10
"""Seconds an engine has to end after a drain; within the pod's grace beyond `drain.timeout`."""

_CACHE_MOUNT: Final = "/model-cache"
HOME: Final = "/home/tandem"
_SHM_PER_RANK: Final = 2
"""GiB of /dev/shm for the queues of NCCL and vLLM between the ranks of one node."""
_MAX_LORAS: Final = 8
"""Most adapters in one batch (`--max-loras`): each takes memory of the accelerator."""


@dataclass(frozen=True)
class Tuning:
    """Values of vLLM's flags; None leaves a flag to vLLM."""

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    prefix_caching: bool | None = None
    all2all_backend: str | None = None


_PARSER_FLAGS: Final = frozenset({"--reasoning-parser", "--tool-call-parser"})
_NO_TUNING: Final = Tuning()
_ROLE_TUNING: Final = {
    Role.PREFILL: Tuning(
        max_num_batched_tokens=32768,
        gpu_memory_utilization=0.85,
        all2all_backend="deepep_high_throughput",
    ),
    Role.DECODE: Tuning(
        max_num_seqs=512,
        gpu_memory_utilization=0.95,
        prefix_caching=True,
        all2all_backend="deepep_low_latency",
    ),
}
"""`engine.tuning: auto`. Prefill is bound by compute: large steps, and little memory for KV, which
decode engines soon take over. Decode is bound by memory: many sequences and as much KV cache as
possible. Unified pools keep vLLM's defaults."""


def tuning(spec: PoolSpec, role: Role) -> Tuning:
    """The flags of a pool's vLLM: what the user chose, else what suits `role`.

    On CPU nothing is chosen: a share of the accelerator's memory means nothing there.
    """
    engine, sizes = spec.engine, spec.parallelism
    auto = engine.tuning == "auto" and spec.accelerator.count > 0
    best = _ROLE_TUNING.get(role, _NO_TUNING) if auto else _NO_TUNING
    # Experts are exchanged between data-parallel ranks only.
    exchanges_experts = sizes.expert and sizes.data > 1
    return Tuning(
        engine.max_num_batched_tokens or best.max_num_batched_tokens,
        engine.max_num_seqs or best.max_num_seqs,
        engine.gpu_memory_utilization or best.gpu_memory_utilization,
        best.prefix_caching,
        sizes.all2all_backend or (best.all2all_backend if exchanges_experts else None),
    )


def command(pool: Pool, port: int, *, handoff: bool) -> tuple[list[str], list[str]]:
    """Command and arguments of the engine of `pool`, serving at `port`.

    `handoff`: whether the pool has a peer that it hands KV to or takes KV from.
    """
    spec = pool.spec
    model = model_argument(pool)
    names = spec.model.served_names
    if spec.engine.type == "torch":
        words, args = ["tandem-engine"], ["--model", model]
        args += [word for name in names for word in ("--served-model-name", name)]
    else:
        words, args = ["vllm", "serve"], [model, "--served-model-name", *names]
    args += ["--host", POD_IP, "--port", str(port)]
    for flag, value in _flags(pool):
        args += [flag] if value is True else [flag, str(value)]
    args += _lora_flags(spec.model.lora_adapters)
    args += ["--kv-events-config", _json(_kv_events_config(pool))]
    transfer = connectors.transfer_config(pool) if handoff else connectors.offloading_config(pool)
    if transfer is not None:
        args += [connectors.TRANSFER_FLAG, _json(transfer)]
    if (storage := external_storage.torch_config(pool)) is not None:
        args += [external_storage.STORAGE_FLAG, _json(storage)]
    args += connectors.transfer_key_flags(pool)
    # Last, because the engine takes the last value of a flag: the user's wins.
    return words, [*args, *spec.engine.extra_args]


def environment(pool: Pool, *, handoff: bool) -> list[dict[str, Any]]:
    """Variables of the engine container; those of the pool's spec replace ours of the same name."""
    variables: dict[str, Any] = {}
    if handoff:
        variables |= connectors.connector_variables(pool)
    variables |= _all2all_variable(pool)
    variables |= engine_needs(pool).env
    users = {variable["name"] for variable in pool.spec.engine.env}
    return [
        *downward_api(),
        *env_vars({name: value for name, value in variables.items() if name not in users}),
        *pool.spec.engine.env,
    ]


def env_vars(variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`env` of a container from a mapping as in `ContainerNeeds`."""
    return [
        {"name": name, "value" if isinstance(value, str) else "valueFrom": value}
        for name, value in variables.items()
    ]


def downward_api() -> list[dict[str, Any]]:
    """POD_IP, POD_NAME and POD_UID."""
    paths = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name", "POD_UID": "metadata.uid"}
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in paths.items()
    ]


def engine_needs(pool: Pool) -> ContainerNeeds:
    """Volumes, mounts and variables for the model, the home directory, shared memory and external
    storage."""
    model, storage = (
        _model_volume(pool.spec.model, model_mount(pool)),
        external_storage.engine_needs(pool),
    )
    if pool.spec.engine.type == "torch":
        home = _writable_home(temporary_files=True)
        return model + home + storage + connectors.transfer_key_needs(pool)
    return model + _writable_home(temporary_files=False) + _shared_memory(pool.spec) + storage


def download_needs(pool: Pool) -> ContainerNeeds:
    """What a container needs that downloads the model into the cache of the pool's engines."""
    return _hub_needs(pool.spec.model) + _writable_home(temporary_files=True)


def _model_volume(model: ModelSpec, mount: str) -> ContainerNeeds:
    source = model.source
    if source.path is not None:
        # Same path in the container as on the host: the command line reads the same in both.
        volume = {"name": "model", "hostPath": {"path": source.path, "type": "Directory"}}
        return read_only_mount(volume, source.path)
    if source.pvc is not None:
        claim = {"claimName": source.pvc.claim_name, "readOnly": True}
        return read_only_mount({"name": "model", "persistentVolumeClaim": claim}, mount)
    if source.oci is not None:
        policy = {"pullPolicy": source.oci.pull_policy} if source.oci.pull_policy else {}
        image = {"reference": source.oci.reference, **policy}
        return read_only_mount({"name": "model", "image": image}, mount)
    if source.s3 is not None:
        return ContainerNeeds(env=_s3_variables(source.s3))
    return _hub_needs(model)


def _hub_needs(model: ModelSpec) -> ContainerNeeds:
    """The token for the Hugging Face hub, and the shared directory for what is downloaded."""
    source = model.source
    cache = ContainerNeeds()
    if model.cache is not None:
        claim = {"claimName": model.cache.claim_name}
        cache = ContainerNeeds(
            # Not HFHOME: the token and other state stay in the pod's own home directory.
            env={"HF_HUB_CACHE": _CACHE_MOUNT},
            mounts=[{"name": "model-cache", "mountPath": _CACHE_MOUNT}],
            volumes=[{"name": "model-cache", "persistentVolumeClaim": claim}],
        )
    token = source.huggingface.token_secret_ref if source.huggingface else None
    if token is None:
        return cache
    reference = {"secretKeyRef": {"name": token.name, "key": token.key}}
    return cache + ContainerNeeds(env={"HF_TOKEN": reference})


def _s3_variables(source: S3Source) -> dict[str, Any]:
    """Variables of the AWS SDK, which lists the model's files, and of the Run:ai streamer."""
    env: dict[str, Any] = {}
    if source.region:
        env["AWS_DEFAULT_REGION"] = source.region
    if source.endpoint:
        env["AWS_ENDPOINT_URL"] = source.endpoint
        # Stores other than AWS often have no host name for each bucket.
        env["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
    if source.credentials_secret_ref:
        # Credentials are given: the SDK must not wait for AWS's metadata service.
        env["AWS_EC2_METADATA_DISABLED"] = "true"
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            secret = source.credentials_secret_ref.name
            env[key] = {"secretKeyRef": {"name": secret, "key": key}}
    return env


def _writable_home(*, temporary_files: bool) -> ContainerNeeds:
    """A home directory for downloads and caches; the images have none for the pod's user.

    USER is set because torch looks up the user's name, and the image has none for its number.
    `temporary_files`: TMPDIR is there too, for a container with a read-only root file system.
    """
    env = {"HOME": HOME, "USER": "tandem"}
    return ContainerNeeds(
        env={**env, "TMPDIR": HOME} if temporary_files else env,
        mounts=[{"name": "home", "mountPath": HOME}],
        volumes=[{"name": "home", "emptyDir": {}}],
    )


def _shared_memory(spec: PoolSpec) -> ContainerNeeds:
    """Shared memory for the queues between ranks and for offloaded KV; the default is 64 MiB."""
    sizes = spec.parallelism
    ranks = sizes.tensor * sizes.pipeline * sizes.data
    # Offloaded KV lies in /dev/shm as well, so the limit must include it.
    offloaded = math.ceil(connectors.offloaded_bytes(spec) / 1024**3)
    limit = f"{_SHM_PER_RANK * ranks + offloaded}Gi"
    return ContainerNeeds(
        mounts=[{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - where engines look for it
        volumes=[{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}],
    )


def _flags(pool: Pool) -> Iterator[tuple[str, object]]:
    """Flags with their values, in the order of the command line; unset flags are left out."""
    engine = pool.spec.engine
    flags = [
        ("--dtype", _unless(engine.dtype, "auto")),
        ("--block-size", engine.block_size),
        ("--max-model-len", engine.max_model_len),
        ("--long-prefill-token-threshold", _largest_chunk(pool)),
        *(_vllm_flags(pool, engine) if engine.type == "vllm" else _torch_flags(pool)),
    ]
    yield from ((flag, value) for flag, value in flags if value is not None and value is not False)


def _largest_chunk(pool: Pool) -> int | None:
    """Tokens of one prompt that a step computes beside other requests; None: the engine's own."""
    if not isinstance(pool, DecodePool) or pool.role is not Role.DECODE:
        return None
    limit, longest = pool.spec.routing.max_prefill_on_decode, pool.spec.engine.max_model_len
    # vLLM refuses a chunk that is longer than a prompt may be.
    return limit if limit is None or longest is None else min(limit, longest)


def _torch_flags(pool: Pool) -> Iterator[tuple[str, object]]:
    engine, drain = pool.spec.engine, pool.spec.drain.timeout
    yield "--max-num-seqs", engine.max_num_seqs
    yield "--max-num-batched-tokens", engine.max_num_batched_tokens
    # Explicit, because `tandem up` runs pods as processes, which see GPUs that no pool claims.
    yield "--device", None if pool.spec.accelerator.count else "cpu"
    # A prefill engine drains by itself after SIGTERM: it finishes its requests and waits until
    # decode engines have read its KV. A decode engine is drained by the sidecar before SIGTERM.
    drains_itself = isinstance(pool, PrefillPool)
    yield "--shutdown-timeout", format_duration(drain) if drains_itself else f"{SHUTDOWN}s"


def _vllm_flags(pool: Pool, engine: EngineSpec) -> Iterator[tuple[str, object]]:
    spec, best = pool.spec, tuning(pool.spec, pool.role)
    release, sizes = vllm_versions.parse_release(engine.version), spec.parallelism
    yield "--max-num-seqs", best.max_num_seqs
    yield "--max-num-batched-tokens", best.max_num_batched_tokens
    yield "--revision", spec.model.revision
    yield "--load-format", "runai_streamer" if spec.model.source.s3 else None
    yield "--kv-cache-dtype", _unless(engine.kv_cache_dtype, "auto")
    yield "--gpu-memory-utilization", best.gpu_memory_utilization
    yield "--enable-prefix-caching", best.prefix_caching
    # The endpoint picker learns each pod's prefill rate from how many tokens were not cached.
    yield "--enable-prompt-tokens-details", True
    yield "--tensor-parallel-size", _unless(sizes.tensor, 1)
    yield "--pipeline-parallel-size", _unless(sizes.pipeline, 1)
    yield "--data-parallel-size", _unless(sizes.data, 1)
    yield "--enable-expert-parallel", sizes.expert
    if vllm_versions.ALL2ALL_FLAG.includes(release):
        yield "--all2all-backend", best.all2all_backend
    if vllm_versions.SHUTDOWN_TIMEOUT.includes(release):
        yield "--shutdown-timeout", SHUTDOWN
    if vllm_versions.SCALE_OUT.includes(release):
        yield "--enable-scale-out", _continues_parsed_streams(pool)


def _continues_parsed_streams(pool: Pool) -> bool:
    """Whether the engine parses answers, whose streams another pod's engine is always to continue.
    No other pods are started anew for the flag."""
    if not isinstance(pool, DecodePool):
        return False
    resume, names = pool.spec.routing.resume, pool.spec.engine.extra_args
    is_parsing = any(name.partition("=")[0] in _PARSER_FLAGS for name in names)
    return resume is not None and resume.enabled == "always" and is_parsing


def _all2all_variable(pool: Pool) -> dict[str, str]:
    """The all-to-all backend as a variable, for vLLM versions without the flag."""
    engine = pool.spec.engine
    if engine.type != "vllm" or vllm_versions.ALL2ALL_FLAG.includes(
        vllm_versions.parse_release(engine.version)
    ):
        return {}
    backend = tuning(pool.spec, pool.role).all2all_backend
    return {"VLLM_ALL2ALL_BACKEND": backend} if backend else {}


def _lora_flags(adapters: tuple[LoraAdapter, ...]) -> list[str]:
    """One `--lora-modules` with all adapters: a second one would replace the first."""
    if not adapters:
        return []
    modules = [_json({"name": adapter.name, "path": adapter.path}) for adapter in adapters]
    in_memory, in_batch = str(len(adapters)), str(min(len(adapters), _MAX_LORAS))
    flags = ["--enable-lora", "--max-loras", in_batch, "--max-cpu-loras", in_memory]
    return [*flags, "--lora-modules", *modules]


def _unless(value: object, default: object) -> object:
    return None if value == default else value


def _kv_events_config(pool: Pool) -> dict[str, Any]:
    # With `*` vLLM binds the endpoint; without it vLLM would connect to it. The torch engine binds
    # its own host.
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.KV_EVENTS}",
        "replay_endpoint": f"tcp://*:{ports.KV_EVENTS_REPLAY}",
        "topic": f"kv@$(POD_NAME)@{pool.spec.model.name}",
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
