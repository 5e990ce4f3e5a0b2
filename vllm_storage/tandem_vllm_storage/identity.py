"""What vLLM's KV depends on beside the prompt, as a `KvIdentity` for each worker.

Refuses every setting with which KV of equal keys could differ, or could not be moved block by
block. Reads vLLM's configuration objects by attribute only, so that tests need no vLLM. Errors:
`StorageConfigError`; `OSError` when the weights cannot be read.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from tandem_contract.vllm_storage import CONNECTOR, LOAD_FAILURE_POLICY
from tandem_kvstore.format.identity import KvIdentity
from tandem_kvstore.weights import file_version, weights_hash

from .messages import RankLayout
from .settings import StorageConfigError, StorageSettings

_COMMIT: Final = re.compile(r"[0-9a-f]{40}", re.ASCII)
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_ATTENTION: Final = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of KV cache whose blocks keep all tokens. Other kinds drop or replace blocks."""


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise StorageConfigError for a configuration with which loaded KV could change a token."""
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    if transfer.kv_load_failure_policy != LOAD_FAILURE_POLICY:
        raise _refusal(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: set it to "
            f"{LOAD_FAILURE_POLICY!r}, also at the top of a MultiConnector. With 'fail', vLLM "
            "answers 500 to a request whose stored KV could not be loaded"
        )
    if not cache.enable_prefix_caching:
        raise _refusal("prefix caching is off: remove --no-enable-prefix-caching")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise _refusal(
            "--weight-transfer-config replaces the weights while the engine runs, so that KV of "
            "others would be loaded: remove it, or the connector"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise _refusal(
            "--calculate-kv-scales gives each engine its own scales of the fp8 cache: use scales "
            "of the checkpoint"
        )
    if getattr(parallel, "decode_context_parallel_size", 1) > 1 or (
        getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        raise _refusal("context parallelism spreads the tokens of a block over workers")
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or kinds[0] not in _ATTENTION:
        raise _refusal(
            f"the model has {len(groups)} KV cache groups ({', '.join(kinds)}); the connector "
            "stores one group with full attention. For models with sliding windows, "
            "--disable-hybrid-kv-cache-manager gives all layers one group"
        )


def weights_identity(vllm_config: Any, settings: StorageSettings) -> str:
    """What names the weights: `dummy`, the setting `weights`, or for the model and its draft
    model, joined by `+`, the commit of the snapshot or the hash of all bytes.

    Reads all weights unless their digest is cached. Raises StorageConfigError, OSError.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    load = getattr(vllm_config, "load_config", None)
    if getattr(load, "load_format", None) == "dummy":
        # Made up, the same in each engine of this model: its files are not read.
        return f"dummy:{draft.model}" if draft is not None else "dummy"
    if settings.weights is not None:
        return settings.weights
    model = vllm_config.model_config
    models = [model]
    # Layers that predict several tokens lie in the files of the model itself.
    if draft is not None and (draft.model, draft.revision) != (model.model, model.revision):
        models.append(draft)
    return "+".join(_weights_of(config.model, config.revision) for config in models)


def _weights_of(name: object, revision: str | None) -> str:
    model = Path(str(name))
    if not model.is_dir():
        model = _cached_snapshot(str(model), revision)
    # In the cache of the Hugging Face hub, the directory's name is the commit.
    if model.parent.name == "snapshots" and _COMMIT.fullmatch(model.name):
        return model.name
    return weights_hash(weight_files(model))


def weight_files(directory: Path) -> Sequence[Path]:
    """The files with weights in a directory. Raises StorageConfigError if there is none."""
    for pattern in _WEIGHTS:
        if files := sorted(directory.glob(pattern)):
            return files
    raise _refusal(
        f"{directory} has no weights in files: name their commit or digest in weights of "
        "kv_connector_extra_config"
    )


def adapter_hash(directory: Path) -> str:
    """The hash of a LoRA adapter's content. Raises OSError, StorageConfigError."""
    # The configuration has the scale: with another one, equal weights give other KV.
    files = [*weight_files(directory), *directory.glob("adapter_config.json")]
    return _files_hash(tuple((file, file_version(file.stat())) for file in files))


@lru_cache(maxsize=1024)
def _files_hash(files: tuple[tuple[Path, tuple[int, ...]], ...]) -> str:
    return weights_hash([file for file, _ in files])


def identities(
    vllm_config: Any, settings: StorageSettings, weights: str, layouts: Iterable[RankLayout]
) -> tuple[KvIdentity, ...]:
    """The identity of each worker, by rank."""
    return tuple(
        _identity(vllm_config, settings, weights, layout)
        for layout in sorted(layouts, key=lambda layout: layout.rank)
    )


def _identity(
    vllm_config: Any, settings: StorageSettings, weights: str, layout: RankLayout
) -> KvIdentity:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return KvIdentity(
        weights=weights,
        dtype=f"{vllm_config.cache_config.cache_dtype}:{layout.dtype}",
        layers=layout.layers,
        kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        block_size=vllm_config.cache_config.block_size,
        chunk_tokens=settings.chunk_tokens,
        layout=layout.layout,
        tensor_parallel=layout.tensor_parallel,
        pipeline_parallel=layout.pipeline_parallel,
        quantization=_quantization(model),
        # `check_engine` refuses scales that are computed at run time; the checkpoint's are weights.
        kv_scales="checkpoint" if "fp8" in str(vllm_config.cache_config.cache_dtype) else "",
        overrides=_overrides(model),
        engine="vllm",
    )


def _quantization(model: Any) -> str:
    method = str(model.quantization or "")
    # Of weights that vLLM quantizes when it loads them: which layers, and how.
    settings = getattr(model, "quantization_config", None)
    return method if settings is None else f"{method}:{settings!r}"


def _overrides(model: Any) -> str:
    """Digest of the model's effective settings, for instance rope scaling, and of the data type in
    which it computes."""
    config = dict(_plain(model.hf_config.to_dict()))
    # KV does not depend on the model's path, or on the library that wrote its configuration.
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    settings = {"dtype": str(model.dtype), "model": config}
    # Of a model that brings its own code, which may lie in another repository.
    if (code := getattr(model, "code_revision", None)) is not None:
        settings["code"] = code
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _cached_snapshot(model: str, revision: str | None) -> Path:
    # A dependency of vLLM, which tests of this module do not have.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(config, str):
        raise _refusal(
            f"the files of model {model!r} were not found in the Hugging Face cache: name their "
            "commit in weights of kv_connector_extra_config"
        )
    return Path(config).parent


def _refusal(what: str) -> StorageConfigError:
    return StorageConfigError(f"{CONNECTOR}: {what}")
