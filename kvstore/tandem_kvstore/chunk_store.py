"""Chunks of KV in a store: written so that readers see all or nothing, read back verified.

    store = ChunkStore(open_store(location), location, identity)
    await store.put(chunk, groups)                      data objects, then the manifest
    await store.fetch(chunks, specs, deliver)           the longest stored prefix, verified
    manifests, _ = await store.find(chunks)             only the manifests of that prefix
    await store.load(manifests, specs, deliver)         the data of these manifests

`put` and `has` raise StoreError. `fetch`, `find` and the loads raise neither StoreError nor
KvRejected: their Outcome says how many chunks can be used, and why not more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from tandem_contract.kv_reference import TENSOR_FORMAT, KvReference

from .chain import (
    Chunk,
    Deliver,
    Groups,
    LayerWatch,
    Outcome,
    Progress,
    RearWatch,
    chunk_of,
    chunks_of,
    end_tasks,
    load_by_layers,
    load_in_order,
    load_rear,
    log_rejected,
)
from .checksums import hashed
from .chunk_writer import BrokenKeys, ChunkWriter, LayerGroups
from .errors import KvRejected, ObjectMissing, ObjectTooLarge, Reason, StoreError, message_of
from .format.identity import KvIdentity
from .format.manifest import MAX_INLINE, MAX_MANIFEST, Manifest, decode_manifest, inline_data
from .format.tensors import Buffer, TensorSpec, header_bytes, tensor_views
from .location import StoreLocation
from .stores import ObjectStore

__all__ = ["Chunk", "ChunkStore", "Deliver", "Groups", "Outcome", "Progress", "chunks_of"]

LOOKUPS: Final = 32
"""Manifests that one look-up requests at once. More: wasted requests for a prompt with few stored
chunks. Fewer: more round trips for a long prompt."""


class ChunkStore:
    """The chunks of engines with one identity, in one store. For one event loop."""

    def __init__(
        self,
        objects: ObjectStore,
        location: StoreLocation,
        identity: KvIdentity,
        *,
        in_flight: int = 8,
        max_inline: int = MAX_INLINE,
    ) -> None:
        """`in_flight`: layer groups that all loads together read at once, and that all writes
        together write at once. More: faster on stores with long delays. Fewer: less memory.
        `max_inline`: bytes up to which a chunk's data follow its manifest, at most MAX_INLINE; 0:
        data always have objects of their own."""
        self._objects = objects
        self._location = location
        self._identity = identity.digest()
        self._slots = asyncio.Semaphore(in_flight)
        self._look_ups = asyncio.Semaphore(2 * LOOKUPS)
        # Chunks of all loads whose data came with their manifest: they are in memory until they are
        # delivered.
        self._bodies = asyncio.Semaphore(2 * LOOKUPS)
        self._broken = BrokenKeys()
        # Apart from the slots of loads: a load does not wait for the many writes of a step.
        writes = asyncio.Semaphore(in_flight)
        self._writer = ChunkWriter(objects, self._identity, writes, self._broken, max_inline)

    def reference(self, chunk: Chunk) -> KvReference:
        """The reference of a prompt's prefix that ends with `chunk`."""
        return KvReference(
            self._location.path_of(chunk.key), chunk.key, chunk.token_count, TENSOR_FORMAT
        )

    async def put(self, chunk: Chunk, groups: LayerGroups) -> bool:
        """Store one chunk. Returns False if the store has the chunk from another writer already.

        `groups` may come while the write runs: each is written when it comes, and the manifest
        after the last one. Data objects without a manifest are invisible, and the collector deletes
        them. Raises StoreError.
        """
        return await self._writer.put(chunk, groups)

    async def has(self, chunk: Chunk) -> bool:
        """Whether the store has a usable manifest of the chunk. Raises StoreError."""
        if chunk.key in self._broken:
            return False
        try:
            await self._manifest(chunk, is_cut=True)
        except (ObjectMissing, ObjectTooLarge, KvRejected):
            return False
        return True

    async def find(self, chunks: Sequence[Chunk]) -> tuple[list[Manifest], Outcome]:
        """The manifests of the longest stored prefix of `chunks`, and why it is not longer."""
        manifests: list[Manifest] = []
        # One manifest first: of a prompt that is not stored, this one is missing.
        starts = range(1, len(chunks), LOOKUPS)
        for batch in (chunks[:1], *(chunks[start : start + LOOKUPS] for start in starts)):
            tasks = [asyncio.ensure_future(self._manifest(chunk, is_cut=True)) for chunk in batch]
            try:
                for task in tasks:
                    manifests.append((await task)[0])
            except (StoreError, KvRejected) as err:
                log_rejected(err)
                return manifests, Outcome(len(manifests), err.reason, message=message_of(err))
            finally:
                await end_tasks(tasks)
        return manifests, Outcome(len(manifests))

    async def load(
        self,
        manifests: Sequence[Manifest],
        groups: Groups,
        deliver: Deliver,
        progress: Progress | None = None,
    ) -> Outcome:
        """Read, verify and deliver the chunks of `manifests`; `groups` describe their tensors.

        It may be cancelled at any time: `progress` then has the number of whole chunks.
        """
        progress = progress or Progress()
        window = asyncio.Semaphore(LOOKUPS)

        async def load(index: int, manifest: Manifest) -> None:
            async with window:
                await self._load_from_manifest(manifest, groups, partial(deliver, index), progress)

        return await load_in_order([load(i, item) for i, item in enumerate(manifests)], progress)

    async def load_rear(
        self,
        manifests: Sequence[Manifest],
        groups: Groups,
        deliver: Deliver,
        watch: RearWatch,
        progress: Progress,
    ) -> Outcome:
        """As `load`, but from the last chunk to the first that `watch` claims; see
        `chain.load_rear`."""

        def load(index: int) -> Coroutine[Any, Any, None]:
            return self._load_from_manifest(
                manifests[index], groups, partial(deliver, index), progress
            )

        return await load_rear(load, len(manifests), watch, progress)

    async def load_layers(
        self,
        manifests: Sequence[Manifest],
        groups: Groups,
        deliver: Deliver,
        watch: LayerWatch,
        progress: Progress,
    ) -> Outcome:
        """As `load`, but the first layer group of all chunks, then the second, …"""
        # All groups of an inline chunk come with its manifest: there is no order to choose.
        if any(manifest.is_inline for manifest in manifests):
            return await self.load(manifests, groups, deliver, progress)

        async def load(index: int, group: int) -> None:
            manifest, to = manifests[index], partial(deliver, index)
            try:
                await self._load_group(manifest, None, groups[group], to, progress)
            except (ObjectMissing, ObjectTooLarge, KvRejected):
                self.mark_broken(manifest.prefix_hash)
                raise

        return await load_by_layers(load, len(manifests), len(groups), watch, progress)

    async def fetch(
        self,
        chunks: Sequence[Chunk],
        groups: Groups,
        deliver: Deliver,
        progress: Progress | None = None,
    ) -> Outcome:
        """`find` and `load` at once: data are read while the next manifests are looked up, and the
        data of an inline chunk come with its manifest."""
        progress = progress or Progress()
        window = asyncio.Semaphore(LOOKUPS)
        try:
            # One manifest first: of a prompt that is not stored, this one is missing.
            first = await self._manifest(chunks[0])
        except (StoreError, KvRejected) as err:
            log_rejected(err)
            return Outcome(0, err.reason, message=message_of(err))

        async def load(index: int, chunk: Chunk) -> None:
            async with window, self._bodies:
                manifest, body = await self._manifest(chunk) if index else first
                await self._load_chunk(manifest, body, groups, partial(deliver, index), progress)

        return await load_in_order([load(i, chunk) for i, chunk in enumerate(chunks)], progress)

    def mark_broken(self, key: str) -> None:
        """Let the next write of this chunk replace the stored one."""
        self._broken.add(key)

    async def close(self) -> None:
        """Close the connections to the store."""
        await self._objects.close()

    async def _manifest(
        self, chunk: Chunk, *, is_cut: bool = False
    ) -> tuple[Manifest, memoryview | None]:
        """A chunk's manifest, and the data that follow it, unless `is_cut`. Raises StoreError and
        KvRejected."""
        limit = MAX_MANIFEST if is_cut else MAX_MANIFEST + MAX_INLINE
        try:
            async with self._look_ups:
                data = await self._objects.get(chunk.key, limit, is_cut=is_cut)
            place = (chunk.key, self._identity, chunk.previous, chunk.token_count)
            manifest = decode_manifest(data, *place)
            has_body = manifest.is_inline and not is_cut
            return manifest, inline_data(data, manifest) if has_body else None
        except (ObjectTooLarge, KvRejected):
            self.mark_broken(chunk.key)
            raise

    async def _load_from_manifest(
        self,
        manifest: Manifest,
        groups: Groups,
        deliver: Callable[[str, list[memoryview]], Awaitable[None]],
        progress: Progress,
    ) -> None:
        """Load a chunk whose manifest was looked up by `find`, without data that may follow it."""
        async with self._bodies:
            body = None
            if manifest.is_inline:
                manifest, body = await self._manifest(chunk_of(manifest))
            await self._load_chunk(manifest, body, groups, deliver, progress)

    async def _load_chunk(
        self,
        manifest: Manifest,
        body: memoryview | None,
        groups: Groups,
        deliver: Callable[[str, list[memoryview]], Awaitable[None]],
        progress: Progress,
    ) -> None:
        """Load and deliver one chunk, whose data are in `body` or in objects of their own."""
        loads = [self._load_group(manifest, body, group, deliver, progress) for group in groups]
        tasks = [asyncio.ensure_future(load) for load in loads]
        try:
            for task in tasks:
                await task
        except (ObjectMissing, ObjectTooLarge, KvRejected):
            self.mark_broken(manifest.prefix_hash)
            raise
        finally:
            await end_tasks(tasks)

    async def _load_group(
        self,
        manifest: Manifest,
        body: memoryview | None,
        specs_of: tuple[str, tuple[TensorSpec, ...]],
        deliver: Callable[[str, list[memoryview]], Awaitable[None]],
        progress: Progress,
    ) -> None:
        group, specs = specs_of
        key = manifest.prefix_hash
        item = next((item for item in manifest.data if item.group == group), None)
        size = len(header_bytes(group, specs, key, self._identity)) + sum(s.size for s in specs)
        if item is None or item.size != size:
            raise KvRejected(Reason.FOREIGN, f"{key} has other layer groups than this engine")
        async with self._slots:
            if body is not None:
                start = sum(other.size for other in manifest.data[: manifest.data.index(item)])
                data: Buffer = body[start : start + size]
            else:
                data = await self._objects.get(manifest.name_of(item), size)
            if memoryview(data).nbytes < size:
                raise KvRejected(Reason.TRUNCATED, f"data object {group} of {key} is truncated")
            if await hashed((data,)) != item.content:
                raise KvRejected(Reason.CORRUPT, f"data object {group} of {key} is damaged")
            await deliver(group, tensor_views(data, group, specs, key, self._identity))
            progress.bytes += size
