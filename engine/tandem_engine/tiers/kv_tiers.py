"""Moves chunks between the GPU's blocks, host memory and storage, for the engine's event loop.

    admitted sequence ──may_load──► `loads` ──► on_end(tokens)
    computed chunk ──save──► pinned blocks ──copy thread──► host tier, queue of writes ──► storage

A saved chunk's blocks are pinned until they are copied, so no other sequence writes into them. A
chunk is saved once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from tandem_contract.kv_reference import StoreLeg
from tandem_kvstore.chunk_store import Chunk
from tandem_kvstore.client import StoreClient
from tandem_kvstore.errors import Reason

from ..blocks import BlockManager, BlocksRemoved, BlocksStored
from ..observer import EngineObserver
from ..scheduler import Step
from ..step import Chunk as StepChunk
from ..step import Sequence as EngineSequence
from ..types import Delta, Tier
from .arriving import ArrivingKv
from .device_chunks import DeviceChunks
from .handoff import Put, StorageHandoffs, is_store_answer
from .host_tier import HostChunk, HostTier
from .loads import OnLoadEnd, TierLoads
from .stored_chunks import StoredChunks

_log = logging.getLogger(__name__)

_WRITERS: Final = 4
"""Chunks that are written at once."""
_FLUSH_SECONDS: Final = 10.0
"""Seconds that a stopping engine waits for its writes."""


class KvTiers:
    """Host memory and storage of one engine."""

    def __init__(
        self,
        device: DeviceChunks,
        blocks: BlockManager,
        observer: EngineObserver,
        on_end: OnLoadEnd,
        *,
        wake: Callable[[], None],
        host_bytes: int,
        pending_bytes: int,
        client: StoreClient | None,
    ) -> None:
        """`wake`: called when a queued or a loading sequence may run now."""
        self._device, self._blocks, self._observer = device, blocks, observer
        self._client, self._wake = client, wake
        self._size, self._host = device.tokens, HostTier(host_bytes)
        self._pending_bytes = pending_bytes
        self._queue: deque[tuple[Chunk, HostChunk]] = deque()
        self._queued_bytes = 0
        self._saves: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.Task[None]] = set()
        self._stored = StoredChunks(observer.record_kv_event)
        # Key of a chunk that is being saved → done when it is in storage, or will not be.
        self._unwritten: dict[str, asyncio.Future[None]] = {}
        self._handoffs = StorageHandoffs(
            client, observer, self._unwritten, self._stored.remove_lost
        )
        self._loads = TierLoads(
            *(device, blocks, observer),
            host=self._host,
            client=client,
            stored=self._stored,
            handoffs=self._handoffs,
            on_end=on_end,
            wake=wake,
        )

    def deliver(self, seq: EngineSequence, delta: Delta, put: Put) -> None:
        """Put a delta; the last one of a prefill leg through storage once the store has its KV."""
        if isinstance(leg := seq.request.kv, StoreLeg) and is_store_answer(seq, delta):
            self._handoffs.deliver(self._device.of(seq, seq.prompt_tokens), leg, delta, put)
        else:
            put(delta)

    def may_load(self, seq: EngineSequence) -> bool:
        """Whether to try to load KV for an admitted sequence; answers at once."""
        return self._loads.may_load(seq)

    def apply(self, step: Step) -> None:
        """Start the loads of a planned step; `on_end` follows for each."""
        self._loads.start(step)

    def arriving(self, request_id: str) -> ArrivingKv:
        """The KV that a step waits for."""
        return self._loads.arriving(request_id)

    def is_loading(self, request_id: str) -> bool:
        """Whether a load for this request has not ended."""
        return self._loads.is_loading(request_id)

    def cancel(self, request_id: str) -> None:
        """Break a load off; `on_end` follows."""
        self._loads.cancel(request_id)

    def observe_step(self, chunks: Sequence[StepChunk], seconds: float) -> None:
        """Learn how long the prompt tokens of a step took to compute."""
        if self._client is None:
            return
        longest = max(chunks, key=lambda chunk: len(chunk.token_ids))
        # Steps that only decode say nothing about prompts.
        if len(longest.token_ids) > 1:
            tokens = sum(len(chunk.token_ids) for chunk in chunks)
            self._client.guard.observe_compute(tokens, longest.start, seconds)

    def save(self, seq: EngineSequence) -> None:
        """Save the full chunks of a sequence that are not saved yet."""
        first, end = seq.saved_chunks, seq.computed_tokens // self._size
        if end <= first:
            return
        seq.saved_chunks = end
        for index, chunk in enumerate(self._device.of(seq, end * self._size)[first:], first):
            copy = self._host.get(chunk.key)
            if chunk.key in self._stored or (copy is not None and self._client is None):
                continue
            if (reason := self._refusal()) is not None:
                self._observer.record_not_stored(reason)
                continue
            self._stored.add_saving(chunk.key)
            if self._client is not None:
                self._unwritten[chunk.key] = asyncio.get_running_loop().create_future()
            self._queued_bytes += self._device.memory.chunk_bytes
            if copy is not None:
                # An earlier write failed: the copy in host memory is as good as the blocks.
                self._queue_write(chunk, copy)
                continue
            blocks = self._device.blocks_of(self._blocks.table(seq.id), index)
            # Now, while the sequence still has them.
            self._blocks.pin(chunk.key, blocks)
            task = asyncio.create_task(self._save(chunk, blocks, self._event(seq, chunk, index)))
            self._saves.add(task)
            task.add_done_callback(self._saves.discard)

    def remove_stored(self, keys: Sequence[str]) -> None:
        """The collector of this engine deleted chunks."""
        self._stored.remove(keys)

    async def close(self) -> None:
        """Break loads off, write what is queued for at most ten seconds, end threads."""
        await self._loads.close()
        await self._handoffs.close()
        try:
            async with asyncio.timeout(_FLUSH_SECONDS):
                while self._saves or self._writers:
                    await asyncio.gather(*self._saves, *self._writers)
        except TimeoutError:
            _log.warning("%d chunks were not written before the stop", len(self._queue))
            await asyncio.gather(*self._writers, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        self._device.close()

    async def _save(self, chunk: Chunk, blocks: Sequence[int], event: BlocksStored) -> None:
        try:
            groups = await self._device.read(blocks)
        except BaseException:
            self._end_write(chunk.key)
            raise
        finally:
            self._blocks.unpin(chunk.key)
            # A queued sequence may fit now.
            self._wake()
        copy = HostChunk(groups, event, self._device.memory.chunk_bytes)
        self._add_to_host(chunk.key, copy)
        if self._client is None:
            self._queued_bytes -= copy.size
            self._stored.discard(chunk.key)
            return
        self._queue_write(chunk, copy)

    def _queue_write(self, chunk: Chunk, copy: HostChunk) -> None:
        self._queue.append((chunk, copy))
        if self._client is not None and len(self._writers) < _WRITERS:
            task = asyncio.create_task(self._write_queued(self._client))
            self._writers.add(task)
            task.add_done_callback(self._writers.discard)

    async def _write_queued(self, client: StoreClient) -> None:
        while self._queue:
            chunk, copy = self._queue.popleft()
            try:
                is_stored = await client.store(chunk, copy.groups)
            finally:
                self._queued_bytes -= copy.size
                self._end_write(chunk.key)
            if is_stored:
                self._observer.record_tier_store(Tier.STORAGE, self._size)
                self._observer.record_kv_event(replace(copy.event, medium=Tier.STORAGE.medium))
                self._stored.add_stored(chunk.key, copy.event.hashes)
            else:
                # Not stored: the next sequence that computes the chunk tries again.
                self._stored.discard(chunk.key)

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
        count = self._size // self._blocks.block_size
        start = index * count
        return BlocksStored(
            hashes=tuple(seq.chain[start : start + count]),
            parent_hash=seq.chain[start - 1] if start else None,
            token_ids=tuple(seq.tokens[chunk.token_count - self._size : chunk.token_count]),
            block_size=self._blocks.block_size,
            medium=Tier.HOST.medium,
            cache_salt="" if start else seq.request.cache_salt,
        )

    def _refusal(self) -> Reason | None:
        """Why a chunk is not even copied now; None: it is."""
        if self._queued_bytes + self._device.memory.chunk_bytes > self._pending_bytes:
            return Reason.BUSY
        # A copy that can be kept nowhere would only slow the requests.
        is_open = self._client is not None and not self._client.guard.breaker.allows
        return Reason.BREAKER_OPEN if is_open and not self._host.capacity else None

    def _end_write(self, key: str) -> None:
        if (write := self._unwritten.pop(key, None)) is not None:
            write.set_result(None)
