"""Writes chunks whose layer groups come one after another, for instance while they are computed.

    async for group in groups ──► its data object, at once      invisible
    no group is left ──► manifest                               visible, all or nothing

A writer that gives up cancels the write: without a manifest its data objects are invisible, and the
collector removes them. They are not deleted at once: another writer of the same bytes has the same
names.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence

from tandem_contract.kv_reference import TENSOR_FORMAT

from .chain import Chunk, end_tasks
from .checksums import data_object, size_of
from .errors import ObjectExists, StoreUnsupported
from .format.manifest import DataObject, Manifest, data_name, encode_manifest, fits_inline
from .format.tensors import Buffer, LayerGroup, header_bytes
from .stores import ObjectStore

LayerGroups = Sequence[LayerGroup] | AsyncIterator[LayerGroup]
"""The layer groups of one chunk: all at once, or as they come."""


class GroupSource:
    """Layer groups as an async iterator, which remembers those that it gave."""

    def __init__(self, groups: LayerGroups) -> None:
        self._given: list[LayerGroup] = []
        self._coming = groups if isinstance(groups, AsyncIterator) else None
        self._present = iter(()) if isinstance(groups, AsyncIterator) else iter(groups)
        self.is_awaited = False
        """Whether a write waits for a group that has not come."""

    def __aiter__(self) -> "GroupSource":
        return self

    async def __anext__(self) -> LayerGroup:
        if self._coming is None:
            group = next(self._present, None)
        else:
            self.is_awaited = True
            # Without `finally`: a deadline that ends this wait leaves it true.
            group = await anext(self._coming, None)
            self.is_awaited = False
        if group is None:
            raise StopAsyncIteration
        self._given.append(group)
        return group

    async def all(self) -> Sequence[LayerGroup]:
        """All groups, also those given before; returns when the last one has come."""
        async for _ in self:
            pass
        return self._given


class BrokenKeys:
    """Keys whose stored chunk was found unusable: the next write replaces it."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str) -> None:
        """Have the next write of this chunk replace what is stored."""
        self._keys[key] = None
        while len(self._keys) > 4096:
            del self._keys[next(iter(self._keys))]

    def discard(self, key: str) -> None:
        """The chunk was replaced."""
        self._keys.pop(key, None)


class ChunkWriter:
    """Writes the chunks of one identity to one store. For one event loop."""

    def __init__(
        self,
        objects: ObjectStore,
        identity: str,
        slots: asyncio.Semaphore,
        broken: BrokenKeys,
        max_inline: int,
    ) -> None:
        """`identity`: its digest. `slots`: layer groups in memory at once. `max_inline`: as for
        `ChunkStore`."""
        self._objects, self._identity = objects, identity
        self._slots, self._broken, self._max_inline = slots, broken, max_inline
        self._id = uuid.uuid4().hex

    async def put(self, chunk: Chunk, groups: LayerGroups) -> bool:
        """See `ChunkStore.put`."""
        # Groups that may still follow the manifest, and the writes of those that do not.
        first: list[tuple[str, Sequence[Buffer]]] = []
        writes: list[asyncio.Task[DataObject]] = []
        try:
            async for group in GroupSource(groups):
                first.append((group.name, self._object_of(chunk.key, group)))
                if writes or not self._fits_inline(first):
                    writes += [asyncio.create_task(self._put_data(chunk.key, *x)) for x in first]
                    first = []
                # A failed write ends all of them before the next group comes.
                for write in writes:
                    if write.done():
                        write.result()
            data = await asyncio.gather(*writes)
        finally:
            # After a failure the others must not go on writing unseen.
            await end_tasks(writes)
        data += [await data_object(name, parts) for name, parts in first]
        manifest = Manifest(
            format=TENSOR_FORMAT,
            identity=self._identity,
            prefix_hash=chunk.key,
            previous=chunk.previous,
            token_count=chunk.token_count,
            writer=self._id,
            data=tuple(data),
            is_inline=not writes,
        )
        following = [part for _, parts in first for part in parts]
        return await self._put_manifest(chunk.key, (encode_manifest(manifest), *following))

    def _fits_inline(self, objects: Sequence[tuple[str, Sequence[Buffer]]]) -> bool:
        return fits_inline([size_of(parts) for _, parts in objects], self._max_inline)

    def _object_of(self, key: str, group: LayerGroup) -> Sequence[Buffer]:
        """The bytes of a data object."""
        return (header_bytes(group.name, group.specs, key, self._identity), *group.parts)

    async def _put_data(self, key: str, group: str, parts: Sequence[Buffer]) -> DataObject:
        async with self._slots:
            item = await data_object(group, parts)
            await self._objects.put(data_name(key, group, item.content), parts)
            return item

    async def _put_manifest(self, key: str, parts: Sequence[Buffer]) -> bool:
        try:
            if key not in self._broken:
                await self._objects.put_if(key, parts, None)
                return True
        except ObjectExists:
            return False
        except StoreUnsupported:
            # The last writer wins: its manifest names its own data objects, which are all there,
            # or has its own data behind it.
            pass
        await self._objects.put(key, parts)
        self._broken.discard(key)
        return True
