"""Copies chunks between the paged cache and host buffers. For worker threads.

A chunk's tensors are `layer.{l}` [blocks, 2, block_size, kv_heads, head_dim], keys then values:
the cache's own layout, so that each block of a layer is one piece.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tandem_kvstore.format.tensors import LayerGroup, TensorSpec

from ..types import KvLayout

LAYOUT: Final = "blocks,kv,tokens,heads,dim"
"""Name of the layout in keys."""
_GROUP_BYTES: Final = 16 << 20
"""Bytes of a layer group, about. Larger: fewer requests. Smaller: less memory for each load."""


class ChunkMemory:
    """The layers of one cache, cut into groups."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: KvLayout, chunk_tokens: int) -> None:
        self._layers, self._block_bytes = layers, layout.block_bytes
        blocks = chunk_tokens // layout.block_size
        layer_bytes = blocks * layout.block_bytes
        per_group = max(1, _GROUP_BYTES // layer_bytes)
        shape = (blocks, 2, layout.block_size, layout.kv_heads, layout.head_dim)
        starts = range(0, layout.layers, per_group)
        self.chunk_bytes = layout.layers * layer_bytes
        self._members = {
            f"{i:03}": range(start, min(start + per_group, layout.layers))
            for i, start in enumerate(starts)
        }
        self.groups = [
            (name, tuple(TensorSpec(f"layer.{layer}", layout.dtype, shape) for layer in members))
            for name, members in self._members.items()
        ]

    def read(self, blocks: Sequence[int]) -> tuple[LayerGroup, ...]:
        """Copy the chunk in `blocks` out of the cache."""
        ids = torch.tensor(blocks, device=self._layers[0].device)
        return tuple(
            LayerGroup(name, specs, [self._copied(layer, ids) for layer in self._members[name]])
            for name, specs in self.groups
        )

    def write(
        self, group: str, tensors: Sequence[memoryview], blocks: Sequence[int], first: int
    ) -> None:
        """Copy a group's tensors into `blocks`, without the first `first` blocks: other sequences
        share these."""
        for layer, tensor in zip(self._members[group], tensors, strict=True):
            rows = np.frombuffer(tensor, np.uint8).reshape(len(blocks), self._block_bytes)[first:]
            self._write_rows(layer, blocks[first:], rows)

    def _copied(self, layer: int, ids: torch.Tensor) -> memoryview:
        rows = self._layers[layer].index_select(0, ids).cpu()
        return rows.view(torch.uint8).view(-1).numpy().data

    def _write_rows(self, layer: int, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        cache = self._layers[layer].detach().view(torch.uint8).view(-1, self._block_bytes)
        if cache.device.type == "cpu":
            cache.numpy()[list(blocks)] = rows
            return
        # Page-locked memory: the copy to the device does not pass through another buffer.
        staged = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
        staged.numpy()[:] = rows
        ids = torch.tensor(blocks, device=cache.device)
        cache.index_copy_(0, ids, staged.to(cache.device))
