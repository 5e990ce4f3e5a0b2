"""Hand-offs through storage: the prefill engine names what it stored, the decode engine checks it.

prefill   last delta ──deliver──► writes ended, seen in the store ──► client
decode    LoadLeg ──accept──► loaded within its time limit ──count_failure
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from tandem_contract.kv_reference import (
    SHORT,
    LoadLeg,
    StoreAnswer,
    StoreLeg,
)
from tandem_kvstore.chunk_store import Chunk
from tandem_kvstore.client import StoreClient
from tandem_kvstore.errors import Reason
from tandem_kvstore.references import refusal

from ..observer import EngineObserver
from ..step import Sequence as EngineSequence
from ..types import Delta

_log = logging.getLogger(__name__)

NOT_CONFIGURED: Final = "not_configured"
"""In a StoreAnswer: this engine has no external storage."""

Put = Callable[[Delta], None]


def is_store_answer(seq: EngineSequence, delta: Delta) -> bool:
    """Whether `delta` is the last one of a prefill leg that asks to store its KV."""
    return isinstance(seq.request.kv, StoreLeg) and delta.finish_reason in ("stop", "length")


def with_answer(delta: Delta, answer: StoreAnswer) -> Delta:
    """The delta with the answer as its `kv_transfer_params`."""
    return replace(delta, kv_transfer_params=msgspec.to_builtins(answer))


class StorageHandoffs:
    """One engine's part in hand-offs through storage. For the engine's event loop."""

    def __init__(
        self,
        client: StoreClient | None,
        observer: EngineObserver,
        unwritten: Mapping[str, "asyncio.Future[None]"],
        on_lost: Callable[[Sequence[Chunk], Reason | None], None],
    ) -> None:
        """`unwritten`: key of a chunk → done when its write has ended. `on_lost` gets chunks that
        the store does not have."""
        self._client, self._observer = client, observer
        self._unwritten, self._on_lost = unwritten, on_lost
        self._tasks: set[asyncio.Task[None]] = set()

    def deliver(self, chunks: Sequence[Chunk], leg: StoreLeg, delta: Delta, put: Put) -> None:
        """Put `delta`, a prefill leg's last, with the answer for the prompt's `chunks`."""
        if self._client is None or not chunks:
            reason = SHORT if self._client is not None else NOT_CONFIGURED
            put(with_answer(delta, StoreAnswer(tandem_kv_not_stored=reason)))
            return
        work: Coroutine[Any, Any, StoreAnswer] = self._answer(self._client, chunks, leg.timeout)
        task = asyncio.create_task(self._deliver(work, delta, put))
        self._tasks.add(task)
        task.add_done_callback(partial(self._finish, put))

    def accept(self, seq: EngineSequence, leg: LoadLeg, chunks: Sequence[Chunk]) -> bool:
        """Set the time limit of a decode leg's load and return True, if the KV that it names is its
        prompt's, in this engine's namespace. Otherwise count a failed transfer."""
        if self._client is None:
            reason: str | None = "this engine has no external storage"
        else:
            reason = refusal(leg.tandem_kv_reference, chunks, self._client.reference)
        if reason is not None:
            self._observer.record_pull_failure()
            _log.warning("%s: stored KV not loaded, recomputing: %s", seq.id, reason)
            return False
        seq.load_limit = leg.tandem_kv_load_timeout
        return True

    def count_failure(self, seq: EngineSequence, computed: int) -> None:
        """Count a failed transfer if a load brought less than its decode leg names."""
        leg = seq.request.kv
        if seq.load_limit is None or seq.aborted or not isinstance(leg, LoadLeg):
            return
        # The last token of a prompt is computed in any case.
        named = min(leg.tandem_kv_reference.token_count, seq.prompt_tokens - 1)
        if computed < named:
            self._observer.record_pull_failure()
            text = "%s: %d of %d stored tokens loaded, recomputing the others"
            _log.warning(text, seq.id, computed, named)

    async def close(self) -> None:
        """Abort the requests that still wait."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _finish(self, put: Put, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled():
            put(Delta(finish_reason="abort"))

    async def _deliver(
        self, work: Coroutine[Any, Any, StoreAnswer], delta: Delta, put: Put
    ) -> None:
        try:
            answer = await work
        except Exception:  # noqa: BLE001 - a defect here must not leave the request waiting
            _log.exception("naming stored KV failed with an internal error")
            answer = StoreAnswer(tandem_kv_not_stored=Reason.OTHER)
        put(with_answer(delta, answer))

    async def _answer(
        self, client: StoreClient, chunks: Sequence[Chunk], timeout: float
    ) -> StoreAnswer:
        try:
            async with asyncio.timeout(timeout):
                writes = [self._unwritten[c.key] for c in chunks if c.key in self._unwritten]
                if writes:
                    # Not awaited one by one: a time limit must not cancel them for others.
                    await asyncio.wait(writes)
                # Also chunks that were written long ago: the store may have deleted them since.
                count, reason = await client.find(chunks)
        except TimeoutError:
            return StoreAnswer(tandem_kv_not_stored=Reason.TIMEOUT)
        self._on_lost(chunks[count:], reason)
        if not count:
            return StoreAnswer(tandem_kv_not_stored=reason or Reason.MISSING)
        return StoreAnswer(tandem_kv_reference=client.reference(chunks[count - 1]))
