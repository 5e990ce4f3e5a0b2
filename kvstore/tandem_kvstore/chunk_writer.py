"""Writes chunks whose layer groups come one after another, for instance while they are computed.

    each group ──► its data object, at once        invisible
    after the last group ──► manifest              the chunk becomes visible as a whole

Cancelling a write leaves data objects without a manifest: they are invisible, and the collector
deletes them. The writer does not, because another writer of the same bytes uses the same names.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence

from tandem_contract.kv_reference import TENSOR_FORMAT

from .chain import Chunk, end_tasks
from .checksums import data_object, size_of
from .errors import ObjectExists, StoreDenied, StoreUnsupported
from .format.manifest import DataObject, Manifest, data_name, encode_manifest, fits_inline
from .format.tensors import Buffer, LayerGroup, header_bytes
from .stores import ObjectStore

LayerGroups = Sequence[LayerGroup] | AsyncIterator[LayerGroup]
"""The layer groups of one chunk: all of them, or an iterator that waits for the next one."""


class GroupSource:
    """Layer groups as an async iterator, which remembers those that it gave."""

    def __init__(self, groups: LayerGroups) -> None:
        self._given: list[LayerGroup] = []
        self._coming = groups if isinstance(groups, AsyncIterator) else None
        self._present = iter(()) if isinstance(groups, AsyncIterator) else iter(groups)
        # When all had come, by the event loop's clock.
        self._complete: float | None = None

    def __aiter__(self) -> "GroupSource":
        return self

    async def __anext__(self) -> LayerGroup:
        if self._coming is None:
            group = next(self._present, None)
        else:
            group = await anext(self._coming, None)
        if group is None:
            # `all` asks once more, and an iterator that has ended may wait for ever.
            self._coming = None
            self._complete = self._complete or asyncio.get_running_loop().time()
            raise StopAsyncIteration
        self._given.append(group)
        return group

    def is_late(self, time: float) -> bool:
        """Whether the last group had not come at `time`, by the event loop's clock."""
        return self._complete is None or self._complete > time

    async def all(self) -> Sequence[LayerGroup]:
        """All groups, also those given before; returns when the last one has come."""
        async for _ in self:
            pass
        return self._given


class BrokenKeys:
    """Keys of stored chunks that cannot be used, the newest 4,096: the next write replaces them."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str) -> None:
        """Let the next write of this chunk replace the stored one."""
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
        """`identity`: digest of the KvIdentity. `slots`: layer groups that are written at once.
        `max_inline`: as for `ChunkStore`."""
        self._objects, self._identity = objects, identity
        self._slots, self._broken, self._max_inline = slots, broken, max_inline
        self._id = uuid.uuid4().hex

    async def put(self, chunk: Chunk, groups: LayerGroups) -> bool:
        """See `ChunkStore.put`."""
        # While the groups fit behind the manifest they wait in `buffered`; then each is written.
        buffered: list[tuple[str, Sequence[Buffer]]] = []
        writes: list[asyncio.Task[DataObject]] = []
        try:
            async for group in GroupSource(groups):
                buffered.append((group.name, self._object_of(chunk.key, group)))
                if writes or not self._fits_inline(buffered):
                    writes += [asyncio.create_task(self._put_data(chunk.key, *x)) for x in buffered]
                    buffered = []
                # If a write has failed, do not wait for the next group.
                for write in writes:
                    if write.done():
                        write.result()
            data = await asyncio.gather(*writes)
        finally:
            # After a failure the others must not go on writing unseen.
            await end_tasks(writes)
        data += [await data_object(name, parts) for name, parts in buffered]
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
        following = [part for _, parts in buffered for part in parts]
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
        except (StoreUnsupported, StoreDenied):
            # Without conditions the last writer wins. That is safe: its manifest names its own data
            # objects, which are all stored, or its own data follow it. A denial may be of the
            # condition alone; if not, the next write is denied, too.
            pass
        await self._objects.put(key, parts)
        self._broken.discard(key)
        return True
