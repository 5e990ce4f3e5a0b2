"""Copies chunks between the paged cache and host buffers. For worker threads.

A chunk's tensors are `layer.{l}` [blocks, 2, block_size, kv_heads, head_dim], keys then values:
the cache's own layout, so that each block of a layer is one piece.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tandem_kvstore.format.tensors import LayerGroup, TensorSpec

from ..copying import block_ids, block_rows, copies_on, host_bytes, host_rows
from ..types import KvLayout

LAYOUT: Final = "blocks,kv,tokens,heads,dim"
"""Name of the layout in keys."""
_GROUP_BYTES: Final = 16 << 20
"""Bytes of a layer group, about. Larger: fewer requests. Smaller: less memory for each load."""


class ChunkMemory:
    """The layers of one cache, cut into groups."""

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        layout: KvLayout,
        chunk_tokens: int,
        written: Sequence[torch.cuda.Event] = (),
    ) -> None:
        """`written`: as in `KvCache`."""
        self._written = written
        self._rows = [block_rows(layer, layout.block_bytes) for layer in layers]
        self._device = layers[0].device
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
        self.layers_to = [members.stop for members in self._members.values()]
        """Number of layers in the groups 0 to i, for each i."""

    def read(
        self,
        blocks: Sequence[int],
        first: int = 0,
        end: int | None = None,
        is_running: Callable[[], bool] | None = None,
    ) -> tuple[LayerGroup, ...]:
        """Copy the groups `first` to `end` of the chunk in `blocks` out of the cache.

        Their KV is complete, or queued on a device by a step of which `is_running` tells whether it
        goes on. A device's chunk comes into page-locked memory, and goes back from there without a
        copy.
        """
        groups = self.groups[first:end]
        layers = [layer for name, _ in groups for layer in self._members[name]]
        # Once the step has ended its KV is there; the event may be a later step's by then.
        is_queued = bool(self._written) and is_running is not None and is_running()
        with copies_on(self._device, self._written[layers[-1]] if is_queued else None):
            ids = block_ids(blocks, self._device)
            copies = {layer: self._copy(self._rows[layer], ids) for layer in layers}
        return tuple(
            LayerGroup(name, specs, [host_bytes(copies[layer]) for layer in self._members[name]])
            for name, specs in groups
        )

    def write(
        self, group: str, tensors: Sequence[memoryview], blocks: Sequence[int], first: int
    ) -> None:
        """Copy a group's tensors into `blocks`, without the first `first` blocks: other sequences
        share these."""
        with copies_on(self._device):
            ids = block_ids(blocks[first:], self._device)
            for layer, tensor in zip(self._members[group], tensors, strict=True):
                cache = self._rows[layer]
                source = self._source(tensor, len(blocks), first)
                # The device may still read `source` when the next one is made: torch keeps its
                # memory until then.
                cache.index_copy_(0, ids, source.to(self._device, non_blocking=True))

    def _copy(self, rows: Tensor, ids: Tensor) -> Tensor:
        copy = rows.index_select(0, ids)
        if self._device.type == "cpu":
            return copy
        return host_rows(len(ids), rows).copy_(copy, non_blocking=True)

    def _source(self, tensor: memoryview, count: int, first: int) -> Tensor:
        """The rows that are written; in page-locked memory if the cache is a device's."""
        cache = self._rows[0]
        word = str(cache.dtype).removeprefix("torch.")
        # By DLPack, which takes buffers that must not be written. They are only read.
        rows = from_dlpack(np.frombuffer(tensor, word)).view(count, -1)[first:]
        if self._device.type == "cpu" or rows.is_pinned():
            return rows
        return host_rows(count - first, cache).copy_(rows)
