"""Loads chunks of admitted sequences into their blocks: from host memory, then from storage.

    may_load ──► start: one task for each load ──► on_end(tokens with KV)
                          │ storage, as `LoadGuard` decides:
                          ├ LAYERS ► seq.arriving_tokens: a step may start, and wait for layers
                          └ BOTH ──► seq.rear, on_end: steps compute the front ──► on_end again

A loading sequence has its blocks; it has no place in a step, except in one on arriving KV. With a
rear, it runs in the same steps as others.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tandem_contract.kv_reference import LoadLeg
from tandem_kvstore.chunk_store import Deliver
from tandem_kvstore.client import StoreClient
from tandem_kvstore.guard.load_guard import Decision, Way

from ..blocks import BlockManager
from ..observer import EngineObserver
from ..scheduler import Step
from ..step import Sequence as EngineSequence
from ..types import PullResult, Tier
from .arriving import ArrivingKv
from .device_chunks import DeviceChunks
from .handoff import StorageHandoffs
from .host_tier import HostTier
from .rear import Prefix, RearLoad
from .stored_chunks import StoredChunks

_log = logging.getLogger(__name__)

OnLoadEnd = Callable[[EngineSequence, int], None]
"""Called with a sequence whose load has ended, or goes on while it is computed, and its number of
tokens with KV now."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What one load brought."""

    computed: int
    """Leading tokens of the prompt that have their KV; those of a rear do not count."""
    tokens: int
    bytes: int


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
        self._loads: dict[str, asyncio.Task[_Loaded]] = {}
        # Of the loads that go layer group by layer group.
        self._arriving: dict[str, ArrivingKv] = {}
        # Of the loads that go on while the tokens before them are computed.
        self._rears: dict[str, RearLoad] = {}

    def may_load(self, seq: EngineSequence) -> bool:
        """Whether to try to load KV for an admitted sequence; answers at once."""
        if isinstance(leg := seq.request.kv, LoadLeg):
            end = leg.tandem_kv_reference.token_count
            if self._handoffs.accept(seq, leg, self._device.of(seq, end)):
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
        """Start the loads of a planned step, and limit those that sequences wait for."""
        for seq in step.tier_loads:
            self.load(seq)
        for seq in step.awaiting_rear:
            if (rear := self._rears.get(seq.id)) is not None:
                rear.set_awaited()

    def load(self, seq: EngineSequence, *, is_instead_of_pull: bool = False) -> None:
        """Start to load KV for a sequence that has its blocks. `on_end` follows, when no thread
        writes into them any more."""
        begin = asyncio.get_running_loop().time()
        self._loads[seq.id] = task = asyncio.create_task(self._load(seq))
        task.add_done_callback(partial(self._finish, seq, begin, is_instead_of_pull))

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

    async def _load(self, seq: EngineSequence) -> _Loaded:
        # Fixed until the load ends: such a sequence is neither extended nor preempted.
        table = self._blocks.table(seq.id)
        before = seq.computed_tokens
        shared = before // self._blocks.block_size
        first = done = before // self._device.tokens
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
        prefix, rear = Prefix(chunks[done:], done, self._device.tokens, len(seq.tokens) - 1), 0

        async def deliver_stored(index: int, group: str, tensors: list[memoryview]) -> None:
            await deliver(prefix.first + index, group, tensors)

        client = self._client
        if client is not None and prefix.chunks and client.may_have(prefix.chunks[0]):
            decision = self._decide(client, seq, prefix)
            if decision.way is Way.BOTH:
                rear, read = await self._load_rear(client, seq, prefix, deliver_stored, decision)
            else:
                front, read = await self._load_front(client, seq, prefix, deliver_stored, decision)
                done += front
            size += read
        computed = before if done == first else self._tokens_of(seq, done)
        return _Loaded(computed, computed - before + rear, size)

    def _decide(self, client: StoreClient, seq: EngineSequence, prefix: Prefix) -> Decision:
        """How to get the KV of the chunks that may be stored."""
        # A decode engine that reads layers while they are computed must not get dropped ones.
        groups = 1 if seq.is_remote_decode else len(self._device.memory.groups)
        tail = len(seq.tokens) - prefix.tokens(len(prefix.chunks))
        context = prefix.first * self._device.tokens
        hit = client.hit(
            len(prefix.chunks),
            context,
            cached=max(0, seq.computed_tokens - context),
            groups=groups,
            tail=tail,
            can_do_both=True,
        )
        if seq.load_limit is None:
            return client.decide(hit)
        return client.decide_hand_off(hit, seq.load_limit)

    async def _load_front(
        self,
        client: StoreClient,
        seq: EngineSequence,
        prefix: Prefix,
        deliver: Deliver,
        decision: Decision,
    ) -> tuple[int, int]:
        """Load chunks from storage. Returns how many came, and their bytes."""
        result = await client.load(
            prefix.chunks,
            self._device.memory.groups,
            deliver,
            prefix.first * self._device.tokens,
            limit=seq.load_limit,
            decision=decision,
            watch=self._watch(seq, prefix) if decision.way is Way.LAYERS else None,
        )
        self._stored.remove_lost(prefix.chunks[result.chunks :], result.reason)
        self._add_stored(seq, prefix, result.chunks)
        self._observer.record_tier_load(Tier.STORAGE, result.chunks * self._device.tokens)
        return result.chunks, result.bytes

    async def _load_rear(
        self,
        client: StoreClient,
        seq: EngineSequence,
        prefix: Prefix,
        deliver: Deliver,
        decision: Decision,
    ) -> tuple[int, int]:
        """Load the last chunks while the engine computes the first ones. Returns the tokens that
        came, and their bytes."""

        def on_found(count: int) -> None:
            # Also those that are computed: they need not be saved.
            self._add_stored(seq, prefix, count)
            self._wake()

        computed = max(seq.computed_tokens, prefix.first * self._device.tokens)
        load = RearLoad(
            *(client, prefix, decision, computed),
            on_found=on_found,
            on_lost=self._stored.remove_lost,
        )
        seq.rear, self._rears[seq.id] = load.rear, load
        self._on_end(seq, computed)
        try:
            result = await client.load_rear(
                prefix.chunks,
                self._device.memory.groups,
                deliver,
                load,
                load.deadline,
            )
        finally:
            # Its deadline cannot be set any more.
            del self._rears[seq.id]
        tokens = load.end(result.chunks)
        if not tokens:
            seq.rear = None
        if seq.start_time is not None:
            seq.waited, seq.overlapped = load.waited, time.perf_counter() - seq.start_time
        self._observer.record_tier_load(Tier.STORAGE, result.chunks * self._device.tokens)
        return tokens, result.bytes

    def _add_stored(self, seq: EngineSequence, prefix: Prefix, count: int) -> None:
        """The first `count` chunks are in storage."""
        blocks = self._device.blocks
        for index, chunk in enumerate(prefix.chunks[:count], prefix.first):
            hashes = seq.chain[index * blocks : (index + 1) * blocks]
            self._stored.add_stored(chunk.key, hashes)

    def _watch(self, seq: EngineSequence, prefix: Prefix) -> ArrivingKv:
        """For a load by layers: steps may start before its end."""

        def on_start(chunks: int) -> None:
            seq.arriving_tokens = prefix.tokens(chunks)
            self._wake()

        def on_cut() -> None:
            seq.arriving_tokens = None

        layers = self._device.memory.layers_to
        self._arriving[seq.id] = kv = ArrivingKv(layers, on_start, on_cut)
        return kv

    def _tokens_of(self, seq: EngineSequence, chunks: int) -> int:
        # The last token is computed here: its logits choose the next one.
        return min(chunks * self._device.tokens, len(seq.tokens) - 1)

    def _finish(
        self,
        seq: EngineSequence,
        begin: float,
        is_instead_of_pull: bool,
        task: "asyncio.Task[_Loaded]",
    ) -> None:
        del self._loads[seq.id]
        seq.arriving_tokens = None
        result = _Loaded(seq.computed_tokens, 0, 0)
        if task.cancelled():
            seq.rear = None
        elif (err := task.exception()) is not None:
            seq.rear = None
            _log.error("loading KV for %s failed with an internal error", seq.id, exc_info=err)
        else:
            result = task.result()
        self._handoffs.count_failure(seq, result.computed)
        if result.tokens > 0:
            seconds = asyncio.get_running_loop().time() - begin
            seq.pull = PullResult(result.tokens, result.bytes, seconds)
            # A pull that failed has counted the queries.
            queries = 0 if is_instead_of_pull else seq.uncached_tokens
            self._observer.record_external_lookup(queries, result.tokens)
        self._on_end(seq, result.computed)
        if (kv := self._arriving.pop(seq.id, None)) is not None:
            kv.end()
