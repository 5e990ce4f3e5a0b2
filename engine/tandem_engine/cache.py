"""The paged KV cache: per layer one tensor, so that a block of a layer lies in one piece.

    layers[l]  [num_blocks, 2, block_size, kv_heads, head_dim]      2: keys, values

The transfer sends blocks from here and writes pulled ones here. Which sequence uses which block is
known to `blocks` only.
"""

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .config import EngineConfig
from .types import ConfigError, KvLayout
from .weights import ModelConfig

_CPU_BYTES: Final = 1 << 30
# The rest of the memory stays free for the activations of a step.
_CUDA_SHARE: Final = 0.8


class KvCache:
    """The KV of all layers, zeroed. Create it after the weights: its default size depends on the
    memory that is left.

    Raises ConfigError when the configured size is less than one block, or cannot be allocated.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        fingerprint: str,
    ) -> None:
        self.layout = KvLayout(
            model=fingerprint,
            dtype=str(dtype).removeprefix("torch."),
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            block_size=config.block_size,
        )
        self.num_blocks = _num_blocks(config, self.layout, device)
        shape = (self.num_blocks, 2, config.block_size, model.kv_heads, model.head_dim)
        try:
            self.layers = [_zeros(shape, dtype, device) for _ in range(model.layers)]
        # numpy raises ValueError for a size beyond the address space.
        except (MemoryError, ValueError, torch.OutOfMemoryError) as err:
            size = self.num_blocks * self.layout.layers * self.layout.block_bytes
            raise ConfigError(
                f"a KV cache of {self.num_blocks} blocks takes {size} bytes, more than {device} "
                "gives: lower --num-gpu-blocks-override or --kv-cache-memory-bytes"
            ) from err
        self.written: list[torch.cuda.Event] = []
        """Of each layer on a GPU: done when the KV before the last `mark_written` is stored."""
        if device.type == "cuda":
            self.written = [torch.cuda.Event() for _ in self.layers]  # type: ignore[no-untyped-call]
        # Grows to the largest step; the runner's one thread is its only user.
        self._gathered = torch.empty(0, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Store `kv` [tokens, 2, kv_heads, head_dim] in the rows `slots` [tokens, 2] name."""
        # A row is one token's keys or values of all heads.
        rows = self.layers[layer].view(-1, kv.shape[2] * kv.shape[3])
        rows.index_put_((slots,), kv.flatten(2))

    def mark_written(self, layer: int) -> None:
        """Let readers on other streams wait for what `write` has queued: see `written`."""
        if self.written:
            self.written[layer].record()

    def gather(self, layer: int, halves: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `halves` [2, sequences, blocks], each
        [sequences, kv_heads, blocks × block_size, head_dim], valid until the next call.

        They are copied into a reused buffer: new pages would cost more than the copy itself.
        """
        stored = self.layers[layer]
        # A row is one half of a block: its keys or its values.
        rows = stored.view(2 * self.num_blocks, -1)
        shape = (halves.numel(), rows.shape[1])
        if self._gathered.numel() < shape[0] * shape[1]:
            self._gathered = rows.new_empty(shape).flatten()
        # The buffer may be larger than this step needs.
        picked = self._gathered[: shape[0] * shape[1]].view(shape)
        torch.index_select(rows, 0, halves.flatten(), out=picked)
        kv = picked.view(2, halves.shape[1], -1, *stored.shape[3:]).transpose(2, 3)
        return kv[0], kv[1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. In host memory, the kernel allocates a block's pages when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


def _num_blocks(config: EngineConfig, layout: KvLayout, device: torch.device) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    available = config.kv_bytes
    if available is None and device.type == "cuda":
        # Free memory after the weights: see the class's docstring.
        available = int(torch.cuda.mem_get_info(device)[0] * _CUDA_SHARE)
    blocks = (available or _CPU_BYTES) // (layout.layers * layout.block_bytes)
    if blocks < 1:
        raise ConfigError(
            f"kv_bytes is {available}: one block of {layout.block_size} tokens takes "
            f"{layout.layers * layout.block_bytes} bytes"
        )
    return blocks
