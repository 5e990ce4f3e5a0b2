"""The fields of a model's config.json (Hugging Face) that the size of its KV depends on.

Errors: `UnknownModelConfig`: a field that is needed is missing or has another type.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .layer_names import DEFAULTS, layer_names


class UnknownModelConfig(ValueError):
    """The file does not describe a model whose KV size can be computed; the message names the
    field."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a KV cache holds per token and layer."""

    layers: int
    kv_heads: int
    head_size: int
    """Elements of a key, per head."""
    value_size: int
    """Elements of a value, per head."""
    latent_size: int | None = None
    """Elements per token and layer with multi-head latent attention (MLA): one compressed vector
    for keys and values of all heads, and the rotary part. None: keys and values per head."""
    window: int | None = None
    """Tokens that a sliding layer looks back; None: no layer slides."""
    layer_names: tuple[str, ...] = ()
    """The kind of each layer; empty: all have full attention."""
    indexer_size: int | None = None
    """Elements of the key with which sparse attention selects tokens (DeepSeek V3.2), per token and
    layer; None: no such attention."""
    dtype: str = "bfloat16"
    """The weights' type, which the cache has unless the engine is told otherwise."""


def model_config(document: Mapping[str, Any]) -> ModelConfig:
    """The fields of a parsed config.json. Raises UnknownModelConfig."""
    # Multimodal models nest the language model.
    fields = document.get("text_config") or document.get("llm_config") or document
    # A null stays one: it is not the default.
    text = {**DEFAULTS.get(str(fields.get("model_type")), {}), **fields}
    layers = _positive(text, "num_hidden_layers", "n_layer", "num_layers")
    heads = _positive(text, "num_attention_heads", "n_head")
    kv_heads = _optional(text, "num_key_value_heads", "num_kv_heads", "multi_query_group_num")
    head_size = _optional(text, "head_dim", "attention_head_dim", "kv_channels")
    if head_size is None:
        head_size = _positive(text, "hidden_size", "n_embd") // heads
    if text.get("multi_query") is True:
        kv_heads = 1
    rank = _optional(text, "kv_lora_rank")
    rope = _optional(text, "qk_rope_head_dim") or 0
    return ModelConfig(
        layers=layers,
        kv_heads=kv_heads or heads,
        head_size=head_size,
        value_size=_optional(text, "v_head_dim") or head_size,
        latent_size=None if rank is None else rank + rope,
        window=_window(text),
        layer_names=layer_names(text, layers),
        indexer_size=_optional(text, "index_head_dim"),
        dtype=str(
            text.get("dtype") or text.get("torch_dtype") or document.get("torch_dtype")
            or document.get("dtype") or "bfloat16"
        ),
    )  # fmt: skip


def _window(text: Mapping[str, Any]) -> int | None:
    # Qwen2 writes a window and switches it off.
    if text.get("use_sliding_window") is False:
        return None
    return _optional(text, "sliding_window", "attention_chunk_size")


def _optional(text: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _positive(text: Mapping[str, Any], *names: str) -> int:
    if (value := _optional(text, *names)) is None:
        raise UnknownModelConfig(f"config.json: no positive number `{names[0]}`")
    return value
