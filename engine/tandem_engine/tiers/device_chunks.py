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

T = TypeVar("T")


class DeviceChunks:
    """Chunks of one engine's cache; copies are made in a thread, in order."""

    def __init__(self, memory: ChunkMemory, identity: KvIdentity, block_size: int) -> None:
        self.memory = memory
        self.tokens = identity.chunk_tokens
        """Tokens of a chunk."""
        self.blocks = self.tokens // block_size
        """Blocks of a chunk."""
        self._identity = identity
        self._copier = ThreadPoolExecutor(1, "kv-copy")

    def of(self, seq: EngineSequence, limit: int) -> list[Chunk]:
        """The full chunks of a sequence's first `limit` tokens."""
        keys = chunk_keys(self._identity, Prompt(seq.tokens, seq.request.cache_salt), limit)
        return chunks_of(keys, self.tokens)

    def blocks_of(self, table: Sequence[int], index: int) -> Sequence[int]:
        """The blocks of the chunk `index` of a sequence, whose blocks are `table`."""
        return table[index * self.blocks : (index + 1) * self.blocks]

    async def read(self, blocks: Sequence[int]) -> tuple[LayerGroup, ...]:
        """Copy the chunk in `blocks` to host memory."""
        return await self._in_copier(partial(self.memory.read, blocks))

    async def write(
        self, group: str, tensors: Sequence[memoryview], blocks: Sequence[int], first: int
    ) -> None:
        """Copy a layer group into `blocks`, without the first `first` blocks."""
        await self._in_copier(partial(self.memory.write, group, tensors, blocks, first))

    def close(self) -> None:
        """End the thread."""
        self._copier.shutdown()

    async def _in_copier(self, work: Callable[[], T]) -> T:
        """Run `work` in the copy thread; a cancelled caller waits, too, until it has ended."""
        future = asyncio.get_running_loop().run_in_executor(self._copier, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
