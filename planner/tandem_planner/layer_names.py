"""The kind of each layer of a model, by its config.json; what files leave out, by its model_type.

Files of transformers leave out values that are the defaults of the model's type, above all within
`text_config`. The tables hold those that the size of the KV depends on (transformers 5.19).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_CHUNKED: Final = "chunked_attention"
_LINEAR: Final = "linear_attention"
_MAMBA: Final = "mamba"
_CONVOLUTION: Final = "conv"


def _shape(
    layers: int, heads: int, kv_heads: int | None, hidden: int, **others: int
) -> Mapping[str, int | None]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        **others,
    }


DEFAULTS: Final[Mapping[str, Mapping[str, int | None]]] = MappingProxyType({
    "cohere2": _shape(40, 64, None, 8192, sliding_window=4096, sliding_window_pattern=4),
    "exaone4": _shape(32, 32, 32, 4096, sliding_window=4096, sliding_window_pattern=4),
    "gemma2": _shape(
        26, 8, 4, 2304, head_dim=256, sliding_window=4096, sliding_window_pattern=2
    ),
    "gemma3_text": _shape(
        26, 8, 4, 2304, head_dim=256, sliding_window=4096, sliding_window_pattern=6
    ),
    "gemma3n_text": _shape(
        35, 8, 2, 2048, head_dim=256, sliding_window=512, sliding_window_pattern=5
    ),
    "gpt_oss": _shape(
        36, 64, 8, 2880, head_dim=64, sliding_window=128, sliding_window_pattern=2
    ),
    "jamba": _shape(32, 32, 8, 4096, attn_layer_period=8, attn_layer_offset=4),
    "llama": _shape(32, 32, None, 4096),
    "llama4_text": _shape(
        48, 40, 8, 5120, head_dim=128, attention_chunk_size=8192, no_rope_layer_interval=4
    ),
    "mistral": _shape(32, 32, 8, 4096, sliding_window=4096),
    "mixtral": _shape(32, 32, 8, 4096),
    "olmo3": _shape(32, 32, None, 4096, sliding_window=4096, sliding_window_pattern=4),
    "phi3": _shape(32, 32, None, 3072),
    "qwen2": _shape(32, 32, 32, 4096),
    "qwen3": _shape(32, 32, 32, 4096, head_dim=128),
    "qwen3_next": _shape(48, 16, 2, 2048, head_dim=256, full_attention_interval=4),
})  # fmt: skip
"""model_type → what a file of that type may leave out."""

_SLIDE_THROUGHOUT: Final = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Model types of which every layer has the window. A window of any other type, without a pattern or
a list of layers, is not taken into account: then the KV counts in full, which is the safe side."""


def layer_names(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """The kind of each of `layers` layers, in the words of `layer_types`; empty: all layers have
    full attention. `text`: the fields of the language model, with defaults."""
    for field in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if value := text.get(field):
            return tuple(map(str, value))
    return _state_layers(text, layers) or _window_layers(text, layers)


def _state_layers(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Layers of hybrids: attention, or a state of constant size."""
    if period := _count(text, "attn_layer_period"):
        offset = _count(text, "attn_layer_offset")
        return tuple(_FULL if i % period == offset else _MAMBA for i in range(layers))
    for field, other in (("attn_layer_indices", _MAMBA), ("full_attn_idxs", _CONVOLUTION)):
        if indices := text.get(field):
            return tuple(_FULL if i in indices else other for i in range(layers))
    return _every(_count(text, "full_attention_interval"), layers, _LINEAR)


def _window_layers(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Layers that look back at a window or a chunk, among such that look at everything."""
    if text.get("attention_chunk_size"):
        # Llama 4: layers with rotary embeddings are the chunked ones.
        if has_rope := text.get("no_rope_layers"):
            return tuple(_CHUNKED if rope else _FULL for rope in has_rope)
        return _every(_count(text, "no_rope_layer_interval"), layers, _CHUNKED)
    if not text.get("sliding_window"):
        return ()
    if names := _every(_count(text, "sliding_window_pattern"), layers, _SLIDING):
        return names
    if text.get("use_sliding_window") is True:
        # Qwen: the first ones have full attention.
        first = _count(text, "max_window_layers") or layers
        return tuple(_FULL if i < first else _SLIDING for i in range(layers))
    return (_SLIDING,) * layers if text.get("model_type") in _SLIDE_THROUGHOUT else ()


def _every(period: int, layers: int, other: str) -> tuple[str, ...]:
    """Full attention in every `period`-th layer, `other` in between; empty for a period of 0."""
    return tuple(other if (i + 1) % period else _FULL for i in range(layers)) if period else ()


def _count(text: Mapping[str, Any], field: str) -> int:
    value = text.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
