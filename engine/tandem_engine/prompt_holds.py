"""The prefill leg's side of hand-offs: which KV readers may have, and the KvHold afterwards.

submitted ──open──► computed, published chunk by chunk ──hold──► held until read, released, expired
              └──── aborted or preempted ──discard──► readers are refused
"""

import logging
from collections.abc import Callable

from tandem_contract.prefix import prompt_hash
from tandem_contract.transfer_params import TransferParams

from .blocks import BlockManager
from .cache import KvCache
from .config import KvTransferConfig
from .observer import EngineObserver
from .step import Chunk, Sequence
from .transfer.producer import FreeReason, Producer
from .transfer.trust import Trust
from .types import ConfigError, RemoteDecode, RequestRejected

_log = logging.getLogger(__name__)


class PromptHolds:
    """The prompts that this engine computes for decode engines. For the engine's event loop."""

    def __init__(
        self,
        config: KvTransferConfig,
        cache: KvCache,
        blocks: BlockManager,
        observer: EngineObserver,
        on_release: Callable[[], None],
    ) -> None:
        """`on_release` is called when a KvHold has ended and its blocks are free."""
        self._config = config
        self._blocks = blocks
        self._observer = observer
        self._on_release = on_release
        self._trust = Trust(config.keys)
        self._layers = cache.layout.layers
        self._producer = Producer(
            cache.layers,
            cache.layout,
            config.engine_id,
            config.side_channel_host,
            config.side_channel_port,
            config.lease,
            self._on_hold_end,
            written=cache.written,
            trust=self._trust,
        )

    @property
    def address(self) -> tuple[str, int]:
        """Address that readers connect to."""
        return self._producer.address

    async def start(self) -> None:
        """Listen for readers. Raises ConfigError when the address cannot be bound."""
        try:
            await self._producer.start()
        except OSError as err:
            where = f"{self._config.side_channel_host}:{self._config.side_channel_port}"
            raise ConfigError(f"side channel {where}: cannot listen: {err.strerror}") from err

    async def close(self) -> None:
        """Disconnect every reader and end every KvHold."""
        await self._producer.close()

    def open(self, seq: Sequence) -> None:
        """Let a reader connect from now on; it waits for the prefill.

        Raises RequestRejected when another prompt has the same stream.
        """
        stream_id = _stream_id(seq)
        if stream_id is not None and self._producer.has_stream(stream_id):
            raise RequestRejected("kv_transfer_params name the stream of another request")
        self._producer.open(seq.id, prompt_hash(seq.request.prompt_token_ids), stream_id)

    def discard(self, seq: Sequence) -> None:
        """Refuse readers of a prompt that will not be completed; its blocks may be reused."""
        self._producer.discard(seq.id)

    def reopen(self, seq: Sequence) -> None:
        """Restart a preempted prompt: it gets other blocks, so its present reader is refused."""
        # The old blocks may be overwritten from now on: the new hold knows none of them.
        self._producer.discard(seq.id)
        self._producer.open(seq.id, prompt_hash(seq.request.prompt_token_ids), _stream_id(seq))

    def layer_publisher(self, chunks: list[Chunk]) -> Callable[[int], None] | None:
        """A function that publishes each layer once it is written; None without readers.

        The worker thread calls it with the number of layers whose KV is in the cache, so that a
        reader gets the first layers while the others are computed.
        """
        producer = self._producer
        # A copy of plain values: the worker thread must not read sequences.
        read_chunks = [
            (chunk.sequence.id, chunk.blocks, chunk.end)
            for chunk in chunks
            if chunk.sequence.is_remote_decode and producer.is_read_early(chunk.sequence.id)
        ]
        # Saves a call for each layer when all KV is published after the step anyway.
        if not read_chunks:
            return None

        def publish(layers: int) -> None:
            for request_id, blocks, tokens in read_chunks:
                producer.publish(request_id, blocks, tokens, layers)

        return publish

    def publish(self, chunk: Chunk) -> None:
        """Let readers have a chunk whose KV is in the cache, in all layers."""
        self._producer.publish(chunk.sequence.id, chunk.blocks, chunk.end, self._layers)

    def hold(self, seq: Sequence) -> None:
        """Start the lease of a complete prompt, whose blocks are held."""
        self._producer.complete(seq.id, seq.prompt_tokens)

    def release(self, request_id: str) -> None:
        """End the KvHold of a completed prompt that will not be read; others are left alone."""
        self._producer.release(request_id)

    def transfer_params(self, seq: Sequence) -> dict[str, object]:
        """The `kv_transfer_params` object with which a decode engine reads this prompt's KV."""
        host, port = self._producer.address
        return TransferParams(
            remote_engine_id=self._config.engine_id,
            remote_request_id=seq.id,
            remote_host=host,
            remote_port=port,
            # One KV cache group. This engine as reader only counts the ids.
            remote_block_ids=(self._blocks.table(seq.id),),
            remote_num_tokens=seq.prompt_tokens,
            remote_prefill_cached_tokens=seq.cached_tokens,
            tandem_prompt_hash=prompt_hash(seq.request.prompt_token_ids),
            tandem_producer_proof=self._trust.producer_proof(self._config.engine_id, host, port),
            tandem_serves_streams=True,
        ).encode()

    def _on_hold_end(self, request_id: str, reason: FreeReason) -> None:
        # Before `_on_release`, which wakes the loop to use the free blocks.
        self._blocks.release_hold(request_id)
        if reason is FreeReason.EXPIRED:
            # The decode engine recomputes the prompt or fails the request: log and count it.
            _log.warning("%s: the lease ended before a decode engine read the KV", request_id)
            self._observer.record_kv_expiry()
        self._on_release()


def _stream_id(seq: Sequence) -> str | None:
    """The stream under which a decode engine reads this prompt's KV while it is computed."""
    kv = seq.request.kv
    return kv.stream_id if isinstance(kv, RemoteDecode) else None
