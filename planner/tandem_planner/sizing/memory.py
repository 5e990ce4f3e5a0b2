"""How many tokens of KV fit beside a model, by vLLM's arithmetic, per GPU:

    KV bytes = memory × utilization - weights ÷ TP - activations - runtime
    tokens   = KV bytes ÷ KV bytes per token and GPU

vLLM measures the activations at start, with a step of `max_num_batched_tokens`; here they are the
widest results of a layer for each of its tokens, or the logits of `max_num_seqs` answers in 32
bits, whichever is more. More KV heads than GPUs are divided among them; fewer are copied.
"""

from typing import Final, NamedTuple

from tandem_planner.kv_size import element_bytes, rank_kv_size

from .gpus import Gpu
from .model_shape import ModelShape

RUNTIME: Final = 2e9
"""Bytes per GPU for CUDA's context, kernels and graphs."""
COMMUNICATION: Final = 1e9
"""Bytes per GPU for NCCL's buffers, where several share a model."""
LARGEST_TENSOR: Final = 8
"""GPUs of a node: tensor parallelism over the network is not considered."""


class Memory(NamedTuple):
    """Of one GPU, in bytes."""

    usable: float
    weights: float
    activations: float
    runtime: float
    per_token: float
    """KV of one token."""

    @property
    def kv(self) -> float:
        """For KV; below 0: the rest does not fit."""
        return self.usable - self.weights - self.activations - self.runtime

    @property
    def tokens(self) -> int:
        """Tokens of KV that fit; 0: none."""
        return max(0, int(self.kv // self.per_token))


def memory(
    model: ModelShape,
    gpu: Gpu,
    tensor: int,
    *,
    cache_dtype: str = "auto",
    utilization: float = 0.9,
    budget: int = 8192,
    requests: int = 256,
    weights: float | None = None,
) -> Memory:
    """What a GPU holds. `budget`: tokens of a step; `requests`: answers in the batch; `weights`:
    bytes of the model's files, where they are known better than by its shape."""
    layer = budget * model.widest * element_bytes(model.kv) / tensor
    logits = 2 * requests * model.vocabulary * 4 / tensor
    return Memory(
        usable=gpu.memory * utilization,
        weights=(model.bytes if weights is None else weights) / tensor,
        activations=max(layer, logits),
        runtime=RUNTIME + (COMMUNICATION if tensor > 1 else 0.0),
        # The most of a token: layers with a window hold no more than it.
        per_token=rank_kv_size(model.kv, tensor, cache_dtype).short,
    )


def tensor_sizes(model: ModelShape) -> list[int]:
    """Tensor sizes that vLLM accepts for the model, within a node: they divide its heads, and
    divide its KV heads or are a multiple of them."""
    heads, kv_heads = model.heads, model.kv.kv_heads
    return [
        size
        for size in (1, 2, 4, LARGEST_TENSOR)
        if heads % size == 0
        and (model.kv.latent_size is not None or kv_heads % size == 0 or size % kv_heads == 0)
    ]
