"""Blocks of the paged cache as bytes, and sending and receiving one layer's blocks.

    plan = block_plan(block_ids, block_bytes)      once per run of blocks, the same for all layers
    memory.outgoing(layer, plan)                   batches of views to send
    memory.incoming(layer, plan)                   batches of views to fill

A batch is one system call, and small enough that its bytes are still in the processor's cache when
they are hashed, before the send or after the receive. All functions block: they run in worker
threads.

Errors: `KvBroken` for a wrong digest and for blocks that were freed during a send.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

import torch
import xxhash

from ..types import KvBroken, KvLayout
from .wire import DIGEST_BYTES, Segment, pack, receive_into, unfilled

BATCH_BYTES: Final = 1 << 19
"""Half of a common core's second-level cache: source and kernel buffer fit together."""
BATCH_VIEWS: Final = 1024
"""IOV_MAX on Linux: a system call with more buffers fails."""
_MORE: Final = getattr(socket, "MSG_MORE", 0)
"""On Linux the kernel keeps small pieces until the payload follows; 0 where it cannot."""


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Some blocks of a plan. Each run of adjacent blocks is one slice of a layer's bytes."""

    slices: tuple[slice, ...]
    blocks: tuple[int, ...]


BlockPlan = tuple[BlockBatch, ...]


def block_plan(block_ids: Sequence[int], block_bytes: int) -> BlockPlan:
    """The blocks in their order, in batches of at most BATCH_BYTES and of at least one block."""
    per_batch = min(BATCH_VIEWS, max(1, BATCH_BYTES // block_bytes))
    return tuple(
        _batch(tuple(block_ids[i : i + per_batch]), block_bytes)
        for i in range(0, len(block_ids), per_batch)
    )


def _batch(blocks: tuple[int, ...], size: int) -> BlockBatch:
    # Adjacent blocks become one slice: fewer buffers for each system call.
    starts = [0, *(i for i, (a, b) in enumerate(pairwise(blocks), 1) if b != a + 1), len(blocks)]
    slices = tuple(slice(blocks[i] * size, (blocks[j - 1] + 1) * size) for i, j in pairwise(starts))
    return BlockBatch(slices, blocks)


class BlockMemory(Protocol):
    """A paged cache whose blocks can be sent and received."""

    def outgoing(self, layer: int, plan: BlockPlan) -> Iterator[list[memoryview]]:
        """The blocks' bytes, batch by batch; a batch is valid until the next one is taken."""

    def incoming(self, layer: int, plan: BlockPlan) -> Iterator[list[memoryview]]:
        """Buffers to fill, batch by batch; a batch is in the cache once the next one is taken."""


def block_memory(layers: Sequence[torch.Tensor], layout: KvLayout) -> BlockMemory:
    """The layers' blocks as bytes.

    Raises ValueError when a tensor is not contiguous, when its dtype or shape differs from the
    layout, or when the layers differ in their number of blocks.
    """
    shape = (2, layout.block_size, layout.kv_heads, layout.head_dim)
    if len(layers) != layout.layers:
        raise ValueError(f"the layout has {layout.layers} layers, the cache {len(layers)}")
    for i, layer in enumerate(layers):
        actual = (tuple(layer.shape[1:]), len(layer), str(layer.dtype).removeprefix("torch."))
        expected = (shape, len(layers[0]), layout.dtype)
        if actual != expected or not layer.is_contiguous():
            raise ValueError(f"layer {i} of the cache is {actual}, the layout says {expected}")
    if layers[0].device.type == "cpu":
        # Sockets can read and write host memory only: a device's cache needs the copy.
        return HostMemory(layers)
    return StagedMemory(layers, layout.block_bytes)


class HostMemory:
    """A cache in host memory: the socket reads and writes the blocks in place, without a copy."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._bases = [_as_bytes(layer).numpy().data for layer in layers]

    def outgoing(self, layer: int, plan: BlockPlan) -> Iterator[list[memoryview]]:
        base = self._bases[layer]
        for batch in plan:
            yield [base[where] for where in batch.slices]

    # One view serves both directions: the buffers are the cache itself.
    incoming = outgoing


class StagedMemory:
    """A cache on a device: each batch passes through page-locked host memory.

    Copies run on the device's default stream, so they follow the work that was queued before.
    """

    def __init__(self, layers: Sequence[torch.Tensor], block_bytes: int) -> None:
        self._layers = [_as_bytes(layer).view(len(layer), block_bytes) for layer in layers]

    def outgoing(self, layer: int, plan: BlockPlan) -> Iterator[list[memoryview]]:
        stage = self._stage(plan)
        for batch in plan:
            rows = stage[: len(batch.blocks)]
            # This copy is synchronous: the batch is in host memory when the caller gets it.
            rows.copy_(self._layers[layer].index_select(0, self._ids(batch)))
            yield [rows.view(-1).numpy().data]

    def incoming(self, layer: int, plan: BlockPlan) -> Iterator[list[memoryview]]:
        target, stage = self._layers[layer], self._stage(plan)
        for batch in plan:
            rows = stage[: len(batch.blocks)]
            yield [rows.view(-1).numpy().data]
            # Runs when the caller takes the next batch: the socket has filled `rows` by then.
            target.index_copy_(0, self._ids(batch), rows.to(target.device))

    def _ids(self, batch: BlockBatch) -> torch.Tensor:
        return torch.tensor(batch.blocks, device=self._layers[0].device)

    def _stage(self, plan: BlockPlan) -> torch.Tensor:
        layer = self._layers[0]
        max_blocks = max((len(batch.blocks) for batch in plan), default=0)
        return torch.empty(
            (max_blocks, layer.shape[1]), dtype=torch.uint8, pin_memory=layer.is_cuda
        )


def _as_bytes(layer: torch.Tensor) -> torch.Tensor:
    return layer.detach().view(torch.uint8).view(-1)


def send_segment(
    sock: socket.socket,
    segment: Segment,
    batches: Iterator[list[memoryview]],
    renew: Callable[[], None],
    still_held: Callable[[], bool],
) -> None:
    """Send one layer's blocks, then their digest.

    `renew` is called whenever bytes have moved. When the blocks are no longer held after their last
    byte was read, the bytes may be another request's: the digest is not sent, so that the reader
    cannot accept the segment. Raises KvBroken then, and OSError and TimeoutError of the socket.
    """
    digest = xxhash.xxh3_64()
    # MSG_MORE keeps the small frame in the kernel until the payload fills the TCP segment.
    sock.sendall(pack(segment), _MORE)
    for views in batches:
        for view in views:
            digest.update(view)
        while views:
            # One call may send only a part of the batch.
            views = unfilled(views, sock.sendmsg(views, (), _MORE))
            renew()
        # After the last byte of the batch was read from the blocks, and before the digest.
        if not still_held():
            raise KvBroken("the blocks were freed during the read")
    # Without MSG_MORE: the kernel sends what is left of the segment now.
    sock.sendall(digest.digest())


def receive_segment(sock: socket.socket, batches: Iterator[list[memoryview]]) -> None:
    """Fill one layer's blocks and check their digest.

    Raises KvBroken for a wrong digest and at the end of the stream; OSError and TimeoutError of the
    socket.
    """
    digest = xxhash.xxh3_64()
    for views in batches:
        receive_into(sock, views)
        for view in views:
            digest.update(view)
    # The digest comes last, so that the producer can withhold it when blocks were freed meanwhile.
    expected = memoryview(bytearray(DIGEST_BYTES))
    receive_into(sock, [expected])
    if digest.digest() != expected:
        raise KvBroken("the checksum is wrong")
