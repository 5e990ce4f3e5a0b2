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
class Progress:
    """How much of a prompt's KV is final."""

    block_ids: tuple[int, ...] = ()
    everywhere: int = 0
    """Prompt tokens final in all layers."""
    tokens: int = 0
    layers: int = 0
    """The first `tokens` prompt tokens are final in the first `layers` layers."""
    complete: bool = False
    """`tokens` is the whole prompt."""

    def advanced(
        self, block_ids: tuple[int, ...], tokens: int, layers: int, of_layers: int
    ) -> "Progress":
        """With `tokens` final in `layers` of `of_layers` layers."""
        everywhere = tokens if layers == of_layers else self.everywhere
        return Progress(block_ids, everywhere, tokens, layers)

    def completed(self, tokens: int) -> "Progress":
        """With the whole prompt of `tokens` final."""
        return Progress(self.block_ids, tokens, tokens, 0, complete=True)

    def ready_blocks(self, layer: int, wanted_tokens: int, block_size: int) -> int:
        """How many of the first blocks may be read in `layer` by one who wants `wanted_tokens`.

        A block that is still being filled may be read only when the reader wants no more of it
        than is final.
        """
        final = max(self.everywhere, self.tokens if layer < self.layers else 0)
        if final >= wanted_tokens:
            return -(-wanted_tokens // block_size)
        return final // block_size


@dataclass(slots=True, eq=False)
class Hold:
    """One opened request. All but `progress` and `deadline` belongs to the event loop."""

    request_id: str
    lease: float
    progress: Progress = field(default_factory=Progress)
    """Replaced as a whole, so any thread may read it."""
    deadline: float = 0.0
    """time.monotonic() at which the lease ends, once complete."""
    timer: asyncio.TimerHandle | None = None
    ending: FreeReason | None = None
    """Set once: the blocks are on their way out, nobody may attach, and nothing read counts."""
    reader: socket.socket | None = None
    sending: bool = False
    """A worker thread is writing to the reader's socket."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """There is progress, or an ending."""

    def renew(self) -> None:
        """Start the lease again; callable from any thread."""
        self.deadline = time.monotonic() + self.lease

    def check(self, read: Read) -> None:
        """Raise KvRefused when the read can never be served."""
        if self.ending is not None:
            raise KvRefused(f"request {self.request_id!r} is gone: {self.ending}")
        progress = self.progress
        if progress.complete and read.tokens > progress.tokens:
            raise KvRefused(
                f"tokens: the reader expects {read.tokens}, the producer has {progress.tokens}"
            )
