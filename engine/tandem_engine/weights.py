"""Reads a Hugging Face model directory: `ModelConfig` and tensors.

Errors: `ModelError`: one line with the file and what is wrong with it.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import DType
from .types import EngineError

_MODEL_TYPES: Final = ("llama", "mistral", "qwen2")
_DTYPES: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_SAMPLE: Final = 256
"""Bytes at the start and at the end of each tensor that the fingerprint covers."""


class ModelError(EngineError):
    """The model directory is unusable; the message says what to change."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`linear`: every frequency divided by `factor`. `llama3`: only the slow ones, blended."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model's architecture, from a checked config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    """Longest sequence that the model supports, in tokens."""
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Data type of the checkpoint's weights."""


def torch_dtype(dtype: str) -> torch.dtype:
    """`float32` → torch.float32; raises ModelError for a dtype that this engine lacks."""
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r}: this engine computes in {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def resolve_dtype(dtype: DType, config: ModelConfig) -> torch.dtype:
    """The dtype to compute in; `auto` is the checkpoint's."""
    return torch_dtype(config.dtype if dtype == "auto" else dtype)


def load_config(directory: Path) -> ModelConfig:
    """Read config.json and generation_config.json.

    Raises ModelError when the directory holds no such model or one this engine does not run.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory: give a local Hugging Face model")
    raw = _read_json(directory / "config.json")
    kind = raw.get("model_type")
    if kind not in _MODEL_TYPES:
        raise ModelError(
            f"{directory}/config.json: model_type {kind!r}: this engine runs {_MODEL_TYPES}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{directory}/config.json: hidden_act {raw['hidden_act']!r}: only silu")
    # Mistral's windows are on unless switched off, Qwen2's only with use_sliding_window.
    windowed = raw.get("use_sliding_window", kind == "mistral")
    if windowed and raw.get("sliding_window") is not None:
        raise ModelError(f"{directory}/config.json: sliding-window attention is not supported")
    try:
        return _model_config(raw, kind, _eos_token_ids(directory, raw))
    except (KeyError, TypeError, ValueError) as err:
        raise ModelError(f"{directory}/config.json: missing or malformed: {err}") from err


def _model_config(raw: dict[str, Any], kind: str, eos: tuple[int, ...]) -> ModelConfig:
    heads = int(raw["num_attention_heads"])
    bias = bool(raw.get("attention_bias", False))
    # transformers 5 writes rope_parameters, earlier versions rope_scaling and rope_theta.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    max_position = int(raw.get("max_position_embeddings", 2048))
    return ModelConfig(
        model_type=kind,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        rope_scaling=_rope_scaling(rope, max_position),
        max_position=max_position,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        # Qwen2 has these biases always, and config.json does not say so.
        qkv_bias=bias or kind == "qwen2",
        o_bias=bias and kind != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)),
        eos_token_ids=eos,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def _rope_scaling(rope: dict[str, Any], max_position: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind,
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope.get("original_max_position_embeddings", max_position)),
        )
    raise ValueError(f"rope type {kind!r}: this engine has default, linear and llama3")


def _eos_token_ids(directory: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids; generation_config.json wins over config.json, as in vLLM."""
    eos = raw.get("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = _read_json(generation).get("eos_token_id", eos)
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise ModelError(f"{file}: cannot read it: {err.strerror}") from err
    except ValueError as err:
        raise ModelError(f"{file}: not JSON: {err}") from err
    if not isinstance(data, dict):
        raise ModelError(f"{file}: expected a JSON object")
    return data


def tensor_files(directory: Path) -> list[Path]:
    """The safetensors files named in the index, else all. Raises ModelError when one is missing."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = set(_read_json(index).get("weight_map", {}).values())
        files = [directory / str(name) for name in sorted(names)]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if not files or missing:
        raise ModelError(f"{directory}: {missing or '*.safetensors'}: no such file")
    return files


def architecture_json(config: ModelConfig) -> str:
    """The settings that KV depends on, as canonical JSON."""
    # Stop tokens do not change the KV, and a copy of a model may override them.
    fields = {k: v for k, v in asdict(config).items() if k != "eos_token_ids"}
    return json.dumps(fields, sort_keys=True)


def fingerprint(directory: Path, config: ModelConfig) -> str:
    """Hex digest, equal for copies of one model however sharded, different for other models.

    Covers the architecture and, for each tensor, its name, type, shape, and first and last bytes.
    """
    tensors: dict[str, bytes] = {}
    for file in tensor_files(directory):
        tensors.update(_samples(file))
    digest = hashlib.sha256(architecture_json(config).encode())
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0" + tensors[name])
    return digest.hexdigest()[:32]


def _samples(file: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            # Before reading: a damaged length must not make this read gigabytes.
            if size > file.stat().st_size:
                raise ValueError("it ends within its header")
            header: dict[str, Any] = json.loads(stream.read(size))
            for name, info in header.items():
                if name == "__metadata__":
                    continue
                begin, end = info["data_offsets"]
                stream.seek(8 + size + begin)
                head = stream.read(min(_SAMPLE, end - begin))
                stream.seek(8 + size + max(begin, end - _SAMPLE))
                tail = stream.read(min(_SAMPLE, end - begin))
                yield name, f"{info['dtype']}{info['shape']}".encode() + head + tail
    except (OSError, struct.error, ValueError, KeyError) as err:
        raise ModelError(f"{file}: not a safetensors file: {err}") from err


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Tensors of one layer; projections of the same input are stacked into one matrix."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model; matrices are `[out, in]`."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def load_weights(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Read the tensors. Raises ModelError when one is missing, unreadable or of a wrong shape."""
    tensors: dict[str, Tensor] = {}
    for file in tensor_files(directory):
        try:
            with safe_open(file, framework="pt", device=str(device)) as opened:
                for name in opened.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    tensors[name] = opened.get_tensor(name).to(dtype)
        except (OSError, SafetensorError) as err:
            raise ModelError(f"{file}: not a safetensors file: {err}") from err

    def get(name: str, *shape: int) -> Tensor:
        if name not in tensors:
            raise ModelError(f"{directory}: tensor {name} is missing")
        if tensors[name].shape != shape:
            raise ModelError(
                f"{directory}: tensor {name} is {list(tensors[name].shape)}, "
                f"config.json makes it {list(shape)}"
            )
        # Popped, so that unstacked parts are freed while later layers are stacked.
        return tensors.pop(name)

    wide = (config.vocab_size, config.hidden_size)
    embedding = get("model.embed_tokens.weight", *wide)
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(f"model.layers.{i}.", config, get) for i in range(config.layers)),
        norm=get("model.norm.weight", config.hidden_size),
        head=embedding if config.tied_embeddings else get("lm_head.weight", *wide),
    )


def _layer(prefix: str, config: ModelConfig, get: Callable[..., Tensor]) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    gate_up = {"gate_proj": inner, "up_proj": inner}

    def stack(part: str, outputs: dict[str, int], inputs: int) -> Tensor:
        return torch.cat(
            [get(f"{prefix}{part}.{n}.weight", out, inputs) for n, out in outputs.items()]
        )

    def biases(part: str, outputs: dict[str, int], *, present: bool) -> Tensor | None:
        if not present:
            return None
        return torch.cat([get(f"{prefix}{part}.{n}.bias", out) for n, out in outputs.items()])

    return LayerWeights(
        input_norm=get(f"{prefix}input_layernorm.weight", hidden),
        qkv=stack("self_attn", qkv, hidden),
        qkv_bias=biases("self_attn", qkv, present=config.qkv_bias),
        o=stack("self_attn", {"o_proj": hidden}, q),
        o_bias=biases("self_attn", {"o_proj": hidden}, present=config.o_bias),
        post_norm=get(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=stack("mlp", gate_up, hidden),
        gate_up_bias=biases("mlp", gate_up, present=config.mlp_bias),
        down=stack("mlp", {"down_proj": hidden}, inner),
        down_bias=biases("mlp", {"down_proj": hidden}, present=config.mlp_bias),
    )
