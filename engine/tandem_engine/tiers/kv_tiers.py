"""Moves chunks between the GPU's blocks, host memory and storage, for the engine's event loop.

admitted sequence ──may_load──► `loads` ──► on_end(tokens)
running step, computed chunk ──► `saves` ──► host tier, storage
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from tandem_contract.kv_reference import StoreLeg
from tandem_kvstore.client import StoreClient

from ..blocks import BlockManager
from ..observer import EngineObserver
from ..scheduler import Step
from ..step import Chunk as StepChunk
from ..step import Sequence as EngineSequence
from ..types import Delta
from .arriving import ArrivingKv
from .device_chunks import DeviceChunks
from .handoff import Put, StorageHandoffs, is_store_answer
from .host_tier import HostTier
from .loads import OnLoadEnd, TierLoads
from .saves import TierSaves
from .stored_chunks import StoredChunks


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
        self._device, self._client = device, client
        host = HostTier(host_bytes)
        self._stored = StoredChunks(observer.record_kv_event)
        self._saves = TierSaves(
            *(device, blocks, observer),
            host=host,
            client=client,
            stored=self._stored,
            pending_bytes=pending_bytes,
            wake=wake,
        )
        self._handoffs = StorageHandoffs(
            client, observer, self._saves.unwritten, self._stored.remove_lost
        )
        self._loads = TierLoads(
            *(device, blocks, observer),
            host=host,
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

    def load(self, seq: EngineSequence) -> bool:
        """Start a load for a sequence whose pull has failed, unless there is nothing to try."""
        if not self._loads.may_load(seq):
            return False
        self._loads.load(seq, is_instead_of_pull=True)
        return True

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
        self._saves.save(seq)

    def saving(
        self, chunks: Sequence[StepChunk]
    ) -> AbstractContextManager[Callable[[int], None] | None]:
        """Save what a step computes while it runs; see `TierSaves.saving`."""
        return self._saves.saving(chunks)

    def remove_stored(self, keys: Sequence[str]) -> None:
        """The collector of this engine deleted chunks."""
        self._stored.remove(keys)

    async def close(self) -> None:
        """Break loads off, write what is queued for at most ten seconds, end threads."""
        await self._loads.close()
        await self._handoffs.close()
        await self._saves.close()
        if self._client is not None:
            await self._client.close()
        self._device.close()
