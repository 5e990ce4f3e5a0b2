"""Bytes of a prompt's KV, from the model's config.json: MHA, GQA, MLA, sliding window, hybrid.

    bytes(n) = full layers × n × e + sliding layers × min(n, window) × e
    e = bytes per element × (KV heads × (key size + value size), or the latent size with MLA)

Layers with a state of constant size (Mamba, linear attention) transfer a few megabytes per request,
independent of the prompt: they are left out. With tensor parallelism every rank holds and reads its
own heads, so the sum stays the same as long as there are as many heads as ranks. More ranks hold
copies: 8 ranks hold and read 4 heads twice (`rank_kv_size`). With MLA every rank holds a copy.
"""

from typing import Final, NamedTuple

from .layer_kinds import layer_counts
from .model_config import ModelConfig

_ELEMENT_BYTES: Final = {
    "float32": 4.0,
    "float": 4.0,
    "float16": 2.0,
    "half": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
    "int8": 1.0,
}
"""Names of vLLM's `--kv-cache-dtype` and of torch. Others count 2 bytes."""
_SCALE_BYTES: Final = 4
_SCALED_ELEMENTS: Final = 128
"""The keys of sparse attention's indexer have one byte per element, and a scale per so many."""


def element_bytes(config: ModelConfig, cache_dtype: str = "auto") -> float:
    """Bytes of one element of the cache; `auto` is the model's own type, as in vLLM."""
    name = config.dtype if cache_dtype == "auto" else cache_dtype
    return _ELEMENT_BYTES.get(name.removeprefix("torch."), 2.0)


class KvSize(NamedTuple):
    """The size of a prompt's KV. Linear for a model without sliding layers."""

    short: float
    """Bytes per token of a prompt that is shorter than the window."""
    windows: float = 0.0
    """Bytes of the full windows of all sliding layers."""
    long: float | None = None
    """Bytes that each token beyond the window adds; None: as `short`."""

    def bytes(self, tokens: float) -> float:
        """Bytes of the KV of `tokens` tokens that a decode engine needs to go on."""
        if self.long is None:
            return self.short * tokens
        return min(self.short * tokens, self.windows + self.long * tokens)


def kv_size(config: ModelConfig, cache_dtype: str = "auto") -> KvSize:
    """The size of the KV of `config`'s prompts, each head once."""
    return _size(config, config.kv_heads, cache_dtype)


def rank_kv_size(config: ModelConfig, tensor: int, cache_dtype: str = "auto") -> KvSize:
    """The size of the KV that each of `tensor` ranks holds, and reads in a hand-off."""
    return _size(config, max(1.0, config.kv_heads / tensor), cache_dtype)


def _size(config: ModelConfig, kv_heads: float, cache_dtype: str) -> KvSize:
    counts = layer_counts(config)
    if config.latent_size is not None:
        elements: float = config.latent_size
    else:
        elements = kv_heads * (config.head_size + config.value_size)
    layer = elements * element_bytes(config, cache_dtype)
    if config.indexer_size is not None:
        layer += config.indexer_size + _SCALE_BYTES * config.indexer_size / _SCALED_ELEMENTS
    if config.window is None or not counts.window:
        return KvSize((counts.full + counts.window) * layer)
    return KvSize(
        short=(counts.full + counts.window) * layer,
        windows=counts.window * config.window * layer,
        long=counts.full * layer,
    )
