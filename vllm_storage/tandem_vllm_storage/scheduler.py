"""The scheduler's side: decides what each request loads and saves.

    NEW ──ask──► ASKED ──► FOUND ──blocks allocated──► LOADING ──► NEW     (loaded)
                   └─────► OVER ◄───────────────────────┴ failed, or nothing is stored

vLLM asks about a request in each step in which the request could start. While the look-up runs,
the answer is None: vLLM goes on with other requests and asks again.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Protocol

from tandem_contract.kv_reference import StoreLeg
from tandem_kvstore.chunk_store import Chunk, chunks_of
from tandem_kvstore.client import LoadResult, StoreClient
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.identity import KvIdentity, Prompt, chunk_keys
from tandem_kvstore.guard.load_guard import Decision
from tandem_kvstore.open_client import open_client

from .counters import Counters, LookUpObserver
from .handoff import PrefillLegs, find_named, named_chunks, read_leg
from .messages import (
    LoadOrder,
    LoadReport,
    RankChunks,
    RankLayout,
    SaveOrder,
    StepOrders,
    WorkerReport,
)
from .plan import Lookup, RequestState, external_tokens, first_chunk, load_span, savable_tokens
from .settings import StorageSettings
from .store_thread import StoreThread
from .stored_chunks import BlocksRemoved, BlocksStored, StoredChunks

_log = logging.getLogger(__name__)
_LAYOUT_ASKS: Final = 1000
"""Answers of None while the workers' first reports are missing, which come in the first step.
After these, requests start without storage."""


class RequestReader(Protocol):
    """Reads vLLM's requests."""

    def prompt(self, request: Any) -> Prompt | None:
        """The part of a request that its keys depend on; None: its KV must not be stored."""

    def blocks(self, request: Any, start: int, end: int) -> BlocksStored | None:
        """The KV event for the request's tokens from `start` to `end`; None: no event."""


class SchedulerSide:
    """The state of all requests. vLLM's scheduler calls the methods, in one thread."""

    def __init__(
        self,
        settings: StorageSettings,
        block_size: int,
        identify: Callable[[Sequence[RankLayout]], tuple[KvIdentity, ...]],
        reader: RequestReader,
        counters: Counters,
        *,
        max_model_len: int,
    ) -> None:
        """`identify`: the identity of each worker, by rank. `max_model_len`: tokens of vLLM's
        longest sequence."""
        self._settings, self._block, self._size = settings, block_size, settings.chunk_tokens
        self._identify, self._reader, self._counters = identify, reader, counters
        self._thread = StoreThread()
        self._client: StoreClient | None = None
        self._layouts: dict[int, RankLayout] = {}
        self._identities: tuple[KvIdentity, ...] = ()
        self._asks_left = _LAYOUT_ASKS
        self._states: dict[str, RequestState] = {}
        self._look_ups: dict[str, Future[Decision]] = {}
        self._loads: list[LoadOrder] = []
        # Loads that run: the order, `StoredChunks.clock` at its start, the workers' reports so far.
        self._loading: dict[str, tuple[LoadOrder, int, list[LoadReport]]] = {}
        self._stored = StoredChunks()
        self._prefills = PrefillLegs(
            self._thread, self._stored, self._prompt_chunks, self._size, max_model_len
        )

    @property
    def is_writing(self) -> bool:
        """Whether a worker will report a save."""
        return self._stored.is_saving

    def begin(self, request: Any) -> None:
        """Read whether the request is a leg of a hand-off. Later calls for it have no effect."""
        if request.request_id in self._states:
            return
        self._states[request.request_id] = state = RequestState()
        leg = read_leg(request.request_id, request.kv_transfer_params)
        if isinstance(leg, StoreLeg):
            self._prefills.begin(request, leg)
        else:
            state.leg = leg

    def is_ready(self) -> bool:
        """Whether requests may start. Before all workers have reported, nothing could be saved."""
        if self._client is None:
            self._asks_left -= 1
        return self._client is not None or self._asks_left <= 0

    def matched_tokens(self, request: Any, computed: int) -> int | None:
        """How many tokens after `computed` to load; None: vLLM must ask again."""
        state = self._states.setdefault(request.request_id, RequestState())
        if self._client is None:
            return 0 if self.is_ready() else None
        if state.lookup in (Lookup.NEW, Lookup.ASKED):
            self._advance_look_up(request, state, computed)
        if state.lookup is Lookup.ASKED:
            return None
        return external_tokens(state, computed, self._size) if state.lookup is Lookup.FOUND else 0

    def start_load(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """Order the load of `external` tokens into `blocks`, which vLLM has allocated."""
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
        self._loading[request.request_id] = order, self._stored.clock, []

    def orders(self, scheduled: Sequence[tuple[Any, Sequence[int], int, int]]) -> StepOrders:
        """The orders of a step. `scheduled`: request, blocks, tokens before the step and in it."""
        loads, self._loads = tuple(self._loads), []
        saves: list[SaveOrder] = []
        if self._client is not None:
            self._prefills.advance(self._client)
        prompt_tokens, longest, context = 0, 0, 0
        for request, blocks, computed, count in scheduled:
            if computed < request.num_prompt_tokens:
                prompt_tokens += count
                if count > longest:
                    longest, context = count, computed
            saves += self._saves(request, blocks, computed, count)
        return StepOrders(loads, tuple(saves), self._identities, prompt_tokens, context)

    def add_report(self, report: WorkerReport) -> None:
        """Apply the workers' report of a step."""
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

    def take_events(self) -> list[BlocksStored | BlocksRemoved]:
        """The KV events since the last call."""
        return self._stored.take_events()

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """Forget a request that has ended; returns the `kv_transfer_params` of its answer."""
        self._states.pop(request_id, None)
        # A load goes on until it is reported: vLLM keeps the blocks until then.
        if (look_up := self._look_ups.pop(request_id, None)) is not None:
            look_up.cancel()
        return self._prefills.finish(request_id)

    def close(self) -> None:
        """Close the client and end its thread."""
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
        if state.leg is not None:
            state.look_up_seconds = state.leg.tandem_kv_load_timeout - decision.deadline
            named = state.leg.tandem_kv_reference.token_count // self._size
            if state.found_chunks < named:
                missing = named - state.found_chunks
                self._counters.add_not_loaded(missing, decision.reason or Reason.OTHER)
                self._fail_transfer(state)
        chunks = self._chunks(request, request.num_tokens)[0]
        for chunk in chunks[state.first_chunk : state.found_chunks]:
            self._stored.add_found(chunk.key, partial(self._blocks_of, request, chunk))
        self._stored.remove_lost(chunks[state.found_chunks :], decision.reason, state.began)

    def _start_look_up(
        self, request: Any, state: RequestState, computed: int
    ) -> Future[Decision] | None:
        first = first_chunk(computed, request.num_tokens, self._size)
        if first is None or self._client is None:
            return None
        # While the breaker is open a request does not wait, not even for one step.
        if not self._client.guard.breaker.allows:
            missing = request.num_tokens // self._size - first
            self._counters.add_not_loaded(missing, Reason.BREAKER_OPEN)
            self._fail_transfer(state)
            return None
        chains = self._chunks(request, request.num_tokens)
        if not chains:
            self._fail_transfer(state)
            return None
        state.first_chunk, state.began = first, self._stored.clock
        if state.leg is not None:
            named = named_chunks(request.request_id, state.leg, chains[0], self._client)
            if named is not None:
                limit = state.leg.tandem_kv_load_timeout
                return self._thread.submit(find_named(self._client, named[first:], limit))
            self._fail_transfer(state)
        start = first * self._size
        look_up = self._client.look_up(chains[0][first:], start, computed - start)
        return self._thread.submit(look_up)

    def _fail_transfer(self, state: RequestState) -> None:
        """Count a hand-off that does not bring all KV that it names, once."""
        if state.leg is not None:
            state.leg = None
            self._counters.add_failed_transfer()

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
            if chunk[0].key in self._stored:
                continue
            blocks_stored = self._blocks_of(request, chunk[0])
            self._stored.add_saving(chunk[0].key, blocks_stored, len(chains))
            own = tuple(blocks[index * per_chunk : (index + 1) * per_chunk])
            saves.append(SaveOrder(chunk, own))
        return saves

    def _chunks(self, request: Any, limit: int) -> RankChunks:
        """The full chunks of the first `limit` tokens, by rank; empty if KV must not be stored."""
        state = self._states[request.request_id]
        count = limit // self._size
        if len(state.chains) != len(self._identities) or len(state.chains[0]) < count:
            prompt = self._reader.prompt(request)
            if prompt is None:
                return ()
            # Tokens are only appended, so known keys stay valid.
            state.chains = tuple(
                tuple(chunks_of(chunk_keys(identity, prompt, limit), self._size))
                for identity in self._identities
            )
        return tuple(chain[:count] for chain in state.chains)

    def _end_load(self, load: LoadReport) -> None:
        order, began, reports = self._loading.get(load.request_id, (None, 0, []))
        reports.append(load)
        if order is None or self._client is None or len(reports) < len(self._identities):
            return
        del self._loading[load.request_id]
        # A chunk is loaded when all workers have loaded their part of it.
        worst = min(reports, key=lambda report: report.chunks)
        size = sum(report.bytes for report in reports)
        seconds = max(report.seconds for report in reports)
        chunks = order.chunks[0]
        result = LoadResult(worst.chunks, worst.reason, worst.bytes, seconds)
        self._thread.run(self._client.observe_load, [chunk.key for chunk in chunks], result)
        is_whole = worst.chunks == len(chunks)
        if is_whole:
            self._counters.add_loaded(len(chunks) * self._size, size, seconds)
        else:
            self._counters.add_not_loaded(len(chunks), worst.reason or Reason.OTHER)
            # The request computes the chunks now: save them again if the store lost or damaged
            # them.
            self._stored.remove_lost(chunks[worst.chunks :], worst.reason, began)
        if (state := self._states.get(load.request_id)) is not None:
            self._end_transfer(state, seconds, is_whole=is_whole)
            # vLLM asks again after a failed load, and after a preemption.
            state.lookup = Lookup.NEW if is_whole else Lookup.OVER

    def _end_transfer(self, state: RequestState, seconds: float, *, is_whole: bool) -> None:
        if not is_whole:
            self._fail_transfer(state)
        elif state.leg is not None:
            state.leg = None
            self._counters.add_transfer(state.look_up_seconds + seconds)

    def _end_save(self, key: str, reason: Reason | None) -> None:
        if self._stored.end_save(key, is_stored=reason is None):
            self._counters.add_stored(self._size)
            if self._client is not None:
                self._thread.run(self._client.note_stored, key)
        if reason is not None:
            self._counters.add_not_stored(reason)

    def _prompt_chunks(self, request: Any) -> Sequence[Chunk]:
        chains = self._chunks(request, request.num_prompt_tokens)
        return chains[0] if chains else ()

    def _blocks_of(self, request: Any, chunk: Chunk) -> BlocksStored | None:
        return self._reader.blocks(request, chunk.token_count - self._size, chunk.token_count)

    async def _open(self, identity: KvIdentity) -> StoreClient:
        return open_client(
            self._settings.location(),
            identity,
            LookUpObserver(self._counters),
            chunk_bytes=self._layouts[0].chunk_bytes,
            bounds=self._settings.bounds_reader(),
            on_removed=self._stored.on_deleted,
        )

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.close()
