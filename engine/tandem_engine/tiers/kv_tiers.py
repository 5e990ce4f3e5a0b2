"""Moves chunks between the GPU's blocks, host memory and storage, for the engine's event loop.

    admitted sequence ──may_load──► load: host chunks first, then storage ──► on_end(tokens)
    computed chunk ──save──► pinned blocks ──copy thread──► host tier, queue of writes ──► storage

A loading sequence has its blocks and no place in a step. A saved chunk's blocks are pinned until
they are copied, so no other sequence writes into them. A chunk is saved once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from tandem_contract.kv_reference import LoadLeg, StoreLeg
from tandem_kvstore.chunk_store import Chunk, chunks_of
from tandem_kvstore.client import StoreClient
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.identity import KvIdentity, Prompt, chunk_keys

from ..blocks import BlockManager, BlocksRemoved, BlocksStored
from ..observer import EngineObserver
from ..scheduler import Step
from ..step import Chunk as StepChunk
from ..step import Sequence as EngineSequence
from ..types import Delta, PullResult, Tier
from .chunk_memory import ChunkMemory
from .handoff import Put, StorageHandoffs, is_store_answer
from .host_tier import HostChunk, HostTier
from .stored_chunks import StoredChunks

_log = logging.getLogger(__name__)
T = TypeVar("T")

_WRITERS: Final = 4
"""Chunks that are written at once."""
_FLUSH_SECONDS: Final = 10.0
"""Seconds that a stopping engine waits for its writes."""

OnLoadEnd = Callable[[EngineSequence, int], None]
"""Called with a sequence whose load has ended, and its number of tokens with KV now."""


class KvTiers:
    """Host memory and storage of one engine."""

    def __init__(
        self,
        memory: ChunkMemory,
        identity: KvIdentity,
        blocks: BlockManager,
        observer: EngineObserver,
        on_end: OnLoadEnd,
        *,
        on_unpin: Callable[[], None],
        host_bytes: int,
        pending_bytes: int,
        client: StoreClient | None,
    ) -> None:
        self._memory, self._identity, self._blocks = memory, identity, blocks
        self._observer, self._on_end, self._client = observer, on_end, client
        self._on_unpin = on_unpin
        self._size, self._host = identity.chunk_tokens, HostTier(host_bytes)
        self._pending_bytes = pending_bytes
        self._copier = ThreadPoolExecutor(1, "kv-copy")
        self._loads: dict[str, asyncio.Task[tuple[int, int]]] = {}
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

    def deliver(self, seq: EngineSequence, delta: Delta, put: Put) -> None:
        """Put a delta; the last one of a prefill leg through storage once the store has its KV."""
        if isinstance(leg := seq.request.kv, StoreLeg) and is_store_answer(seq, delta):
            self._handoffs.deliver(self._chunks(seq, seq.prompt_tokens), leg, delta, put)
        else:
            put(delta)

    def may_load(self, seq: EngineSequence) -> bool:
        """Whether to try to load KV for an admitted sequence; answers at once."""
        if isinstance(leg := seq.request.kv, LoadLeg):
            end = leg.tandem_kv_reference.token_count
            if self._handoffs.accepts(seq, leg, self._chunks(seq, end)):
                return seq.computed_tokens < min(end, seq.prompt_tokens - 1)
        first = seq.computed_tokens // self._size
        # The last token is computed in any case: a prompt's last full chunk may be of use still.
        if (len(seq.tokens) - 1) // self._size <= first and len(seq.tokens) % self._size:
            return False
        # Only the first chunk's key: a load makes those of the others.
        chunks = self._chunks(seq, (first + 1) * self._size)
        if len(chunks) <= first:
            return False
        chunk = chunks[first]
        return chunk.key in self._host or (
            self._client is not None and self._client.may_have(chunk)
        )

    def apply(self, step: Step) -> None:
        """Start the loads of a planned step. For each, `on_end` follows, when no thread writes into
        the sequence's blocks any more."""
        begin = asyncio.get_running_loop().time()
        for seq in step.tier_loads:
            self._loads[seq.id] = task = asyncio.create_task(self._load(seq))
            task.add_done_callback(partial(self._finish, seq, begin))

    def is_loading(self, request_id: str) -> bool:
        """Whether a load for this request has not ended."""
        return request_id in self._loads

    def cancel(self, request_id: str) -> None:
        """Break a load off; `on_end` follows."""
        self._loads[request_id].cancel()

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
        for index, chunk in enumerate(self._chunks(seq, end * self._size)[first:], first):
            copy = self._host.get(chunk.key)
            if chunk.key in self._stored or (copy is not None and self._client is None):
                continue
            if (reason := self._refusal()) is not None:
                self._observer.record_not_stored(reason)
                continue
            self._stored.add_saving(chunk.key)
            if self._client is not None:
                self._unwritten[chunk.key] = asyncio.get_running_loop().create_future()
            self._queued_bytes += self._memory.chunk_bytes
            if copy is not None:
                # An earlier write failed: the copy in host memory is as good as the blocks.
                self._queue_write(chunk, copy)
                continue
            blocks, _ = self._blocks_of(self._blocks.table(seq.id), index)
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
        loads = list(self._loads.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
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
        self._copier.shutdown()

    def _chunks(self, seq: EngineSequence, limit: int) -> list[Chunk]:
        keys = chunk_keys(self._identity, Prompt(seq.tokens, seq.request.cache_salt), limit)
        return chunks_of(keys, self._size)

    async def _load(self, seq: EngineSequence) -> tuple[int, int]:
        """Returns the number of tokens with KV, and the bytes that were loaded."""
        # Fixed until the load ends: a loading sequence is neither extended nor preempted.
        table = self._blocks.table(seq.id)
        shared = seq.computed_tokens // self._blocks.block_size
        first = seq.computed_tokens // self._size
        chunks = self._chunks(seq, len(seq.tokens))
        size = 0

        async def deliver(index: int, group: str, tensors: list[memoryview]) -> None:
            blocks, start = self._blocks_of(table, index)
            write = partial(self._memory.write, group, tensors, blocks, max(0, shared - start))
            await self._in_copier(write)

        done = first
        while done < len(chunks) and (host := self._host.get(chunks[done].key)) is not None:
            for group in host.groups:
                await deliver(done, group.name, [memoryview(part) for part in group.parts])
            size += host.size
            done += 1
            self._observer.record_tier_load(Tier.HOST, self._size)
        if done < len(chunks) and self._client is not None and self._client.may_have(chunks[done]):
            base = done
            result = await self._client.load(
                chunks[base:],
                self._memory.groups,
                lambda index, group, tensors: deliver(base + index, group, tensors),
                done * self._size,
                limit=seq.load_limit,
            )
            done += result.chunks
            size += result.bytes
            self._stored.remove_lost(chunks[done:], result.reason)
            per_chunk = self._size // self._blocks.block_size
            for index in range(base, done):
                hashes = seq.chain[index * per_chunk : (index + 1) * per_chunk]
                self._stored.add_stored(chunks[index].key, hashes)
            self._observer.record_tier_load(Tier.STORAGE, result.chunks * self._size)
        if done == first:
            return seq.computed_tokens, 0
        # The last token is computed here: its logits choose the next one.
        return min(done * self._size, len(seq.tokens) - 1), size

    def _finish(
        self, seq: EngineSequence, begin: float, task: asyncio.Task[tuple[int, int]]
    ) -> None:
        del self._loads[seq.id]
        computed, size = seq.computed_tokens, 0
        if not task.cancelled():
            if (err := task.exception()) is None:
                computed, size = task.result()
            else:
                _log.error("loading KV for %s failed with an internal error", seq.id, exc_info=err)
        seconds = asyncio.get_running_loop().time() - begin
        loaded = computed - seq.computed_tokens
        self._handoffs.count_failure(seq, computed)
        if loaded > 0:
            seq.pull = PullResult(loaded, size, seconds)
            uncached = seq.prompt_tokens - seq.cached_tokens
            self._observer.record_external_lookup(uncached, loaded)
        self._on_end(seq, computed)

    async def _save(self, chunk: Chunk, blocks: Sequence[int], event: BlocksStored) -> None:
        try:
            groups = await self._in_copier(partial(self._memory.read, blocks))
        except BaseException:
            self._end_write(chunk.key)
            raise
        finally:
            self._blocks.unpin(chunk.key)
            # A queued sequence may fit now.
            self._on_unpin()
        copy = HostChunk(groups, event, self._memory.chunk_bytes)
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

    def _blocks_of(self, table: Sequence[int], index: int) -> tuple[Sequence[int], int]:
        """The blocks of the chunk `index` of a sequence, and the position of the first."""
        count = self._size // self._blocks.block_size
        return table[index * count : (index + 1) * count], index * count

    def _refusal(self) -> Reason | None:
        """Why a chunk is not even copied now; None: it is."""
        if self._queued_bytes + self._memory.chunk_bytes > self._pending_bytes:
            return Reason.BUSY
        # A copy that can be kept nowhere would only slow the requests.
        is_open = self._client is not None and not self._client.guard.breaker.allows
        return Reason.BREAKER_OPEN if is_open and not self._host.capacity else None

    def _end_write(self, key: str) -> None:
        if (write := self._unwritten.pop(key, None)) is not None:
            write.set_result(None)

    async def _in_copier(self, work: Callable[[], T]) -> T:
        """Run `work` in the copy thread; a cancelled caller waits, too, until it has ended."""
        future = asyncio.get_running_loop().run_in_executor(self._copier, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
