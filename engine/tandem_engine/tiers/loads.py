"""Loads chunks of admitted sequences into their blocks: from host memory, then from storage.

    may_load ──► apply: one task for each load ──► on_end(tokens with KV)
                          │ storage, where it pays: layer group by layer group
                          └──► seq.arriving_tokens: a step may start, and wait for later layers

A loading sequence has its blocks; it has no place in a step, except in one on arriving KV.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from tandem_contract.kv_reference import LoadLeg
from tandem_kvstore.chunk_store import Chunk, Deliver
from tandem_kvstore.client import StoreClient

from ..blocks import BlockManager
from ..observer import EngineObserver
from ..scheduler import Step
from ..step import Sequence as EngineSequence
from ..types import PullResult, Tier
from .arriving import ArrivingKv
from .device_chunks import DeviceChunks
from .handoff import StorageHandoffs
from .host_tier import HostTier
from .stored_chunks import StoredChunks

_log = logging.getLogger(__name__)

OnLoadEnd = Callable[[EngineSequence, int], None]
"""Called with a sequence whose load has ended, and its number of tokens with KV now."""


class TierLoads:
    """The loads of one engine. For its event loop."""

    def __init__(
        self,
        device: DeviceChunks,
        blocks: BlockManager,
        observer: EngineObserver,
        *,
        host: HostTier,
        client: StoreClient | None,
        stored: StoredChunks,
        handoffs: StorageHandoffs,
        on_end: OnLoadEnd,
        wake: Callable[[], None],
    ) -> None:
        """`wake`: called when a loading sequence can start to compute."""
        self._device, self._blocks, self._observer = device, blocks, observer
        self._host, self._client, self._stored = host, client, stored
        self._handoffs, self._on_end, self._wake = handoffs, on_end, wake
        self._loads: dict[str, asyncio.Task[tuple[int, int]]] = {}
        # Of the loads that go layer group by layer group.
        self._arriving: dict[str, ArrivingKv] = {}

    def may_load(self, seq: EngineSequence) -> bool:
        """Whether to try to load KV for an admitted sequence; answers at once."""
        if isinstance(leg := seq.request.kv, LoadLeg):
            end = leg.tandem_kv_reference.token_count
            if self._handoffs.accepts(seq, leg, self._device.of(seq, end)):
                return seq.computed_tokens < min(end, seq.prompt_tokens - 1)
        size = self._device.tokens
        first = seq.computed_tokens // size
        # The last token is computed in any case: a prompt's last full chunk may be of use still.
        if (len(seq.tokens) - 1) // size <= first and len(seq.tokens) % size:
            return False
        # Only the first chunk's key: a load makes those of the others.
        chunks = self._device.of(seq, (first + 1) * size)
        if len(chunks) <= first:
            return False
        chunk = chunks[first]
        return chunk.key in self._host or (
            self._client is not None and self._client.may_have(chunk)
        )

    def start(self, step: Step) -> None:
        """Start the loads of a planned step. For each, `on_end` follows, when no thread writes into
        the sequence's blocks any more."""
        begin = asyncio.get_running_loop().time()
        for seq in step.tier_loads:
            self._loads[seq.id] = task = asyncio.create_task(self._load(seq))
            task.add_done_callback(partial(self._finish, seq, begin))

    def arriving(self, request_id: str) -> ArrivingKv:
        """The KV that a load brings layer group by layer group, of a sequence with
        `arriving_tokens`."""
        return self._arriving[request_id]

    def is_loading(self, request_id: str) -> bool:
        """Whether a load for this request has not ended."""
        return request_id in self._loads

    def cancel(self, request_id: str) -> None:
        """Break a load off; `on_end` follows."""
        self._loads[request_id].cancel()
        if (kv := self._arriving.get(request_id)) is not None:
            # No step may start on it, and one that waits for a layer ends now.
            kv.on_cut()

    async def close(self) -> None:
        """Break all loads off."""
        loads = list(self._loads.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    async def _load(self, seq: EngineSequence) -> tuple[int, int]:
        """Returns the number of tokens with KV, and the bytes that were loaded."""
        # Fixed until the load ends: a loading sequence is neither extended nor preempted.
        table = self._blocks.table(seq.id)
        shared = seq.computed_tokens // self._blocks.block_size
        first = done = seq.computed_tokens // self._device.tokens
        chunks = self._device.of(seq, len(seq.tokens))
        size = 0

        async def deliver(index: int, group: str, tensors: list[memoryview]) -> None:
            skipped = max(0, shared - index * self._device.blocks)
            blocks = self._device.blocks_of(table, index)
            await self._device.write(group, tensors, blocks, skipped)

        while done < len(chunks) and (host := self._host.get(chunks[done].key)) is not None:
            for group in host.groups:
                await deliver(done, group.name, [memoryview(part) for part in group.parts])
            size += host.size
            done += 1
            self._observer.record_tier_load(Tier.HOST, self._device.tokens)
        if done < len(chunks) and self._client is not None and self._client.may_have(chunks[done]):
            loaded, read = await self._load_stored(self._client, seq, chunks, done, deliver)
            done += loaded
            size += read
        if done == first:
            return seq.computed_tokens, 0
        return self._tokens_of(seq, done), size

    async def _load_stored(
        self,
        client: StoreClient,
        seq: EngineSequence,
        chunks: Sequence[Chunk],
        base: int,
        deliver: Deliver,
    ) -> tuple[int, int]:
        """Load `chunks[base:]` from storage. Returns how many came, and their bytes."""
        result = await client.load(
            chunks[base:],
            self._device.memory.groups,
            lambda index, group, tensors: deliver(base + index, group, tensors),
            base * self._device.tokens,
            limit=seq.load_limit,
            watch=self._watch(client, seq, base, len(chunks)),
        )
        done = base + result.chunks
        self._stored.remove_lost(chunks[done:], result.reason)
        count = self._device.blocks
        for index in range(base, done):
            hashes = seq.chain[index * count : (index + 1) * count]
            self._stored.add_stored(chunks[index].key, hashes)
        self._observer.record_tier_load(Tier.STORAGE, result.chunks * self._device.tokens)
        return result.chunks, result.bytes

    def _watch(
        self, client: StoreClient, seq: EngineSequence, base: int, end: int
    ) -> ArrivingKv | None:
        """For the load of the chunks `base` to `end`; None: computing waits for its end."""
        groups, tokens = self._device.memory.groups, self._tokens_of(seq, end)
        size = (end - base) * self._device.memory.chunk_bytes
        pays = client.guard.overlap_pays(size, len(groups), len(seq.tokens) - tokens, tokens)
        # A decode engine that reads layers while they are computed must not get dropped ones.
        if not pays or seq.is_remote_decode:
            return None

        def on_start(chunks: int) -> None:
            seq.arriving_tokens = self._tokens_of(seq, base + chunks)
            self._wake()

        def on_cut() -> None:
            seq.arriving_tokens = None

        layers = list(accumulate(len(specs) for _, specs in groups))
        self._arriving[seq.id] = kv = ArrivingKv(layers, on_start, on_cut)
        return kv

    def _tokens_of(self, seq: EngineSequence, chunks: int) -> int:
        # The last token is computed here: its logits choose the next one.
        return min(chunks * self._device.tokens, len(seq.tokens) - 1)

    def _finish(
        self, seq: EngineSequence, begin: float, task: asyncio.Task[tuple[int, int]]
    ) -> None:
        del self._loads[seq.id]
        seq.arriving_tokens = None
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
        if (kv := self._arriving.pop(seq.id, None)) is not None:
            kv.end()
