"""The rear of a stored prefix, loaded while the engine computes the front.

    chunks    0 1 2 3 4 5 6 7 8 9
              ──computed──►│◄──loaded──     they meet; the rest of the prompt follows chunk 9

The KV of a chunk depends on the tokens before it, not on their KV, so that the last chunk can be
loaded first. Where both are to meet is predicted (`LoadGuard.split`). While the load is faster than
that, it claims chunks below, up to the end of the running step. A sequence whose front is computed
waits for a load that is a little late; then it computes what is missing, and goes on after the
chunks that came. Only verified chunks of which all layers are in the blocks count.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_kvstore.chain import Chunk
from tandem_kvstore.client import StoreClient
from tandem_kvstore.errors import Reason
from tandem_kvstore.guard.load_guard import Decision

from ..step import Rear

OnLost = Callable[[Sequence[Chunk], Reason | None], None]
"""Gets chunks that the store does not have, or that cannot be used."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The chunks of a prompt that may be stored."""

    chunks: Sequence[Chunk]
    first: int
    """Index, in the prompt, of the first of them."""
    chunk_tokens: int
    last_token: int
    """Tokens before the prompt's last one, which is always computed."""

    def tokens(self, chunks: int) -> int:
        """Tokens of the prompt up to the end of the first `chunks` of these chunks."""
        return min((self.first + chunks) * self.chunk_tokens, self.last_token)


class RearLoad:
    """One such load: a tandem_kvstore.chain.RearWatch. For the event loop."""

    def __init__(
        self,
        client: StoreClient,
        prefix: Prefix,
        decision: Decision,
        computed: int,
        *,
        on_found: Callable[[int], None],
        on_lost: OnLost,
    ) -> None:
        """`computed`: tokens with KV now; `on_found` gets the number of chunks that are stored."""
        self._client, self._prefix, self._decision = client, prefix, decision
        self._on_found, self.on_lost = on_found, on_lost
        self._begin = asyncio.get_running_loop().time()
        self._found = len(prefix.chunks)
        self.waited = 0.0
        """Seconds for which computing has waited for the load."""
        # time.perf_counter() when the front was computed; None: computing goes on.
        self._awaited_at: float | None = None
        self.deadline = asyncio.timeout(None)
        """Of the load; set when computing waits for it."""
        self.rear = Rear(prefix.tokens(decision.front), prefix.tokens(self._found), computed)

    def on_chain(self, chunks: int) -> None:
        """See RearWatch."""
        if chunks < self._found:
            self._found, self.rear.end = chunks, self._prefix.tokens(chunks)
            # Fewer chunks than predicted are stored: those left are divided again.
            first = self._computed_chunks()
            left = max(0, chunks - first)
            context = (self._prefix.first + first) * self._prefix.chunk_tokens
            front, _ = self._client.guard.split(self._client.hit(left, context))
            self.rear.start = self._prefix.tokens(first + front)
            if self.rear.start > self.rear.front and not self.deadline.expired():
                # Computing goes on: its next wait has a deadline of its own.
                self._end_wait()
                self.deadline.reschedule(None)
        self._on_found(chunks)

    def claim(self, index: int, pending: int) -> bool:
        """See RearWatch."""
        start = self._prefix.tokens(index)
        if start >= self.rear.start:
            return True
        hit = self._client.hit(pending + 1, 0)
        size = hit.chunks * hit.chunk_bytes
        tokens = start + self._prefix.chunk_tokens - self.rear.front
        is_sooner = self._client.guard.is_load_sooner(tokens, self.rear.front, size)
        # What is computed, or being computed, is not written by two threads.
        if start < self.rear.front or not is_sooner:
            return False
        self.rear.start = start
        return True

    def set_awaited(self) -> None:
        """The front is computed: the load has a deadline from now on."""
        if self._awaited_at is None:
            self._awaited_at = time.perf_counter()
            now = asyncio.get_running_loop().time()
            latest = self._begin + self._decision.deadline
            self.deadline.reschedule(min(latest, now + self._decision.max_wait))

    def end(self, loaded: int) -> int:
        """The load has ended with the last `loaded` chunks. Returns the tokens that it brought."""
        self._end_wait()
        self.rear.is_loading = False
        self.rear.start = self._prefix.tokens(self._found - loaded)
        return self.rear.end - self.rear.start

    def _end_wait(self) -> None:
        if self._awaited_at is not None:
            self.waited += time.perf_counter() - self._awaited_at
            self._awaited_at = None

    def _computed_chunks(self) -> int:
        """Chunks of the prefix that are computed, or being computed, at least in part."""
        tokens = self.rear.front - self._prefix.first * self._prefix.chunk_tokens
        return max(0, -(-tokens // self._prefix.chunk_tokens))
