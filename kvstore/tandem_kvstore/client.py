"""An engine's access to a store: `chunk_store` behind `guard`, with a deadline for each load.

    result = await client.load(chunks, groups, deliver, context=0)    never raises StoreError
    found, reason = await client.find(chunks)                         never raises StoreError
    span = await client.look_up(chunks, context=0)                    what another process may load
    stored = await client.store(chunk, groups)                        never raises StoreError

A load that the deadline ends keeps the chunks that were delivered as a whole. While the circuit
breaker is open, a background task probes the store: no request waits for a probe.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tandem_contract.kv_reference import KvReference

from .chain import LayerWatch
from .chunk_store import Chunk, ChunkStore, Deliver, Groups, Outcome, Progress
from .errors import ObjectMissing, Reason, StoreDenied, StoreError, StoreUnavailable, words_of
from .format.tensors import LayerGroup
from .guard.breaker import BreakerState
from .guard.load_guard import Decision, LoadGuard, MissingKeys
from .maintenance import Maintenance
from .stores import ObjectStore

__all__ = ["Groups", "LoadResult", "Observer", "StoreClient"]

_log = logging.getLogger(__name__)

PROBE_NAME: Final = "probe"
"""Name that the breaker's probes ask for. It does not exist: 404 shows that the store answers."""
WRITE_SECONDS: Final = 120.0
"""Longest time from a chunk's first data object to its manifest; the collector leaves unreferenced
data alone for longer than that."""

STALL_SECONDS: Final = 0.25
"""A load without a byte for so long is a failure of the store. Shorter: short prompts, whose
deadlines are short, open the circuit breaker of a store that is only far away."""
_NO_ANSWER: Final = "no answer in time"
_FAILURES: Final = (Reason.UNAVAILABLE, Reason.TIMEOUT, Reason.DENIED)


class Observer(Protocol):
    """Counts what the client does."""

    def record_load(self, chunks: int, size: int, seconds: float) -> None:
        """A load brought `chunks` chunks of `size` bytes."""

    def record_not_loaded(self, chunks: int, reason: Reason) -> None:
        """`chunks` chunks were not loaded, for `reason`."""

    def record_stored(self, size: int, seconds: float, *, is_new: bool) -> None:
        """A chunk of `size` bytes was written; not `is_new`: another writer was first."""

    def record_not_stored(self, reason: Reason) -> None:
        """A chunk was not stored, for `reason`."""

    def record_breaker(self, state: BreakerState) -> None:
        """The state of the circuit breaker now."""

    def record_failure(self, words: str) -> None:
        """The store failed, in its own words or the client's."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load brought."""

    chunks: int
    """Leading chunks that were delivered as a whole."""
    reason: Reason | None
    """Why not all were."""
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
        self._store, self._objects, self._observer = store, objects, observer
        self._chunk_tokens, self._chunk_bytes = chunk_tokens, chunk_bytes
        self.guard = guard or LoadGuard()
        self._missing = MissingKeys()
        self._maintenance = maintenance
        self._probe: asyncio.Task[None] | None = None

    def may_have(self, chunk: Chunk) -> bool:
        """Whether it makes sense to ask for `chunk`; answers at once."""
        return self.guard.breaker.allows and not self._missing.has(chunk.key, _now())

    def reference(self, chunk: Chunk) -> KvReference:
        """The reference of a prompt's prefix that ends with `chunk`."""
        return self._store.reference(chunk)

    async def find(self, chunks: Sequence[Chunk]) -> tuple[int, Reason | None]:
        """How many leading chunks are in the store now, and why not all are."""
        if not self.guard.breaker.allows:
            return 0, Reason.BREAKER_OPEN
        _, outcome = await self._store.find(chunks)
        self._judge(chunks, outcome)
        return outcome.chunks, outcome.reason

    async def look_up(self, chunks: Sequence[Chunk], context: int) -> Decision:
        """How many leading chunks another process should load now, and in how many seconds."""
        start = _now()
        decision = self._decide(len(chunks), context, start, None)
        if decision.chunks == 0 or not self.may_have(chunks[0]):
            self._result(chunks, 0, decision.reason or Reason.MISSING)
            return Decision(0, 0.0, decision.reason or Reason.MISSING)
        outcome = Outcome(0, Reason.OTHER)
        try:
            async with asyncio.timeout(decision.deadline):
                _, outcome = await self._store.find(chunks[: decision.chunks])
            self._judge(chunks, outcome)
        except TimeoutError:
            outcome = Outcome(0, Reason.TIMEOUT)
            self.guard.observe_slow_load(0, _now() - start, _now())
            if decision.deadline >= STALL_SECONDS:
                self._record_failure(_NO_ANSWER)
        except Exception:  # noqa: BLE001 - a defect here must cost a recompute, never a request
            _log.exception("looking up KV in storage failed with an internal error")
        if outcome.chunks < len(chunks) and outcome.reason is not None:
            self._observer.record_not_loaded(len(chunks) - outcome.chunks, outcome.reason)
        return Decision(outcome.chunks, decision.deadline - (_now() - start), outcome.reason)

    def observe_load(self, keys: Sequence[str], result: LoadResult) -> None:
        """Learn from a load of another process; `keys` of the chunks that it loaded."""
        if result.chunks and result.reason is not Reason.TIMEOUT:
            self.guard.observe_load(result.bytes, result.seconds, _now())
        if result.reason is Reason.TIMEOUT:
            self.guard.observe_slow_load(result.bytes, result.seconds, _now())
        if result.reason in _FAILURES and not result.bytes:
            self._record_failure(f"a worker's load failed: {result.reason}")
        if self._maintenance is not None:
            self._maintenance.touches.add(keys[: result.chunks])

    def note_stored(self, key: str) -> None:
        """Another process of this engine has stored the chunk `key`: do not believe it missing."""
        self._missing.discard(key)

    async def load(
        self,
        chunks: Sequence[Chunk],
        groups: Groups,
        deliver: Deliver,
        context: int,
        *,
        limit: float | None = None,
        watch: LayerWatch | None = None,
    ) -> LoadResult:
        """Load the longest profitable stored prefix of `chunks`, after `context` cached tokens.

        `limit`: seconds for KV that another engine has just stored for this request. It is loaded
        whatever the cost model predicts, and whatever was missing a moment ago.

        `watch`: load layer group by layer group, and tell it. The first groups come sooner; when
        the deadline ends such a load, few chunks have come as a whole.
        """
        start = _now()
        decision = self._decide(len(chunks), context, start, limit)
        if decision.chunks == 0 or (limit is None and not self.may_have(chunks[0])):
            return self._result(chunks, 0, decision.reason or Reason.MISSING)
        progress = Progress()
        try:
            async with asyncio.timeout(decision.deadline):
                loaded = chunks[: decision.chunks]
                reason = await self._load(loaded, groups, deliver, progress, watch)
        except TimeoutError:
            reason = Reason.TIMEOUT
            self.guard.observe_slow_load(progress.bytes, _now() - start, _now())
            # With some bytes, or soon over, the store is slow, which the cost model handles.
            if not progress.bytes and decision.deadline >= STALL_SECONDS:
                self._record_failure(_NO_ANSWER)
        except Exception:  # noqa: BLE001 - a defect here must cost a recompute, never a request
            _log.exception("loading KV from storage failed with an internal error")
            reason = Reason.OTHER
        seconds = _now() - start
        if progress.chunks and reason is not Reason.TIMEOUT:
            self.guard.observe_load(progress.bytes, seconds, _now())
        return self._result(chunks, progress.chunks, reason, progress.bytes, seconds)

    async def store(self, chunk: Chunk, groups: Sequence[LayerGroup]) -> bool:
        """Write one chunk. Returns whether it is in the store now."""
        if not self.guard.breaker.allows:
            self._observer.record_not_stored(Reason.BREAKER_OPEN)
            return False
        start = _now()
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                # Before sending its data: after a restart, most chunks are there already.
                is_new = not await self._store.has(chunk) and await self._store.put(chunk, groups)
        except TimeoutError:
            self._record_failure(_NO_ANSWER)
            self._observer.record_not_stored(Reason.TIMEOUT)
            return False
        except StoreError as err:
            _log.warning("KV not stored: %s", err)
            self._count_failure(err)
            self._observer.record_not_stored(err.reason)
            return False
        except Exception:  # noqa: BLE001 - a defect here must not end the engine's writer
            _log.exception("storing KV failed with an internal error")
            self._observer.record_not_stored(Reason.OTHER)
            return False
        self._record_success()
        self._missing.discard(chunk.key)
        size = sum(spec.size for group in groups for spec in group.specs)
        self._observer.record_stored(size, _now() - start, is_new=is_new)
        return True

    async def close(self) -> None:
        """End the probe and the connections."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        if self._maintenance is not None:
            await self._maintenance.close()
        await self._store.close()

    def _decide(self, chunks: int, context: int, now: float, limit: float | None) -> Decision:
        if limit is None:
            size = self._chunk_bytes
            return self.guard.decide(chunks, self._chunk_tokens, size, context, now)
        if not self.guard.breaker.allows:
            return Decision(0, 0.0, Reason.BREAKER_OPEN)
        return Decision(chunks, limit)

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

    def _judge(self, chunks: Sequence[Chunk], outcome: Outcome) -> None:
        if outcome.reason in _FAILURES:
            self._record_failure(outcome.words or _NO_ANSWER)
            return
        # Any answer, a wrong one too, shows that the store is reachable.
        self._record_success()
        if outcome.reason is not None:
            # Also a chunk that must not be used: asking again would bring the same answer.
            self._missing.add(chunks[outcome.chunks].key, _now())

    def _count_failure(self, err: StoreError) -> None:
        # A full store can still be read.
        if isinstance(err, StoreUnavailable | StoreDenied):
            self._record_failure(words_of(err))

    def _record_success(self) -> None:
        self.guard.breaker.record_success()
        self._observer.record_breaker(self.guard.breaker.state)

    def _record_failure(self, words: str) -> None:
        self._observer.record_failure(words)
        self.guard.breaker.record_failure(_now())
        self._observer.record_breaker(self.guard.breaker.state)
        if not self.guard.breaker.allows and (self._probe is None or self._probe.done()):
            self._probe = asyncio.create_task(self._probe_until_closed())

    async def _probe_until_closed(self) -> None:
        breaker = self.guard.breaker
        while not breaker.allows:
            await asyncio.sleep(0.05)
            if not breaker.start_probe(_now()):
                continue
            try:
                async with asyncio.timeout(2.0):
                    await self._objects.get(PROBE_NAME, 1 << 10)
                self._record_success()
            except ObjectMissing:
                self._record_success()
            except TimeoutError:
                self._record_failure(_NO_ANSWER)
            except StoreError as err:
                self._record_failure(words_of(err))

    def _result(
        self,
        chunks: Sequence[Chunk],
        loaded: int,
        reason: Reason | None,
        size: int = 0,
        seconds: float = 0.0,
    ) -> LoadResult:
        wanted = len(chunks)
        if loaded:
            if self._maintenance is not None:
                self._maintenance.touches.add([chunk.key for chunk in chunks[:loaded]])
            self._observer.record_load(loaded, size, seconds)
        if wanted > loaded and reason is not None:
            self._observer.record_not_loaded(wanted - loaded, reason)
        return LoadResult(loaded, reason, size, seconds)


def _now() -> float:
    return asyncio.get_running_loop().time()
