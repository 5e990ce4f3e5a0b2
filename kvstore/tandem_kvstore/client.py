"""An engine's access to a store: `chunk_store` behind `guard`, with a deadline for each load.

    result = await client.load(chunks, groups, deliver, context=0)    the leading chunks
    result = await client.load_rear(…)                                the last chunks
    count, reason = await client.find(chunks)                         how many are stored
    decision = await client.look_up(chunks, context=0)                what another process may load
    is_stored = await client.store(chunk, groups)                     write one chunk

None of these raises a StoreError: the engine computes what it does not get. A load that ends at its
deadline keeps the chunks that were delivered as a whole.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tandem_contract.kv_reference import KvReference

from .chain import LayerWatch, RearWatch
from .chunk_store import Chunk, ChunkStore, Deliver, Groups, Outcome, Progress
from .chunk_writer import GroupSource, LayerGroups
from .errors import Reason, StoreDenied, StoreError, StoreUnavailable, message_of
from .format.collection import LOAD_SECONDS, WRITE_SECONDS
from .guard.load_guard import Decision, Hit, LoadGuard
from .guard.missing_keys import MissingKeys
from .health import NO_ANSWER, StoreHealth
from .maintenance import Maintenance
from .observer import Observer
from .stores import ObjectStore

__all__ = ["Groups", "LoadResult", "Observer", "StoreClient"]

_log = logging.getLogger(__name__)

STALL_SECONDS: Final = 0.25
"""A load or look-up that brings nothing for so long is a failure of the store. Shorter: short
prompts, whose deadlines are short, open the circuit breaker of a store with a long delay."""
_FAILURES: Final = (Reason.UNAVAILABLE, Reason.TIMEOUT, Reason.DENIED)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended."""

    chunks: int
    """Chunks that were delivered as a whole: the leading ones, for `load_rear` the last ones."""
    reason: Reason | None
    """Why not all of them were delivered; None: all were."""
    bytes: int = 0
    seconds: float = 0.0


class StoreClient:
    """One engine's client of one store. For one event loop."""

    def __init__(
        self,
        store: ChunkStore,
        objects: ObjectStore,
        observer: Observer,
        *,
        chunk_tokens: int,
        chunk_bytes: int,
        guard: LoadGuard | None = None,
        maintenance: Maintenance | None = None,
    ) -> None:
        self._store, self._observer = store, observer
        self._chunk_tokens, self._chunk_bytes = chunk_tokens, chunk_bytes
        self.guard = guard or LoadGuard()
        self._missing = MissingKeys()
        self._maintenance = maintenance
        self._health = StoreHealth(self.guard.breaker, objects, observer)

    def may_have(self, chunk: Chunk) -> bool:
        """Whether the store may have `chunk`, without asking it."""
        return self.guard.breaker.allows and not self._missing.has(chunk.key, _now())

    def reference(self, chunk: Chunk) -> KvReference:
        """The reference of a prompt's prefix that ends with `chunk`."""
        return self._store.reference(chunk)

    async def find(self, chunks: Sequence[Chunk]) -> tuple[int, Reason | None]:
        """How many leading chunks the store has, and why not more."""
        if not self.guard.breaker.allows:
            return 0, Reason.BREAKER_OPEN
        if not chunks:  # No request is sent, so the breaker learns nothing.
            return 0, None
        outcome = await self._find(chunks)
        return outcome.chunks, outcome.reason

    async def look_up(self, chunks: Sequence[Chunk], context: int, cached: int = 0) -> Decision:
        """How many leading chunks another process is to load, in how many seconds; see `Hit`."""
        start = _now()
        decision = self.decide(self.hit(len(chunks), context, cached=cached))
        if decision.chunks == 0 or not self.may_have(chunks[0]):
            self._result(chunks, 0, decision.reason or Reason.MISSING)
            return Decision(0, 0.0, decision.reason or Reason.MISSING)
        try:
            async with asyncio.timeout(decision.deadline):
                outcome = await self._find(chunks[: decision.chunks])
        except TimeoutError:
            outcome = Outcome(0, Reason.TIMEOUT)
            self.guard.observe_slow_load(0, _now() - start, _now())
            if decision.deadline >= STALL_SECONDS:
                self._health.record_failure(NO_ANSWER)
        if outcome.chunks < len(chunks) and outcome.reason is not None:
            self._observer.record_not_loaded(len(chunks) - outcome.chunks, outcome.reason)
        return Decision(outcome.chunks, decision.deadline - (_now() - start), outcome.reason)

    def observe_load(self, keys: Sequence[str], result: LoadResult) -> None:
        """Learn from the load of another process, which was to load the chunks `keys`."""
        if result.chunks and result.reason is not Reason.TIMEOUT:
            self.guard.observe_load(result.bytes, result.seconds, _now())
        if result.reason is Reason.TIMEOUT:
            self.guard.observe_slow_load(result.bytes, result.seconds, _now())
        if result.reason in _FAILURES and not result.bytes:
            self._health.record_failure(f"a worker's load failed: {result.reason}")
        if self._maintenance is not None:
            self._maintenance.touches.add(keys[: result.chunks])

    def note_stored(self, key: str) -> None:
        """Another process of this engine has stored the chunk `key`: forget an earlier miss."""
        self._missing.discard(key)

    def hit(
        self,
        chunks: int,
        context: int,
        *,
        cached: int = 0,
        groups: int = 1,
        tail: int = 0,
        can_do_both: bool = False,
    ) -> Hit:
        """A `Hit` with this store's sizes of a chunk."""
        size = self._chunk_bytes
        return Hit(chunks, self._chunk_tokens, size, context, cached, groups, tail, can_do_both)

    def decide(self, hit: Hit) -> Decision:
        """Whether a request loads or computes the chunks of `hit`."""
        return self.guard.decide(hit, _now())

    def decide_hand_off(self, hit: Hit, limit: float) -> Decision:
        """The same for KV that another engine has just stored; `limit`: see `load`."""
        return self.guard.decide_hand_off(hit, limit)

    async def load(
        self,
        chunks: Sequence[Chunk],
        groups: Groups,
        deliver: Deliver,
        context: int,
        *,
        limit: float | None = None,
        decision: Decision | None = None,
        watch: LayerWatch | None = None,
    ) -> LoadResult:
        """Load the longest stored prefix of `chunks`, after `context` cached tokens.

        `limit`: seconds, for KV that another engine has just stored for this request. It is loaded
        whatever the cost model predicts, even if a chunk was missing a moment ago.

        `decision`: the result of `decide`, or of `decide_hand_off`; None: `load` decides.

        `watch`: load layer group by layer group, and report the progress to it. The first groups
        come sooner; if the deadline ends the load, fewer chunks have come as a whole.
        """
        if decision is None:
            hit = self.hit(len(chunks), context)
            decision = self.decide(hit) if limit is None else self.decide_hand_off(hit, limit)
        if decision.chunks == 0 or (limit is None and not self.may_have(chunks[0])):
            return self._result(chunks, 0, decision.reason or Reason.MISSING)
        start, progress = _now(), Progress()
        work = self._load(chunks[: decision.chunks], groups, deliver, progress, watch)
        reason = await self._run_load(work, progress, start, asyncio.timeout(decision.deadline))
        return self._result(chunks, progress.chunks, reason, progress.bytes, _now() - start)

    async def load_rear(
        self,
        chunks: Sequence[Chunk],
        groups: Groups,
        deliver: Deliver,
        watch: RearWatch,
        deadline: asyncio.Timeout,
    ) -> LoadResult:
        """Load stored chunks from the last one towards the first, until `watch` claims no more.

        The result's `chunks` are the last ones of the stored prefix that `watch.on_chain` was told.
        The caller may move `deadline` while the load runs.
        """
        start, progress = _now(), Progress()
        work = self._load_rear(chunks, groups, deliver, watch, progress)
        reason = await self._run_load(work, progress, start, deadline)
        seconds = _now() - start
        if progress.chunks:
            self._observer.record_load(progress.chunks, progress.bytes, seconds)
        if reason in (Reason.TIMEOUT, Reason.OTHER):
            self._observer.record_not_loaded(1, reason)
        return LoadResult(progress.chunks, reason, progress.bytes, seconds)

    async def store(self, chunk: Chunk, groups: LayerGroups) -> bool:
        """Write one chunk; its `groups` may come one after another. If they take longer than
        WRITE_SECONDS, it is written again as a whole. Returns whether it is stored."""
        if not self.guard.breaker.allows:
            self._observer.record_not_stored(Reason.BREAKER_OPEN)
            return False
        start, source = _now(), GroupSource(groups)
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                # `has` before the data are sent: after a restart, most chunks are there already.
                is_new = not await self._store.has(chunk) and await self._store.put(chunk, source)
        except TimeoutError:
            # Groups that come late say nothing of the store. When all have come, a second write
            # has the whole time.
            if isinstance(groups, AsyncIterator) and source.is_late(start + WRITE_SECONDS / 2):
                return await self.store(chunk, await source.all())
            self._health.record_failure(NO_ANSWER)
            self._observer.record_not_stored(Reason.TIMEOUT)
            return False
        except StoreError as err:
            _log.warning("KV not stored: %s", err)
            # Not for a full store, which can still be read.
            if isinstance(err, StoreUnavailable | StoreDenied):
                self._health.record_failure(message_of(err))
            self._observer.record_not_stored(err.reason)
            return False
        except Exception:  # noqa: BLE001 - a defect here must not end the engine's writer
            _log.exception("storing KV failed with an internal error")
            self._observer.record_not_stored(Reason.OTHER)
            return False
        self._health.record_success()
        self._missing.discard(chunk.key)
        self._observer.record_stored(self._chunk_bytes, _now() - start, is_new=is_new)
        return True

    async def close(self) -> None:
        """End the probes, write the last touch record, and close the connections."""
        await self._health.close()
        if self._maintenance is not None:
            await self._maintenance.close()
        await self._store.close()

    async def _run_load(
        self,
        work: Coroutine[Any, Any, Reason | None],
        progress: Progress,
        start: float,
        deadline: asyncio.Timeout,
    ) -> Reason | None:
        """Run a load and learn from it. Returns why it ended early."""
        try:
            # Later, the collector may delete data whose manifest the load has read.
            async with deadline, asyncio.timeout(LOAD_SECONDS):
                reason = await work
        except TimeoutError:
            self.guard.observe_slow_load(progress.bytes, _now() - start, _now())
            # After some bytes, or a short time, the store counts as slow: see the cost model.
            if not progress.bytes and _now() - start >= STALL_SECONDS:
                self._health.record_failure(NO_ANSWER)
            return Reason.TIMEOUT
        except Exception:  # noqa: BLE001 - a defect here must cost a recompute, never a request
            _log.exception("loading KV from storage failed with an internal error")
            return Reason.OTHER
        if progress.chunks:
            self.guard.observe_load(progress.bytes, _now() - start, _now())
        return reason

    async def _load(
        self,
        chunks: Sequence[Chunk],
        groups: Groups,
        deliver: Deliver,
        progress: Progress,
        watch: LayerWatch | None,
    ) -> Reason | None:
        if watch is None:
            outcome = await self._store.fetch(chunks, groups, deliver, progress)
        else:
            manifests, outcome = await self._store.find(chunks)
            if manifests:
                watch.on_chain(len(manifests))
                load = self._store.load_layers(manifests, groups, deliver, watch, progress)
                if (data := await load).reason is not None:
                    outcome = data
        self._judge(chunks, outcome)
        return outcome.reason

    async def _load_rear(
        self,
        chunks: Sequence[Chunk],
        groups: Groups,
        deliver: Deliver,
        watch: RearWatch,
        progress: Progress,
    ) -> Reason | None:
        manifests, prefix = await self._store.find(chunks)
        self._judge(chunks, prefix)
        if prefix.reason is not None:
            watch.on_lost(chunks[prefix.chunks :], prefix.reason)
            self._observer.record_not_loaded(len(chunks) - prefix.chunks, prefix.reason)
        if not manifests:
            return prefix.reason
        # The front counts as used, too: without its first chunks the rest cannot be found.
        if self._maintenance is not None:
            self._maintenance.touches.add([chunk.key for chunk in chunks[: len(manifests)]])
        watch.on_chain(len(manifests))
        data = await self._store.load_rear(manifests, groups, deliver, watch, progress)
        if data.reason is not None:
            self._judge(chunks, data)
            watch.on_lost(chunks[data.chunks : data.chunks + 1], data.reason)
            self._observer.record_not_loaded(1, data.reason)
        return data.reason or prefix.reason

    async def _find(self, chunks: Sequence[Chunk]) -> Outcome:
        try:
            _, outcome = await self._store.find(chunks)
        except Exception:  # noqa: BLE001 - a defect here must cost a recompute, never a request
            _log.exception("looking up KV in storage failed with an internal error")
            return Outcome(0, Reason.OTHER)
        self._judge(chunks, outcome)
        return outcome

    def _judge(self, chunks: Sequence[Chunk], outcome: Outcome) -> None:
        """Record the store's health, and the chunk at which a look-up or load ended as missing."""
        if outcome.reason in _FAILURES:
            self._health.record_failure(outcome.message or NO_ANSWER)
            return
        # Any answer shows that the store is reachable, even wrong bytes.
        self._health.record_success()
        if outcome.reason is not None:
            # Also for a chunk that must not be used: asking again would bring the same bytes.
            self._missing.add(chunks[outcome.chunks].key, _now())

    def _result(
        self,
        chunks: Sequence[Chunk],
        loaded: int,
        reason: Reason | None,
        size: int = 0,
        seconds: float = 0.0,
    ) -> LoadResult:
        if loaded:
            if self._maintenance is not None:
                self._maintenance.touches.add([chunk.key for chunk in chunks[:loaded]])
            self._observer.record_load(loaded, size, seconds)
        if (missing := len(chunks) - loaded) and reason is not None:
            self._observer.record_not_loaded(missing, reason)
        return LoadResult(loaded, reason, size, seconds)


def _now() -> float:
    return asyncio.get_running_loop().time()
