"""The Llama-family forward pass over a flat batch of tokens and the paged cache.

A batch is `[decodes: one token each][prefill chunk][prefill chunk]…`. Every linear layer computes
all tokens at once; attention computes the decodes in one padded call and each chunk in one call.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from .cache import KvCache
from .weights import LayerWeights, ModelConfig, RopeScaling, Weights

_TRANSPOSED_ROWS: Final = (6, 48)
"""Smallest and largest row count for which `_linear` computes weight × xᵀ instead of x × weightᵀ,
as measured on AVX-512 with MKL."""
_CAUSAL: Final = "torch.nn.attention.bias"
"""The module of the causal mask that CUDA's kernels need no tensor for."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The batch's first `count` tokens: one of each decoding sequence."""

    count: int
    halves: Tensor
    """[2, count, blocks] row indices for `KvCache.gather`, padded with block 0."""
    mask: Tensor
    """[count, 1, 1, blocks × block_size]: 0 where the sequence has a token, else −∞."""


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Tokens `begin` to `end` of the batch: a chunk of one prompt."""

    begin: int
    end: int
    context: int
    """Tokens of the sequence until `end`."""
    halves: Tensor | None = None
    """[2, 1, blocks] row indices for `KvCache.gather`; None when the chunk starts the prompt."""
    mask: Tensor | None = None
    """[end − begin, context]: 0 where a token may attend, else −∞. None: causal. CUDA's kernels
    need no tensor for that; of 8,192 tokens after 24,000 others it would take half a gigabyte."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as tensors on the model's device."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    """[tokens, 2]: the cache rows of each token's key and value."""
    decodes: DecodeRows | None
    prefills: tuple[PrefillRows, ...]
    logit_rows: Tensor
    """Indices of the tokens whose logits are computed."""


class Llama:
    """Weights and the forward pass. The only state between calls is the KV cache."""

    def __init__(self, config: ModelConfig, weights: Weights, cache: KvCache, length: int) -> None:
        """`length` is the longest sequence, in tokens."""
        self._config = config
        self._weights = weights
        self._cache = cache
        self._cos, self._sin = _rope_tables(config, length, weights.embedding)
        if weights.embedding.device.type == "cuda":
            # It imports torch's compiler, for two seconds: before the first request, and not where
            # every chunk has a mask.
            importlib.import_module(_CAUSAL)

    def forward(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Logits [logit rows, vocabulary]; the batch's KV is in the cache afterwards.

        `on_layer(n)` is called when the KV of the first `n` layers is written.
        """
        eps, width = self._config.norm_eps, (self._config.hidden_size,)
        hidden = F.embedding(batch.token_ids, self._weights.embedding)
        cos = self._cos.index_select(0, batch.positions).unsqueeze(1)
        sin = self._sin.index_select(0, batch.positions).unsqueeze(1)
        for index, layer in enumerate(self._weights.layers):
            normed = F.rms_norm(hidden, width, layer.input_norm, eps)
            q, kv = self._project(layer, normed, cos, sin)
            # Before the attention: decodes read their own key and value from the cache, too.
            self._cache.write(index, batch.slots, kv)
            if on_layer is not None:
                self._cache.mark_written(index)
                on_layer(index + 1)
            attended = self._attend(index, q, kv, batch)
            hidden = hidden + _linear(attended, layer.o, layer.o_bias)
            normed = F.rms_norm(hidden, width, layer.post_norm, eps)
            gate, up = _linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            hidden = hidden + _linear(F.silu(gate) * up, layer.down, layer.down_bias)
        # The vocabulary projection is the largest product: only the rows that are sampled.
        last = hidden.index_select(0, batch.logit_rows)
        return _linear(F.rms_norm(last, width, self._weights.norm, eps), self._weights.head)

    def _project(
        self, layer: LayerWeights, normed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotated queries [tokens, heads, head_dim]; keys and values [tokens, 2, kv_heads, …]."""
        heads, kv_heads, dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        qkv = _linear(normed, layer.qkv, layer.qkv_bias).contiguous()
        qkv = qkv.view(-1, heads + 2 * kv_heads, dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        qk = qk * cos + qk.roll(dim // 2, -1) * sin
        return qk[:, :heads], torch.stack((qk[:, heads:], v), 1)

    def _attend(self, layer: int, q: Tensor, kv: Tensor, batch: Batch) -> Tensor:
        parts = []
        if batch.decodes is not None:
            parts.append(self._attend_decodes(layer, q, batch.decodes))
        parts += [self._attend_prefill(layer, q, kv, rows) for rows in batch.prefills]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decodes(self, layer: int, q: Tensor, rows: DecodeRows) -> Tensor:
        """Query heads that share a KV head become its rows, so that no KV is copied per head."""
        keys, values = self._cache.gather(layer, rows.halves)
        grouped = q[: rows.count].view(rows.count, self._config.kv_heads, -1, q.shape[2])
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=rows.mask)
        return out.flatten(1)

    def _attend_prefill(self, layer: int, q: Tensor, kv: Tensor, rows: PrefillRows) -> Tensor:
        query = q[rows.begin : rows.end].transpose(0, 1).unsqueeze(0)
        mask: Tensor | None = rows.mask
        if rows.halves is None:
            # The start of a prompt attends to its own keys and values only.
            keys, values = kv[rows.begin : rows.end].permute(1, 2, 0, 3).unsqueeze(1)
        else:
            # The last block may be filled partly: cut off what no token of this sequence wrote.
            keys, values = (x[:, :, : rows.context] for x in self._cache.gather(layer, rows.halves))
            if mask is None:
                bias = importlib.import_module(_CAUSAL)
                mask = bias.causal_lower_right(rows.end - rows.begin, rows.context)
        out = F.scaled_dot_product_attention(
            query, keys, values, mask, is_causal=mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x × weightᵀ + bias.

    With the few rows of a decode step, MKL on the CPU is up to twice as fast when the weight is the
    left factor; with fewer or more rows it is not. The result is then the transpose of a contiguous
    tensor: the element-wise operations and the next product read it as it is, and a copy into row
    order would cost 2 to 7 % of a step with 16 rows. Callers that need row order copy.
    """
    if x.is_cuda or not _TRANSPOSED_ROWS[0] <= len(x) <= _TRANSPOSED_ROWS[1]:
        return F.linear(x, weight, bias)
    product = torch.mm(weight, x.t()).t()
    return product if bias is None else product.add_(bias)


def _rope_tables(config: ModelConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim], computed in float64, with the dtype and device of `like`.

    The first half of sin is negated, so that rotating is x × cos + (halves of x swapped) × sin.
    """
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = _scaled(config.rope_theta**-steps, config.rope_scaling)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), 1).to(like), torch.cat((-sin, sin), 1).to(like)


def _scaled(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * share + frequencies / scaling.factor * (1 - share)
