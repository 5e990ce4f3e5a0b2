"""The scheduler's side: what each request loads and saves, and what the store is known to have.

    NEW ──ask──► ASKED ──► FOUND ──blocks allocated──► LOADING ──► NEW     (loaded)
                   └─────► OVER ◄───────────────────────┴ failed, or nothing is stored

vLLM asks in each step in which a request could start. While a look-up runs, the answer is None:
vLLM goes on with other requests and asks again.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Protocol

from tandem_kvstore.chunk_store import Chunk, ChunkStore, chunks_of
from tandem_kvstore.client import LoadResult, StoreClient
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.identity import KvIdentity, Prompt, chunk_keys
from tandem_kvstore.guard.breaker import BreakerState
from tandem_kvstore.guard.load_guard import Decision
from tandem_kvstore.maintenance import Maintenance
from tandem_kvstore.stores import open_store

from .messages import LoadOrder, LoadReport, RankChunks, RankLayout, SaveOrder, StepOrders
from .messages import WorkerReport as Report
from .plan import Lookup, RequestState, external_tokens, first_chunk, load_span, savable_tokens
from .settings import StorageSettings
from .store_thread import StoreThread

_log = logging.getLogger(__name__)
_KNOWN: Final = 1 << 16
"""Keys that are remembered as stored, so that a chunk is not copied again."""
_GONE: Final = (
    *(Reason.MISSING, Reason.TRUNCATED, Reason.CORRUPT),
    *(Reason.SWAPPED, Reason.FOREIGN, Reason.FORMAT),
)
"""Why a look-up ends at a chunk that the store has not, or whose object cannot be used."""
_LAYOUT_ASKS: Final = 1000
"""Times that vLLM may ask before the workers have reported: they do so in the first step."""

DescribePrompt = Callable[[Any], Prompt | None]
"""vLLM's request → what its keys depend on; None: nothing of it may be stored."""


class Figures(Protocol):
    """Counts what happens, for the metrics."""

    def add_loaded(self, tokens: int, size: int, seconds: float) -> None: ...
    def add_stored(self, tokens: int) -> None: ...
    def add_not_loaded(self, chunks: int, reason: Reason) -> None: ...
    def add_not_stored(self, reason: Reason) -> None: ...
    def set_breaker(self, state: BreakerState) -> None: ...
    def set_failure(self, words: str) -> None: ...


class _LookupObserver:
    """The look-ups' client counts what it does not find; workers count loads and saves."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def record_load(self, chunks: int, size: int, seconds: float) -> None: ...
    def record_stored(self, size: int, seconds: float, *, is_new: bool) -> None: ...
    def record_not_stored(self, reason: Reason) -> None: ...

    def record_not_loaded(self, chunks: int, reason: Reason) -> None:
        self._figures.add_not_loaded(chunks, reason)

    def record_breaker(self, state: BreakerState) -> None:
        self._figures.set_breaker(state)

    def record_failure(self, words: str) -> None:
        self._figures.set_failure(words)


class SchedulerSide:
    """State of all requests. Its methods are called by vLLM's scheduler, in one thread."""

    def __init__(
        self,
        settings: StorageSettings,
        block_size: int,
        identify: Callable[[Sequence[RankLayout]], tuple[KvIdentity, ...]],
        describe: DescribePrompt,
        figures: Figures,
    ) -> None:
        self._settings, self._block, self._size = settings, block_size, settings.chunk_tokens
        self._identify, self._describe, self._figures = identify, describe, figures
        self._thread = StoreThread()
        self._client: StoreClient | None = None
        self._layouts: dict[int, RankLayout] = {}
        self._identities: tuple[KvIdentity, ...] = ()
        self._asks_left = _LAYOUT_ASKS
        self._states: dict[str, RequestState] = {}
        self._look_ups: dict[str, Future[Decision]] = {}
        self._loads: list[LoadOrder] = []
        # Orders whose load runs, with the reports of workers where it has ended.
        self._loading: dict[str, tuple[LoadOrder, list[LoadReport]]] = {}
        # Chunks that are stored or being saved, the newest last.
        self._known: OrderedDict[str, None] = OrderedDict()
        self._saving: dict[str, int] = {}

    @property
    def is_writing(self) -> bool:
        """Whether a worker will report a save."""
        return bool(self._saving)

    def matched_tokens(self, request: Any, computed: int) -> int | None:
        """Tokens after `computed` that are to be loaded; None: ask again."""
        state = self._states.setdefault(request.request_id, RequestState())
        if self._client is None:
            self._asks_left -= 1
            return None if self._asks_left > 0 else 0
        if state.lookup in (Lookup.NEW, Lookup.ASKED):
            self._advance_look_up(request, state, computed)
        if state.lookup is Lookup.ASKED:
            return None
        return external_tokens(state, computed, self._size) if state.lookup is Lookup.FOUND else 0

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """vLLM gave a request its blocks; `external` tokens of it are to be loaded."""
        if not external:
            return
        state = self._states[request.request_id]
        end = state.found_chunks * self._size
        computed = end - external
        span, skipped = load_span(computed, external, self._block, self._size)
        start = computed // self._size
        order = LoadOrder(
            request.request_id,
            tuple(chain[start:] for chain in self._chunks(request, end)),
            tuple(blocks[span.start : span.stop]),
            skipped,
            start * self._size,
            state.deadline,
        )
        state.lookup = Lookup.LOADING
        self._loads.append(order)
        self._loading[request.request_id] = order, []

    def orders(self, scheduled: Sequence[tuple[Any, Sequence[int], int, int]]) -> StepOrders:
        """The orders of a step. `scheduled`: request, its blocks, tokens before and in the step."""
        loads, self._loads = tuple(self._loads), []
        saves: list[SaveOrder] = []
        prompt_tokens, longest, context = 0, 0, 0
        for request, blocks, computed, count in scheduled:
            if computed < request.num_prompt_tokens:
                prompt_tokens += count
                if count > longest:
                    longest, context = count, computed
            saves += self._saves(request, blocks, computed, count)
        return StepOrders(loads, tuple(saves), self._identities, prompt_tokens, context)

    def learn(self, report: Report) -> None:
        """Take the workers' reports."""
        self._layouts.update({layout.rank: layout for layout in report.layouts})
        if self._client is None and len(self._layouts) == next(
            (layout.ranks for layout in self._layouts.values()), -1
        ):
            self._identities = self._identify(list(self._layouts.values()))
            self._client = self._thread.call(self._open(self._identities[0]))
        for load in report.loads:
            self._end_load(load)
        for tokens, context, seconds in report.computed:
            if self._client is not None:
                self._client.guard.observe_compute(tokens, context, seconds)
        for save in report.saves:
            self._end_save(save.key, save.reason)

    def finish(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._states.pop(request_id, None)
        # Its load goes on, and is reported: vLLM keeps the blocks until then.
        if (look_up := self._look_ups.pop(request_id, None)) is not None:
            look_up.cancel()

    def close(self) -> None:
        """End the thread."""
        self._thread.stop(self._close())

    def _advance_look_up(self, request: Any, state: RequestState, computed: int) -> None:
        look_up = self._look_ups.get(request.request_id)
        if look_up is None:
            look_up = self._start_look_up(request, state, computed)
            if look_up is None:
                state.lookup = Lookup.OVER
                return
            state.lookup = Lookup.ASKED
            self._look_ups[request.request_id] = look_up
        if not look_up.done():
            return
        del self._look_ups[request.request_id]
        decision = look_up.result()
        state.found_chunks = state.first_chunk + decision.chunks
        state.deadline = decision.deadline
        state.lookup = Lookup.FOUND if decision.chunks else Lookup.OVER
        self._remember_found(request, state)
        if decision.reason in _GONE:
            self._forget_lost(request, state)

    def _start_look_up(
        self, request: Any, state: RequestState, computed: int
    ) -> Future[Decision] | None:
        first = first_chunk(computed, request.num_tokens, self._size)
        if first is None or self._client is None:
            return None
        # While the breaker is open there is nothing to wait for, not even one step.
        if not self._client.guard.breaker.allows:
            missing = request.num_tokens // self._size - first
            self._figures.add_not_loaded(missing, Reason.BREAKER_OPEN)
            return None
        chains = self._chunks(request, request.num_tokens)
        if not chains:
            return None
        state.first_chunk = first
        return self._thread.submit(self._client.look_up(chains[0][first:], first * self._size))

    def _remember_found(self, request: Any, state: RequestState) -> None:
        if state.lookup is Lookup.FOUND:
            chains = self._chunks(request, state.found_chunks * self._size)
            for chunk in chains[0]:
                self._remember(chunk.key)

    def _forget_lost(self, request: Any, state: RequestState) -> None:
        """Save again what the store had and has no more, as the request computes it now."""
        chains = self._chunks(request, request.num_tokens)
        for chunk in chains[0][state.found_chunks :]:
            # Its write may end after the look-up did.
            if chunk.key not in self._saving:
                self._known.pop(chunk.key, None)

    def _saves(
        self, request: Any, blocks: Sequence[int], computed: int, count: int
    ) -> list[SaveOrder]:
        state = self._states.setdefault(request.request_id, RequestState())
        tokens = savable_tokens(computed, count, request.num_prompt_tokens, request.num_tokens)
        end = tokens // self._size
        if end <= state.saved_chunks or not self._identities:
            return []
        first, state.saved_chunks = state.saved_chunks, end
        chains = self._chunks(request, end * self._size)
        per_chunk = self._size // self._block
        saves = []
        for index in range(first, end if chains else first):
            chunk = tuple(chain[index] for chain in chains)
            if chunk[0].key in self._known:
                continue
            self._remember(chunk[0].key)
            self._saving[chunk[0].key] = len(chains)
            own = tuple(blocks[index * per_chunk : (index + 1) * per_chunk])
            saves.append(SaveOrder(chunk, own))
        return saves

    def _chunks(self, request: Any, limit: int) -> RankChunks:
        """The request's chunks with each rank's keys; nothing if it must not be stored."""
        state = self._states[request.request_id]
        count = limit // self._size
        if len(state.chains) != len(self._identities) or len(state.chains[0]) < count:
            prompt = self._describe(request)
            if prompt is None:
                return ()
            # Tokens are only ever appended, so keys that are known stay right.
            state.chains = tuple(
                tuple(chunks_of(chunk_keys(identity, prompt, limit), self._size))
                for identity in self._identities
            )
        return tuple(chain[:count] for chain in state.chains)

    def _end_load(self, load: LoadReport) -> None:
        order, reports = self._loading.get(load.request_id, (None, []))
        reports.append(load)
        if order is None or self._client is None or len(reports) < len(self._identities):
            return
        del self._loading[load.request_id]
        # A chunk is there when all workers have their part of it.
        worst = min(reports, key=lambda report: report.chunks)
        size = sum(report.bytes for report in reports)
        seconds = max(report.seconds for report in reports)
        chunks = order.chunks[0]
        result = LoadResult(worst.chunks, worst.reason, worst.bytes, seconds)
        self._thread.submit(_observe(self._client, chunks, result))
        is_whole = worst.chunks == len(chunks)
        if is_whole:
            self._figures.add_loaded(len(chunks) * self._size, size, seconds)
        else:
            self._figures.add_not_loaded(len(chunks), worst.reason or Reason.OTHER)
            # The request computes it now: save it again if the store lost or damaged it.
            for chunk in chunks[worst.chunks :]:
                self._known.pop(chunk.key, None)
        if (state := self._states.get(load.request_id)) is not None:
            # vLLM asks again after a failure, and after a preemption.
            state.lookup = Lookup.NEW if is_whole else Lookup.OVER

    def _end_save(self, key: str, reason: Reason | None) -> None:
        left = self._saving.get(key, 1) - 1
        if left:
            self._saving[key] = left
        else:
            self._saving.pop(key, None)
        if reason is not None:
            self._figures.add_not_stored(reason)
            # The next request that computes the chunk tries again.
            self._known.pop(key, None)
        elif not left:
            self._figures.add_stored(self._size)
            if self._client is not None:
                self._thread.submit(_note_stored(self._client, key))

    def _remember(self, key: str) -> None:
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)

    async def _open(self, identity: KvIdentity) -> StoreClient:
        location = self._settings.location()
        objects = open_store(location)
        maintenance = None
        if (bounds := self._settings.bounds_reader()) is not None:
            maintenance = Maintenance(objects, bounds)
            maintenance.start()
        return StoreClient(
            ChunkStore(objects, location, identity),
            objects,
            _LookupObserver(self._figures),
            chunk_tokens=self._size,
            chunk_bytes=self._layouts[0].chunk_bytes,
            maintenance=maintenance,
        )

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.close()


async def _observe(client: StoreClient, chunks: Sequence[Chunk], result: LoadResult) -> None:
    """In the store's thread, whose clock the client reads."""
    client.observe_load([chunk.key for chunk in chunks], result)


async def _note_stored(client: StoreClient, key: str) -> None:
    client.note_stored(key)
