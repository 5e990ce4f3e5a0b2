"""The chunks of sequences in the paged cache: their keys, their blocks, and copies of them."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from tandem_kvstore.chunk_store import Chunk, chunks_of
from tandem_kvstore.format.identity import KvIdentity, Prompt, chunk_keys
from tandem_kvstore.format.tensors import LayerGroup

from ..step import Sequence as EngineSequence
from .chunk_memory import ChunkMemory
from .step_layers import StepLayers

T = TypeVar("T")


class DeviceChunks:
    """Chunks of one engine's cache; a thread copies into it, and another out of it,
    each in the order of the calls."""

    def __init__(self, memory: ChunkMemory, identity: KvIdentity, block_size: int) -> None:
        self.memory = memory
        self.tokens = identity.chunk_tokens
        """Tokens of a chunk."""
        self.blocks = self.tokens // block_size
        """Blocks of a chunk."""
        self._identity = identity
        # Loads do not wait for copies of layers that a device still computes.
        self._loader = ThreadPoolExecutor(1, "kv-load")
        self._saver = ThreadPoolExecutor(1, "kv-save")

    def of(self, seq: EngineSequence, limit: int) -> list[Chunk]:
        """The full chunks of a sequence's first `limit` tokens."""
        keys = chunk_keys(self._identity, Prompt(seq.tokens, seq.request.cache_salt), limit)
        return chunks_of(keys, self.tokens)

    def blocks_of(self, table: Sequence[int], index: int) -> Sequence[int]:
        """The blocks of the chunk `index` of a sequence, whose blocks are `table`."""
        return table[index * self.blocks : (index + 1) * self.blocks]

    async def read(
        self, blocks: Sequence[int], first: int, end: int, step: StepLayers | None
    ) -> tuple[LayerGroup, ...]:
        """Copy the layer groups `first` to `end` of the chunk in `blocks` to host memory.

        `step`: the one that computes them; None: it has ended.
        """
        is_running = None if step is None else lambda: step.is_running
        work = partial(self.memory.read, blocks, first, end, is_running)
        return await _in_thread(self._saver, work)

    async def write(
        self, group: str, tensors: Sequence[memoryview], blocks: Sequence[int], first: int
    ) -> None:
        """Copy a layer group into `blocks`, without the first `first` blocks."""
        work = partial(self.memory.write, group, tensors, blocks, first)
        await _in_thread(self._loader, work)

    def close(self) -> None:
        """End the threads."""
        self._loader.shutdown()
        self._saver.shutdown()


async def _in_thread(thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Run `work` in a thread; a cancelled caller waits, too, until it has ended."""
    future = asyncio.get_running_loop().run_in_executor(thread, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
