"""State of one request at the producer: how much of its KV is final, and until when it is held.

    opened ── publish … ── complete ──► leased ──► read │ released │ expired │ aborted
       └─── discard ──► forgotten; the engine frees the blocks itself

A reader may be connected while the request is opened or leased. The reader of a stream may come
before the request: its hold has no request id until the request is opened. Bookkeeping only: no
sockets are read or written here, and no timers run.
"""

import asyncio
import socket
import time
from dataclasses import dataclass, field
from enum import StrEnum

from ..types import KvRefused
from .wire import Read


class FreeReason(StrEnum):
    """Why a KvHold ended."""

    READ = "read"
    """A reader has every block, verified."""
    RELEASED = "released"
    """The decode engine, or the server here, said that the KV will not be read."""
    EXPIRED = "expired"
    """The lease ran out before a reader had every block."""
    ABORTED = "aborted"
    """The producer was closed, or the request was discarded."""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How much of a prompt's KV is final, that is, computed and in the cache."""

    block_ids: tuple[int, ...] = ()
    """The prompt's blocks in order, as far as they were published."""
    final_tokens: int = 0
    """Leading prompt tokens that are final in all layers."""
    tokens: int = 0
    """Leading prompt tokens that are final in the first `layers` layers."""
    layers: int = 0
    is_complete: bool = False
    """Whether `tokens` is the whole prompt, final in all layers."""

    def advance(
        self, block_ids: tuple[int, ...], tokens: int, layers: int, of_layers: int
    ) -> "PrefillProgress":
        """The progress once `tokens` tokens are final in `layers` of `of_layers` layers."""
        # A chunk's tokens count in all layers only once its last layer is computed.
        final_tokens = tokens if layers == of_layers else self.final_tokens
        return PrefillProgress(block_ids, final_tokens, tokens, layers)

    def complete(self, tokens: int) -> "PrefillProgress":
        """The progress once the whole prompt of `tokens` tokens is final."""
        return PrefillProgress(self.block_ids, tokens, tokens, 0, is_complete=True)

    def ready_blocks(self, layer: int, wanted_tokens: int, block_size: int) -> int:
        """Number of leading blocks that a reader of `wanted_tokens` tokens may read in `layer`.

        A partly filled block may be read only when the reader wants no more of it than is final.
        """
        # Earlier chunks are final in every layer, the running chunk only in its first `layers`.
        final = max(self.final_tokens, self.tokens if layer < self.layers else 0)
        if final >= wanted_tokens:
            return -(-wanted_tokens // block_size)
        # Rounded down: the rest of a partly filled block is still being written.
        return final // block_size


@dataclass(slots=True, eq=False)
class KvHold:
    """One opened request. Only `progress` and `deadline` may be used off the event loop."""

    request_id: str | None
    """None: the reader of a stream waits for a request that was not opened yet."""
    lease: float
    """Seconds that the blocks are held after the prefill, or after the last renewal."""
    stream_id: str | None = None
    """Id under which the KV can be read while it is computed; None: afterwards only."""
    prompt_hash: str | None = None
    """`prefix.prompt_hash` of the prompt; None before the request is opened."""
    progress: PrefillProgress = field(default_factory=PrefillProgress)
    """Replaced as a whole and never changed in place, so that any thread may read it."""
    deadline: float = 0.0
    """time.monotonic() at which the lease ends; only meaningful once the prompt is complete."""
    timer: asyncio.TimerHandle | None = None
    end_reason: FreeReason | None = None
    """Set once, when the hold starts to end: reads are refused then and no digest is sent."""
    reader: socket.socket | None = None
    """The connected reader, at most one. The blocks are not freed while it is set."""
    is_sending: bool = False
    """Whether a worker thread is writing to the reader's socket."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `progress` or `end_reason` changes; wakes the reader's session."""

    def renew(self) -> None:
        """Start the lease again. May be called from any thread."""
        self.deadline = time.monotonic() + self.lease

    def check(self, read: Read) -> None:
        """Raise KvRefused when this read can never be served."""
        if self.end_reason is not None:
            raise KvRefused(
                f"request {self.request_id or self.stream_id!r} is gone: {self.end_reason}"
            )
        if self.prompt_hash not in (None, read.prompt_hash):
            raise KvRefused("prompt_hash differs: the KV is of a prompt with other tokens")
        # Read once: the event loop or the worker thread may replace it meanwhile.
        progress = self.progress
        # Checked only when complete: a running prefill may still reach the number of tokens.
        if progress.is_complete and read.tokens > progress.tokens:
            raise KvRefused(
                f"tokens: the reader expects {read.tokens}, the producer has {progress.tokens}"
            )
