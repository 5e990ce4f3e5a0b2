"""Memory of many loads at once: the data of chunks that are read and not yet delivered."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from tandem_kvstore.chain import Chunk, Deliver, Outcome, Progress
from tandem_kvstore.chunk_store import LOOKUPS
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.manifest import MAX_INLINE
from tandem_kvstore.format.tensors import Buffer
from tandem_kvstore.stores.files import FileStore

from .kv import Engine, chain, engine, group_specs
from .servers import file_store

LOADS, CHUNKS = 32, 20

Load = Callable[[Engine, list[Chunk], Deliver], Awaitable[Outcome]]


class ClaimsAll:
    """A RearWatch that loads all chunks."""

    def on_chain(self, chunks: int) -> None: ...

    def claim(self, index: int, pending: int) -> bool:
        return True

    def on_lost(self, chunks: Sequence[Chunk], reason: Reason | None) -> None: ...


async def load_prefix(reader: Engine, chunks: list[Chunk], deliver: Deliver) -> Outcome:
    return await reader.chunks.fetch(chunks, group_specs(), deliver)


async def load_rear(reader: Engine, chunks: list[Chunk], deliver: Deliver) -> Outcome:
    manifests, _ = await reader.chunks.find(chunks)
    return await reader.chunks.load_rear(manifests, group_specs(), deliver, ClaimsAll(), Progress())


@pytest.mark.parametrize("load", [load_prefix, load_rear])
async def test_small_chunks_of_many_loads_do_not_pile_up_before_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Load
) -> None:
    """The data of a small chunk are in memory from the look-up of its manifest on."""
    chunks, reader = chain(1, CHUNKS), engine(file_store(tmp_path).location, max_inline=MAX_INLINE)
    await reader.put_all(chunks)
    get, in_memory, most = FileStore.get, 0, 0

    async def counted_get(
        store: FileStore, name: str, limit: int, *, is_cut: bool = False
    ) -> Buffer:
        nonlocal in_memory, most
        data = await get(store, name, limit, is_cut=is_cut)
        in_memory += not is_cut
        most = max(most, in_memory)
        return data

    async def deliver(index: int, group: str, tensors: list[memoryview]) -> None:
        nonlocal in_memory
        # The copy into the engine's blocks, which is slower than this store.
        for _ in range(5):
            await asyncio.to_thread(len, tensors)
        in_memory -= group == group_specs()[-1][0]

    monkeypatch.setattr(FileStore, "get", counted_get)
    loads = [load(reader, chunks, deliver) for _ in range(LOADS)]
    for outcome in await asyncio.gather(*loads):
        assert outcome.reason is None
    # The first of each load, and the chunks that are being loaded.
    assert most <= LOADS + 2 * LOOKUPS
    await reader.chunks.close()
