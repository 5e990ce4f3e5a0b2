"""Blocks of the paged cache as bytes, and sending and receiving one layer's blocks.

    plan = block_plan(block_ids, block_bytes)      once per run of blocks, the same for all layers
    memory.outgoing(layer, plan)                   batches of views to send
    memory.incoming(layer, plan)                   batches of views to fill

A batch is one system call, and small enough that its bytes are still in the processor's cache when
they are hashed, before the send or after the receive. Those of a device's cache are larger pieces,
because more than the cache decides there. All functions block: they run in worker threads.

Errors: `KvBroken` for a wrong digest and for blocks that were freed during a send.
"""

import socket
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Final, Protocol

import torch
import xxhash

from ..copying import CopyStream, block_ids, block_rows, host_bytes, host_rows
from ..types import KvBroken, KvLayout
from .wire import DIGEST_BYTES, Segment, pack, receive_into, unfilled

BATCH_BYTES: Final = 1 << 19
"""Half of a common core's second-level cache: source and kernel buffer fit together."""
_PIECE_BYTES: Final = 8 << 20
"""Of a device's blocks that are sent or received at once. Less: more system calls, between which
the threads of several hand-offs wait for Python's lock. More: page-locked memory."""
_STAGES: Final = 2
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
Views = Generator[list[memoryview]]


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

    def outgoing(self, layer: int, plan: BlockPlan) -> Views:
        """The blocks' bytes, batch by batch; a batch is valid until the next one is taken."""

    def incoming(self, layer: int, plan: BlockPlan) -> Views:
        """Buffers to fill, batch by batch, each filled before the next one is taken; all are in the
        cache, and nothing writes there, once the generator has ended or is closed."""


def block_memory(
    layers: Sequence[torch.Tensor], layout: KvLayout, written: Sequence[torch.cuda.Event] = ()
) -> BlockMemory:
    """The layers' blocks as bytes. `written`: of each layer on a device, done when all KV that a
    step has queued is there; empty: it is there already.

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
    return StagedMemory(layers, layout.block_bytes, written)


class HostMemory:
    """A cache in host memory: the socket reads and writes the blocks in place, without a copy."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._bases = [_as_bytes(layer).numpy().data for layer in layers]

    def outgoing(self, layer: int, plan: BlockPlan) -> Views:
        base = self._bases[layer]
        for batch in plan:
            yield [base[where] for where in batch.slices]

    # One view serves both directions: the buffers are the cache itself.
    incoming = outgoing


class StagedMemory:
    """A cache on a device: blocks pass through two pieces of page-locked host memory in turn.

    While the socket sends or fills one piece, the device copies the other.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        block_bytes: int,
        written: Sequence[torch.cuda.Event] = (),
    ) -> None:
        self._rows = [block_rows(layer, block_bytes) for layer in layers]
        self._device, self._written = layers[0].device, written
        self._per_piece = max(1, _PIECE_BYTES // block_bytes)

    def outgoing(self, layer: int, plan: BlockPlan) -> Views:
        rows, stream = self._rows[layer], CopyStream(self._device)
        if self._written:
            # The step that computes this layer may not have reached it on the device.
            stream.after(self._written[layer])
        started: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        for stage, ids in self._pieces(plan, stream):
            if len(started) == _STAGES:
                # The oldest piece has the memory that this one gets.
                yield [_copied(*started.popleft())]
            with stream.queueing():
                stage.copy_(rows.index_select(0, ids), non_blocking=True)
            started.append((stage, stream.mark()))
        for piece in started:
            yield [_copied(*piece)]

    def incoming(self, layer: int, plan: BlockPlan) -> Views:
        rows, stream = self._rows[layer], CopyStream(self._device)
        filled: deque[torch.cuda.Event | None] = deque()
        try:
            for stage, ids in self._pieces(plan, stream):
                if len(filled) == _STAGES and (event := filled.popleft()) is not None:
                    event.synchronize()
                yield [host_bytes(stage)]
                # Runs when the caller takes the next piece: the socket has filled this one by then.
                with stream.queueing():
                    rows.index_copy_(0, ids, stage.to(self._device, non_blocking=True))
                filled.append(stream.mark())
        # Also after an error: no copy may write into blocks that the engine frees.
        finally:
            stream.wait()

    def _pieces(
        self, plan: BlockPlan, stream: CopyStream
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Host memory for some of the plan's blocks, and their ids on the device."""
        blocks = [block for batch in plan for block in batch.blocks]
        with stream.queueing():
            ids = block_ids(blocks, self._device)
        size = min(len(blocks), self._per_piece)
        stages = cycle([host_rows(size, self._rows[0]) for _ in range(_STAGES)])
        for start, stage in zip(range(0, len(blocks), self._per_piece), stages, strict=False):
            piece = ids[start : start + self._per_piece]
            yield stage[: len(piece)], piece


def _copied(stage: torch.Tensor, event: torch.cuda.Event | None) -> memoryview:
    """A piece's bytes, once the device has copied them."""
    if event is not None:
        event.synchronize()
    return host_bytes(stage)


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


def receive_segment(sock: socket.socket, batches: Views) -> None:
    """Fill one layer's blocks and check their digest.

    Raises KvBroken for a wrong digest and at the end of the stream; OSError and TimeoutError of the
    socket.
    """
    digest = xxhash.xxh3_64()
    # Closed at once after an error, which would keep it open: it may be writing into the blocks.
    with closing(batches):
        for views in batches:
            receive_into(sock, views)
            for view in views:
                digest.update(view)
    # The digest comes last, so that the producer can withhold it when blocks were freed meanwhile.
    expected = memoryview(bytearray(DIGEST_BYTES))
    receive_into(sock, [expected])
    if digest.digest() != expected:
        raise KvBroken("the checksum is wrong")
