"""Chunks of KV in a store: written so that readers see all or nothing, read back verified.

    store = ChunkStore(open_store(location), location, identity)
    await store.put(chunk, groups)                      data objects, then the manifest
    manifests = await store.find(chunks)                the longest stored prefix
    await store.load(manifests, specs, deliver)         verified tensors, layer group by layer group

Errors: `StoreError` and `KvRejected`; `find` and `load` return what could be used and the reason
for which they ended.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

from tandem_contract.kv_reference import TENSOR_FORMAT, KvReference

from .errors import KvRejected, ObjectExists, ObjectMissing, Reason, StoreError, StoreUnsupported
from .format.identity import KvIdentity
from .format.manifest import (
    MAX_MANIFEST,
    DataObject,
    Manifest,
    data_name,
    decode_manifest,
    encode_manifest,
)
from .format.tensors import Buffer, LayerGroup, TensorSpec, content_hash, header_bytes, tensor_views
from .location import StoreLocation
from .stores import ObjectStore

_log = logging.getLogger(__name__)

LOOKUPS: Final = 32
"""Manifests that one look-up asks for at once. More: a prompt of few stored chunks wastes requests.
Fewer: a long prompt takes more round trips."""

_INLINE_BYTES: Final = 1 << 20

Deliver = Callable[[int, str, list[memoryview]], Awaitable[None]]
"""Takes the verified tensors of a layer group: index of the chunk, name of the group, tensors in
the order of the group's specs. The views are valid until it returns."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A place in a chain of chunks."""

    key: str
    previous: str
    """Key of the chunk before; empty for the first."""
    token_count: int
    """Tokens from the start of the prompt to the end of this chunk."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a look-up or a load came."""

    chunks: int
    """Leading chunks that are there, or that were delivered as a whole."""
    reason: Reason | None = None
    """Why it ended before the last chunk; None: it did not."""
    bytes: int = 0
    """Bytes of verified tensors."""


def chunks_of(keys: Sequence[str], chunk_tokens: int) -> list[Chunk]:
    """The chunks of a chain of keys."""
    return [
        Chunk(key, previous, i * chunk_tokens)
        for i, (previous, key) in enumerate(pairwise(("", *keys)), 1)
    ]


class ChunkStore:
    """The chunks of engines with one identity, in one store. For one event loop."""

    def __init__(
        self,
        objects: ObjectStore,
        location: StoreLocation,
        identity: KvIdentity,
        *,
        in_flight: int = 8,
    ) -> None:
        """`in_flight`: layer groups in memory at once, over all loads and writes. More: faster on
        stores with long delays. Fewer: less memory."""
        self._objects = objects
        self._location = location
        self._identity = identity.digest()
        self._writer = uuid.uuid4().hex
        self._slots = asyncio.Semaphore(in_flight)
        self._look_ups = asyncio.Semaphore(2 * LOOKUPS)
        # Keys whose stored chunk was found unusable: the next write replaces it.
        self._broken: dict[str, None] = {}

    def reference(self, chunk: Chunk) -> KvReference:
        """The reference of a prompt's prefix that ends with `chunk`."""
        return KvReference(
            self._location.path_of(chunk.key), chunk.key, chunk.token_count, TENSOR_FORMAT
        )

    async def put(self, chunk: Chunk, groups: Sequence[LayerGroup]) -> bool:
        """Store one chunk. Returns False when another writer's is there already.

        Data objects without a manifest are invisible; the collector removes them.
        """
        tasks = [asyncio.ensure_future(self._put_group(chunk.key, group)) for group in groups]
        try:
            data = await asyncio.gather(*tasks)
        finally:
            # After a failure the others must not go on writing unseen.
            await _end(tasks)
        manifest = Manifest(
            format=TENSOR_FORMAT,
            identity=self._identity,
            prefix_hash=chunk.key,
            previous=chunk.previous,
            token_count=chunk.token_count,
            writer=self._writer,
            data=tuple(data),
        )
        return await self._put_manifest(chunk.key, encode_manifest(manifest))

    async def has(self, chunk: Chunk) -> bool:
        """Whether the store has a usable manifest of the chunk. Raises StoreError."""
        if chunk.key in self._broken:
            return False
        try:
            await self._manifest(chunk)
        except (ObjectMissing, KvRejected):
            return False
        return True

    async def find(self, chunks: Sequence[Chunk]) -> tuple[list[Manifest], Outcome]:
        """Manifests of the longest stored prefix of `chunks`."""
        manifests: list[Manifest] = []
        width = 1
        for start in _starts(len(chunks)):
            # One manifest first: most prompts that are not stored miss their first chunk.
            batch = chunks[start : start + width] if start else chunks[:1]
            width = LOOKUPS
            tasks = [asyncio.ensure_future(self._manifest(chunk)) for chunk in batch]
            try:
                for task in tasks:
                    manifests.append(await task)
            except (StoreError, KvRejected) as err:
                _log_rejected(err)
                return manifests, Outcome(len(manifests), err.reason)
            finally:
                await _end(tasks)
        return manifests, Outcome(len(manifests))

    async def load(
        self,
        manifests: Sequence[Manifest],
        groups: Sequence[tuple[str, tuple[TensorSpec, ...]]],
        deliver: Deliver,
        progress: "Progress | None" = None,
    ) -> Outcome:
        """Read, verify and deliver the chunks of `manifests`, whose tensors are `groups`.

        Cancelling is safe at any time: `progress` has the chunks that were delivered as a whole.
        """
        progress = progress or Progress()
        tasks: list[asyncio.Future[None]] = []
        for index, manifest in enumerate(manifests):
            for name, specs in groups:
                load = self._load_group(manifest, name, specs, partial(deliver, index), progress)
                tasks.append(asyncio.ensure_future(load))
        try:
            for i, task in enumerate(tasks, 1):
                await task
                if i % len(groups) == 0:
                    progress.chunks += 1
        except (StoreError, KvRejected) as err:
            _log_rejected(err)
            failed = manifests[progress.chunks].prefix_hash
            if isinstance(err, KvRejected) or err.reason is Reason.MISSING:
                self.mark_broken(failed)
            return Outcome(progress.chunks, err.reason, progress.bytes)
        finally:
            await _end(tasks)
        return Outcome(progress.chunks, None, progress.bytes)

    def mark_broken(self, key: str) -> None:
        """Have the next write of this chunk replace what is stored."""
        self._broken[key] = None
        while len(self._broken) > 4096:
            del self._broken[next(iter(self._broken))]

    async def close(self) -> None:
        """End the store's connections."""
        await self._objects.close()

    async def _put_group(self, key: str, group: LayerGroup) -> DataObject:
        async with self._slots:
            header = header_bytes(group.name, group.specs, key, self._identity)
            parts = (header, *group.parts)
            content = await _hashed(parts)
            await self._objects.put(data_name(key, group.name, content), parts)
            return DataObject(group.name, sum(memoryview(p).nbytes for p in parts), content)

    async def _put_manifest(self, key: str, data: bytes) -> bool:
        try:
            if key not in self._broken:
                await self._objects.put_if(key, (data,), None)
                return True
        except ObjectExists:
            return False
        except StoreUnsupported:
            # The last writer wins: its manifest names its own data objects, which are all there.
            pass
        await self._objects.put(key, (data,))
        self._broken.pop(key, None)
        return True

    async def _manifest(self, chunk: Chunk) -> Manifest:
        async with self._look_ups:
            found = await self._objects.get(chunk.key, MAX_MANIFEST)
        try:
            return decode_manifest(
                bytes(found.data), chunk.key, self._identity, chunk.previous, chunk.token_count
            )
        except KvRejected:
            self.mark_broken(chunk.key)
            raise

    async def _load_group(
        self,
        manifest: Manifest,
        group: str,
        specs: tuple[TensorSpec, ...],
        deliver: Callable[[str, list[memoryview]], Awaitable[None]],
        progress: "Progress",
    ) -> None:
        key = manifest.prefix_hash
        item = next((item for item in manifest.data if item.group == group), None)
        size = len(header_bytes(group, specs, key, self._identity)) + sum(s.size for s in specs)
        if item is None or item.size != size:
            raise KvRejected(Reason.FOREIGN, f"{key} has other layer groups than this engine")
        async with self._slots:
            found = await self._objects.get(manifest.name_of(item), size)
            if memoryview(found.data).nbytes < size:
                raise KvRejected(Reason.TRUNCATED, f"data object {group} of {key} is truncated")
            if await _hashed((found.data,)) != item.content:
                raise KvRejected(Reason.CORRUPT, f"data object {group} of {key} is damaged")
            views = tensor_views(found.data, group, specs, key, self._identity)
            await deliver(group, views)
            progress.bytes += size


@dataclass(slots=True)
class Progress:
    """How far a load has come, also when it is cancelled."""

    chunks: int = 0
    bytes: int = 0


def _starts(count: int) -> list[int]:
    return [0, *range(1, count, LOOKUPS)] if count else []


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait until it has ended: no task may write into blocks later."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, StoreError, KvRejected):
            await task


async def _hashed(parts: Sequence[Buffer]) -> str:
    """The parts' checksum. Of more than a little in a thread: hashing releases the interpreter
    lock, so that the event loop goes on. Less is hashed sooner than a thread starts."""
    if sum(memoryview(part).nbytes for part in parts) <= _INLINE_BYTES:
        return content_hash(parts)
    return await asyncio.to_thread(content_hash, parts)


def _log_rejected(err: StoreError | KvRejected) -> None:
    # A chunk that is missing is no event: most prompts are new.
    if err.reason is not Reason.MISSING:
        _log.warning("KV in storage not used: %s", err)
