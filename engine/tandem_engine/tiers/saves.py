"""Saves computed chunks: from the GPU's blocks to host memory, and on to storage.

    step runs    saving ──► pinned blocks ──group computed──► copied ──► data object     invisible
    step ended   well: host tier, manifest     aborted, failed: no manifest, no host tier
    after it     save ──► chunks that no running step saved, as a whole

A chunk's blocks are pinned until they are copied, so no other sequence writes into them. A chunk is
saved once. Copies do not wait for the store, and a step waits for neither.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final

from tandem_kvstore.chain import end_tasks
from tandem_kvstore.chunk_store import Chunk
from tandem_kvstore.client import StoreClient
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.tensors import LayerGroup

from ..blocks import BlockManager, BlocksRemoved, BlocksStored
from ..observer import EngineObserver
from ..step import Chunk as StepChunk
from ..step import Sequence as EngineSequence
from ..types import Tier
from .device_chunks import DeviceChunks
from .host_tier import HostChunk, HostTier
from .step_layers import StepLayers
from .stored_chunks import StoredChunks

_log = logging.getLogger(__name__)

_WRITERS: Final = 4
"""Chunks that are written at once after their step."""
_WHILE_COMPUTED: Final = 32
"""Chunks that are saved at once of those that a running step computes, those of earlier steps
included. More: more manifests are written at once when the step ends. Fewer: more chunks of a long
step are saved only after it."""
_FLUSH_SECONDS: Final = 10.0
"""Seconds that a stopping engine waits for its writes."""


class _CopiedGroups:
    """A chunk's layer groups in host memory, as they are copied: an async iterator."""

    def __init__(self) -> None:
        self._groups: asyncio.Queue[LayerGroup | None] = asyncio.Queue()

    def add(self, groups: Sequence[LayerGroup]) -> None:
        """More groups are copied."""
        for group in groups:
            self._groups.put_nowait(group)

    def end(self) -> None:
        """All groups were copied, and the chunk may become visible."""
        self._groups.put_nowait(None)

    def __aiter__(self) -> "_CopiedGroups":
        return self

    async def __anext__(self) -> LayerGroup:
        if (group := await self._groups.get()) is None:
            raise StopAsyncIteration
        return group


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, slots=True)
class _Save:
    """One chunk that is being saved."""

    chunk: Chunk
    event: BlocksStored
    """Its blocks, as a KV event of host memory."""
    blocks: Sequence[int]
    layers: StepLayers | None
    """Of the step that computes it; None: it is computed."""
    owner: EngineSequence
    copy: HostChunk | None = None
    """In host memory already: an earlier write failed."""
    copies: _CopiedGroups = field(default_factory=_CopiedGroups)
    is_kept: "asyncio.Future[bool]" = field(default_factory=_future)
    """Whether its KV counts; known when the step has ended."""
    pin: str = ""
    """Name of the pin that keeps its blocks. Not its key: a dropped save may still be copying."""
    ended: "asyncio.Future[None]" = field(default_factory=_future)
    """Done when it is in storage, or will not be."""


class TierSaves:
    """The saves of one engine. For its event loop."""

    def __init__(
        self,
        device: DeviceChunks,
        blocks: BlockManager,
        observer: EngineObserver,
        *,
        host: HostTier,
        client: StoreClient | None,
        stored: StoredChunks,
        pending_bytes: int,
        wake: Callable[[], None],
    ) -> None:
        """`wake`: called when blocks may be free again."""
        self._device, self._blocks, self._observer = device, blocks, observer
        self._host, self._client, self._stored, self._wake = host, client, stored, wake
        self._size, self._pending_bytes = device.tokens, pending_bytes
        self._used_bytes = 0
        self._while_computed = 0
        """Saves that began in a step and have not ended."""
        self._writers = asyncio.Semaphore(_WRITERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self.unwritten: dict[str, asyncio.Future[None]] = {}
        """Key of a chunk that is being saved → done when it is in storage, or will not be."""
        self._pins = map("save-{}".format, count())

    def save(self, seq: EngineSequence) -> None:
        """Save the full chunks of a sequence that are not saved yet."""
        first, end = seq.saved_chunks, seq.computed_tokens // self._size
        if end <= first:
            return
        seq.saved_chunks = end
        for index, chunk in enumerate(self._device.of(seq, end * self._size)[first:], first):
            copy = self._host.get(chunk.key)
            if self._is_saved(chunk):
                continue
            if (reason := self._refusal()) is not None:
                self._observer.record_not_stored(reason)
                continue
            blocks = self._device.blocks_of(self._blocks.table(seq.id), index)
            save = _Save(chunk, self._event(seq, chunk, index), blocks, None, seq, copy)
            save.is_kept.set_result(True)
            self._start(save)

    @contextmanager
    def saving(self, chunks: Sequence[StepChunk]) -> Iterator[Callable[[int], None] | None]:
        """Save what a step computes while it runs, which is the time of the block.

        Yields what the step's thread calls after each layer, as in `Llama.forward`; None if nothing
        is saved. An exception in the block: the step has failed.
        """
        # A decode step is over before a copy begins.
        prefills = [chunk for chunk in chunks if len(chunk.token_ids) > 1]
        if not prefills or len(self._device.memory.groups) == 1:
            yield None
            return
        layers = StepLayers(self._device.memory.layers_to)
        saves, is_computed = list[_Save](), False
        try:
            self._start_saves(prefills, layers, saves)
            yield layers.on_layer if saves else None
            is_computed = True
        finally:
            for save in saves:
                # As after a step: the chunks of an aborted request are not saved.
                save.is_kept.set_result(is_computed and not save.owner.aborted)
                if not save.is_kept.result():
                    # At once: another request of this step may have the same chunk.
                    self._set_ended(save, is_stored=False)
            # The saves go on in the loop's next turn, when each knows its outcome.
            layers.end()

    async def close(self) -> None:
        """Write what is queued for at most ten seconds."""
        if not self._tasks:
            return
        _, unwritten = await asyncio.wait(list(self._tasks), timeout=_FLUSH_SECONDS)
        if unwritten:
            _log.warning("%d chunks were not written before the stop", len(unwritten))
            await end_tasks(list(unwritten))

    def _start_saves(
        self, chunks: Sequence[StepChunk], layers: StepLayers, saves: list[_Save]
    ) -> None:
        """Start saves of the chunks that a step completes, and add them to `saves`; the others are
        saved after it."""
        if self._is_full():
            # Before the keys of a long prompt are computed.
            return
        for step_chunk in chunks:
            seq, size = step_chunk.sequence, self._size
            first, end = step_chunk.start // size, step_chunk.end // size
            if end <= first:
                continue
            for index, chunk in enumerate(self._device.of(seq, end * size)[first:], first):
                if self._is_full():
                    return
                if self._is_saved(chunk) or chunk.key in self._host:
                    continue
                blocks = self._device.blocks_of(step_chunk.blocks, index)
                event = self._event(seq, chunk, index)
                saves.append(_Save(chunk, event, blocks, layers, seq))
                self._start(saves[-1])

    def _is_full(self) -> bool:
        """Whether a running step can save no chunk now."""
        return self._while_computed >= _WHILE_COMPUTED or self._refusal() is not None

    def _is_saved(self, chunk: Chunk) -> bool:
        """Whether nothing is left to do for a chunk."""
        return chunk.key in self._stored or (self._client is None and chunk.key in self._host)

    def _start(self, save: _Save) -> None:
        self._stored.add_saving(save.chunk.key)
        self.unwritten[save.chunk.key] = save.ended
        self._used_bytes += self._device.memory.chunk_bytes
        self._while_computed += save.layers is not None
        if save.copy is None:
            # Now, while the sequence still has them.
            save.pin = next(self._pins)
            self._blocks.pin(save.pin, save.blocks)
        task = asyncio.create_task(self._save(save))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    async def _save(self, save: _Save) -> None:
        key, is_stored = save.chunk.key, False
        write = None
        if (client := self._client) is not None:
            write = asyncio.create_task(self._write(client, save))
        try:
            if await self._copy(save):
                save.copies.end()
                is_stored = write is not None and await write
        finally:
            if write is not None:
                # Of a dropped step, or of an engine that stops: no manifest any more.
                await end_tasks([write])
            self._used_bytes -= self._device.memory.chunk_bytes
            self._while_computed -= save.layers is not None
            self._set_ended(save, is_stored=is_stored)
        if is_stored:
            self._observer.record_tier_store(Tier.STORAGE, self._size)
            self._observer.record_kv_event(replace(save.event, medium=Tier.STORAGE.medium))
            self._stored.add_stored(key, save.event.hashes)

    async def _copy(self, save: _Save) -> bool:
        """Copy a chunk's layer groups out of its blocks, as they are computed, and keep them.

        False: they do not count, because the step failed or the request was aborted.
        """
        if save.copy is not None:
            save.copies.add(save.copy.groups)
            return True
        memory, groups = self._device.memory, list[LayerGroup]()
        try:
            while (first := len(groups)) < (end := len(memory.groups)):
                if save.layers is not None:
                    await save.layers.wait(first)
                    if save.layers.is_running:
                        # The step's thread may be further, but a device not yet.
                        end = first + 1
                if save.is_kept.done() and not save.is_kept.result():
                    return False
                copies = await self._device.read(save.blocks, first, end, save.layers)
                groups += copies
                save.copies.add(copies)
        finally:
            self._blocks.unpin(save.pin)
            # A queued sequence may fit now.
            self._wake()
        if is_kept := await save.is_kept:
            self._add_to_host(
                save.chunk.key, HostChunk(tuple(groups), save.event, memory.chunk_bytes)
            )
        return is_kept

    async def _write(self, client: StoreClient, save: _Save) -> bool:
        # The groups of all chunks of a step come at once: `_WHILE_COMPUTED` bounds these.
        async with self._writers if save.layers is None else nullcontext():
            return await client.store(save.chunk, save.copies)

    def _set_ended(self, save: _Save, *, is_stored: bool) -> None:
        if not save.ended.done():
            save.ended.set_result(None)
            if self.unwritten.get(save.chunk.key) is not save.ended:
                # A later save of the chunk, which the store had and then deleted.
                return
            del self.unwritten[save.chunk.key]
            if not is_stored:
                # The next sequence that computes the chunk tries again.
                self._stored.discard(save.chunk.key)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (err := task.exception()) is not None:
            _log.error("saving KV failed with an internal error", exc_info=err)

    def _add_to_host(self, key: str, chunk: HostChunk) -> None:
        removed = self._host.add(key, chunk)
        if key in self._host:
            self._observer.record_tier_store(Tier.HOST, self._size)
            self._observer.record_kv_event(chunk.event)
        self._observer.record_host_tier(self._host.size)
        for other in removed:
            if other is not chunk:
                gone = BlocksRemoved(other.event.hashes, Tier.HOST.medium)
                self._observer.record_kv_event(gone)

    def _event(self, seq: EngineSequence, chunk: Chunk, index: int) -> BlocksStored:
        """The KV event of the chunk, for host memory."""
        start, end = index * self._device.blocks, (index + 1) * self._device.blocks
        return BlocksStored(
            hashes=tuple(seq.chain[start:end]),
            parent_hash=seq.chain[start - 1] if start else None,
            token_ids=tuple(seq.tokens[chunk.token_count - self._size : chunk.token_count]),
            block_size=self._blocks.block_size,
            medium=Tier.HOST.medium,
            cache_salt="" if start else seq.request.cache_salt,
        )

    def _refusal(self) -> Reason | None:
        """Why a chunk is not even copied now; None: it is."""
        if self._used_bytes + self._device.memory.chunk_bytes > self._pending_bytes:
            return Reason.BUSY
        # A copy that can be kept nowhere would only slow the requests.
        is_open = self._client is not None and not self._client.guard.breaker.allows
        return Reason.BREAKER_OPEN if is_open and not self._host.capacity else None
