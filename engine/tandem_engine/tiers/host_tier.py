"""Chunks in host memory, least recently used first to leave. Bookkeeping only: no torch, no I/O."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_kvstore.format.tensors import LayerGroup

from ..blocks import BlocksStored


@dataclass(frozen=True, slots=True)
class HostChunk:
    """A chunk's KV. Its buffers never change, so a reader may go on after it left the tier."""

    groups: tuple[LayerGroup, ...]
    event: BlocksStored
    """Its blocks, as a KV event of host memory."""
    size: int
    """Bytes of the KV."""


class HostTier:
    """At most `capacity` bytes of chunks. For the engine's event loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._chunks: OrderedDict[str, HostChunk] = OrderedDict()
        self.size = 0

    def __contains__(self, key: str) -> bool:
        return key in self._chunks

    def get(self, key: str) -> HostChunk | None:
        """The chunk, which counts as used now."""
        if (chunk := self._chunks.get(key)) is not None:
            self._chunks.move_to_end(key)
        return chunk

    def add(self, key: str, chunk: HostChunk) -> Sequence[HostChunk]:
        """Keep a chunk; returns those that left for it, itself if it is larger than the tier."""
        self.size += chunk.size
        if (previous := self._chunks.pop(key, None)) is not None:
            self.size -= previous.size
        self._chunks[key] = chunk
        removed = []
        while self.size > self.capacity:
            _, oldest = self._chunks.popitem(last=False)
            self.size -= oldest.size
            removed.append(oldest)
        return removed
