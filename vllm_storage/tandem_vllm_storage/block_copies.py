"""Copies between vLLM's paged KV cache and host buffers, whole blocks only.

The contents of a block are copied as they are, whatever an attention backend packs into it. The
tensors of a chunk are `layer.{i}`, shape [blocks, other dimensions of the layer…], contiguous.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from tandem_kvstore.client import Groups
from tandem_kvstore.format.tensors import LayerGroup, TensorSpec

_GROUP_BYTES: Final = 16 << 20
"""Approximate bytes of a layer group. Larger: fewer requests. Smaller: less memory for each
load."""
_SAME_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size: every device copies their bit patterns unchanged."""
_NAMES: Final = {
    torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
    torch.uint8: "uint8", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2",
}  # fmt: skip


class LayoutUnknown(ValueError):
    """The KV cache has a shape that cannot be cut into blocks; the message shows it."""


class BlockCopies:
    """One worker's KV cache, whose layers form groups of about 16 MiB for each chunk."""

    def __init__(
        self, layers: Mapping[str, torch.Tensor], num_blocks: int, chunk_blocks: int
    ) -> None:
        """`layers` by name, in the model's order. Raises LayoutUnknown."""
        if not layers:
            raise LayoutUnknown("vLLM registered no KV cache layer")
        self._chunk_blocks = chunk_blocks
        self._layers = [_by_block(name, layer, num_blocks) for name, layer in layers.items()]
        self.dtype = _NAMES.get(next(iter(layers.values())).dtype, "")
        if not self.dtype or len({layer.dtype for layer in layers.values()}) > 1:
            kinds = sorted({str(layer.dtype) for layer in layers.values()})
            raise LayoutUnknown(f"KV cache of data type {', '.join(kinds)}")
        self.layout = ";".join(
            f"{name}:{tuple(layer.shape[1:])}:{_order(layer)}"
            for name, layer in zip(layers, self._layers, strict=True)
        )
        specs = [
            TensorSpec(f"layer.{i}", self.dtype, (chunk_blocks, *layer.shape[1:]))
            for i, layer in enumerate(self._layers)
        ]
        self._members = _members([spec.size for spec in specs])
        self.groups: Groups = [
            (name, tuple(specs[i] for i in members)) for name, members in self._members.items()
        ]
        self.chunk_bytes = sum(spec.size for spec in specs)

    @property
    def layers(self) -> int:
        """Number of layers with KV of their own."""
        return len(self._layers)

    def fence(self) -> Callable[[], None]:
        """Returns a function that waits, on any thread, until the device has done what vLLM's
        thread gave it before this call. A step in flight may still use blocks that were freed for a
        load."""
        device = self._layers[0].device
        if device.type != "cuda":
            return _nothing
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event.synchronize

    def read(self, blocks: Sequence[int]) -> tuple[LayerGroup, ...]:
        """Copy the chunk in `blocks` out of the cache; returns when the copies are complete."""
        ids = torch.tensor(blocks, device=self._layers[0].device)
        copies = [layer.index_select(0, ids).cpu().contiguous() for layer in self._layers]
        return tuple(
            LayerGroup(name, specs, [_bytes_of(copies[i]) for i in self._members[name]])
            for name, specs in self.groups
        )

    def write(
        self, group: str, tensors: Sequence[memoryview], blocks: Sequence[int], first: int
    ) -> None:
        """Copy a group's tensors into `blocks`, except the first `first` blocks, which other
        requests may share. Returns when the copies are complete."""
        device = self._layers[0].device
        ids = torch.tensor(blocks[first:], device=device)
        for index, tensor in zip(self._members[group], tensors, strict=True):
            layer = self._layers[index]
            shape = (self._chunk_blocks, *layer.shape[1:])
            # A bytearray, because torch warns about read-only buffers.
            rows = torch.frombuffer(bytearray(tensor), dtype=layer.dtype).view(shape)[first:]
            layer.index_copy_(0, ids, rows.to(device))
        if device.type == "cuda":
            # Only this thread's stream: steps run on others.
            torch.cuda.current_stream(device).synchronize()


def _nothing() -> None: ...


def _by_block(name: str, layer: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A view of the layer as integers, with the dimension of blocks first."""
    layer = layer.detach()
    for dim in range(min(2, layer.dim())):
        # Attention kernels may split a block into several of their own.
        if layer.shape[dim] % num_blocks == 0 and layer.shape[dim] >= num_blocks:
            ratio = layer.shape[dim] // num_blocks
            if ratio > 1:
                shape = layer.shape
                layer = layer.view(*shape[:dim], num_blocks, ratio, *shape[dim + 1 :])
            return layer.view(_SAME_SIZE[layer.element_size()]).movedim(dim, 0)
    raise LayoutUnknown(
        f"layer {name} has the shape {tuple(layer.shape)}, without a dimension of "
        f"{num_blocks} blocks"
    )


def _order(layer: torch.Tensor) -> str:
    """The dimensions after the blocks, from the largest stride to the smallest."""
    strides = layer.stride()
    dims = sorted(range(1, layer.dim()), key=lambda dim: (-strides[dim], dim))
    return "".join(map(str, dims))


def _members(sizes: Sequence[int]) -> dict[str, range]:
    """Groups of consecutive layers of about _GROUP_BYTES, named `000`, `001`, …"""
    starts, filled = [0], 0
    for index, size in enumerate(sizes):
        if filled and filled + size > _GROUP_BYTES:
            starts.append(index)
            filled = 0
        filled += size
    ends = [*starts[1:], len(sizes)]
    return {f"{i:03}": range(a, b) for i, (a, b) in enumerate(zip(starts, ends, strict=True))}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).view(-1).numpy().data
