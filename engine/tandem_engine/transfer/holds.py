"""What the producer knows of one request's blocks: how far they are final, and until when held.

    opened ── progress … ── complete ──► leased ──► read │ released │ expired │ aborted
       └─── discard ──► gone, and never freed through here

A reader may be attached in `opened` and `leased`. Bookkeeping only: no sockets, no timers.
"""

import asyncio
import socket
import time
from dataclasses import dataclass, field
from enum import StrEnum

from ..types import KvRefused
from .wire import Read


class FreeReason(StrEnum):
    """Why the producer needs a request's blocks no longer."""

    READ = "read"
    """A reader has them all, verified."""
    RELEASED = "released"
    """The decode side said that nobody will read them."""
    EXPIRED = "expired"
    """The lease ran out."""
    ABORTED = "aborted"
    """The producer closed."""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How much of a prompt's KV is final."""

    block_ids: tuple[int, ...] = ()
    final_tokens: int = 0
    """Prompt tokens final in all layers."""
    tokens: int = 0
    layers: int = 0
    """The first `tokens` prompt tokens are final in the first `layers` layers."""
    is_complete: bool = False
    """`tokens` is the whole prompt."""

    def advance(
        self, block_ids: tuple[int, ...], tokens: int, layers: int, of_layers: int
    ) -> "PrefillProgress":
        """With `tokens` final in `layers` of `of_layers` layers."""
        final_tokens = tokens if layers == of_layers else self.final_tokens
        return PrefillProgress(block_ids, final_tokens, tokens, layers)

    def complete(self, tokens: int) -> "PrefillProgress":
        """With the whole prompt of `tokens` final."""
        return PrefillProgress(self.block_ids, tokens, tokens, 0, is_complete=True)

    def ready_blocks(self, layer: int, wanted_tokens: int, block_size: int) -> int:
        """How many of the first blocks may be read in `layer` by one who wants `wanted_tokens`.

        A block that is still being filled may be read only when the reader wants no more of it
        than is final.
        """
        final = max(self.final_tokens, self.tokens if layer < self.layers else 0)
        if final >= wanted_tokens:
            return -(-wanted_tokens // block_size)
        return final // block_size


@dataclass(slots=True, eq=False)
class KvHold:
    """One opened request. All but `progress` and `deadline` belongs to the event loop."""

    request_id: str
    lease: float
    progress: PrefillProgress = field(default_factory=PrefillProgress)
    """Replaced as a whole, so any thread may read it."""
    deadline: float = 0.0
    """time.monotonic() at which the lease ends, once complete."""
    timer: asyncio.TimerHandle | None = None
    end_reason: FreeReason | None = None
    """Set once: the blocks are on their way out, nobody may attach, and nothing read counts."""
    reader: socket.socket | None = None
    is_sending: bool = False
    """A worker thread is writing to the reader's socket."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """There is progress, or an end_reason."""

    def renew(self) -> None:
        """Start the lease again; callable from any thread."""
        self.deadline = time.monotonic() + self.lease

    def check(self, read: Read) -> None:
        """Raise KvRefused when the read can never be served."""
        if self.end_reason is not None:
            raise KvRefused(f"request {self.request_id!r} is gone: {self.end_reason}")
        progress = self.progress
        if progress.is_complete and read.tokens > progress.tokens:
            raise KvRefused(
                f"tokens: the reader expects {read.tokens}, the producer has {progress.tokens}"
            )
