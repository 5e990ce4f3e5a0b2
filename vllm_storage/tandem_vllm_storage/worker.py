"""A worker's side: carries out the loads and saves that the scheduler's side orders.

    orders.loads ──► StoreClient.load ──► BlockCopies.write ──► LoadReport, `take_ended_loads`
    orders.saves ──► BlockCopies.read ──► next step ──► StoreClient.store ──► SaveReport

A save copies the chunk before its step ends, because vLLM may then give the blocks to another
request. Writing begins with the next step, when the tokens of this one have been sampled and sent,
and runs in the background. Every load ends in a report, even if its request was aborted, because
vLLM frees the blocks only then.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Final, Protocol, TypeVar

from tandem_kvstore.client import Groups, LoadResult, StoreClient
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.identity import KvIdentity
from tandem_kvstore.format.tensors import LayerGroup
from tandem_kvstore.observer import NullObserver
from tandem_kvstore.open_client import open_client

from .messages import (
    LoadOrder,
    LoadReport,
    RankLayout,
    SaveOrder,
    SaveReport,
    StepOrders,
    WorkerReport,
)
from .settings import StorageSettings
from .store_thread import StoreThread

_log = logging.getLogger(__name__)
T = TypeVar("T")

_WRITERS: Final = 4
"""Chunks that are written at once."""


class Copies(Protocol):
    """The part of `BlockCopies` that this module uses."""

    groups: Groups
    chunk_bytes: int

    def fence(self) -> Callable[[], None]: ...
    def read(self, blocks: Sequence[int]) -> tuple[LayerGroup, ...]: ...
    def write(
        self, group: str, tensors: Sequence[memoryview], blocks: Sequence[int], first: int
    ) -> None: ...


class _SaveObserver(NullObserver):
    """Keeps the reason for which the last chunk was not stored."""

    def __init__(self) -> None:
        self.not_stored: Reason = Reason.OTHER

    def record_not_stored(self, reason: Reason) -> None:
        self.not_stored = reason


class WorkerSide:
    """Loads and saves of one worker. vLLM's model runner calls the methods, in one thread."""

    def __init__(
        self,
        settings: StorageSettings,
        layout: RankLayout,
        copies: Copies,
        block_size: int,
    ) -> None:
        self._settings, self._layout, self._copies = settings, layout, copies
        self._chunk_blocks = settings.chunk_tokens // block_size
        self._thread = StoreThread()
        self._client: StoreClient | None = None
        self._observer = _SaveObserver()
        self._writers = asyncio.Semaphore(_WRITERS)
        self._pending: set[Future[None]] = set()
        # Filled by the store's thread and emptied by vLLM's. No other state is used by both.
        self._ended: SimpleQueue[LoadReport] = SimpleQueue()
        self._saved: SimpleQueue[SaveReport] = SimpleQueue()
        self._pending_bytes = 0
        # Copied chunks whose write begins with the next step.
        self._copied: list[tuple[StoreClient, SaveOrder, tuple[LayerGroup, ...]]] = []
        self._report = WorkerReport()
        self._step_began = 0.0

    def begin_step(self) -> None:
        """A step begins. vLLM goes on with empty steps while saves wait."""
        # Not in the step of the copy, whose sampling hashing and sending would delay.
        self._start_writing()
        self._step_began = time.monotonic()

    def load(self, orders: StepOrders) -> None:
        """Start the loads of a step."""
        if self._client is None and orders.identities:
            self._client = self._thread.call(self._open(orders.identities[self._layout.rank]))
        if not orders.loads:
            return
        fence = self._copies.fence()
        for order in orders.loads:
            self._thread.submit(self._load(order, fence))

    def save(self, orders: StepOrders) -> None:
        """Copy the chunks that the step has completed; returns when the copies are complete."""
        if orders.prompt_tokens and orders.saves:
            # Wait until the device has computed the step, to measure its time.
            self._copies.fence()()
            seconds = time.monotonic() - self._step_began
            self._report.computed.append((orders.prompt_tokens, orders.context, seconds))
        self._take_saved()
        for order in orders.saves:
            client, reason = self._client, self._refusal()
            if client is None or reason is not None:
                self._report.saves.append(SaveReport(order.chunk[0].key, reason or Reason.BUSY))
                continue
            try:
                groups = self._copies.read(order.blocks)
            # There is no memory for the copy, on the device or the host.
            except (RuntimeError, MemoryError) as err:
                _log.warning("KV not stored, its copy failed: %s", err)
                self._report.saves.append(SaveReport(order.chunk[0].key, Reason.OTHER))
                continue
            self._pending_bytes += self._copies.chunk_bytes
            self._copied.append((client, order, groups))

    def take_ended_loads(self) -> list[LoadReport]:
        """Loads that have ended since the last call."""
        ended = _all_of(self._ended)
        self._report.loads += ended
        return ended

    def take_report(self) -> WorkerReport | None:
        """What happened since the last call; None: nothing."""
        self._take_saved()
        report, self._report = self._report, WorkerReport()
        # Repeat the layout until the scheduler's side has sent the identities.
        if self._client is None:
            self._report.layouts.append(self._layout)
        return report or None

    def close(self) -> None:
        """Write the chunks that wait, for at most ten seconds, and end the thread."""
        self._start_writing()
        self._thread.stop(self._close())

    def _start_writing(self) -> None:
        copied, self._copied = self._copied, []
        for save in copied:
            pending = self._thread.submit(self._save(*save))
            self._pending.add(pending)
            pending.add_done_callback(self._pending.discard)

    def _take_saved(self) -> None:
        saved = _all_of(self._saved)
        self._pending_bytes -= len(saved) * self._copies.chunk_bytes
        self._report.saves += saved

    def _refusal(self) -> Reason | None:
        if self._client is not None and not self._client.guard.breaker.allows:
            return Reason.BREAKER_OPEN
        over = self._pending_bytes + self._copies.chunk_bytes > self._settings.pending_bytes
        return Reason.BUSY if over else None

    async def _open(self, identity: KvIdentity) -> StoreClient:
        location, size = self._settings.location(), self._copies.chunk_bytes
        return open_client(location, identity, self._observer, chunk_bytes=size)

    async def _load(self, order: LoadOrder, fence: Callable[[], None]) -> None:
        chunks = order.chunks[self._layout.rank]
        result = LoadResult(0, Reason.OTHER)
        try:
            if self._client is not None:
                await asyncio.to_thread(fence)
                result = await self._client.load(
                    chunks,
                    self._copies.groups,
                    partial(self._deliver, order),
                    order.context,
                    limit=order.deadline,
                )
        finally:
            report = LoadReport(
                order.request_id,
                result.chunks,
                result.chunks == len(chunks),
                result.reason,
                result.bytes,
                result.seconds,
            )
            self._ended.put(report)

    async def _deliver(
        self, order: LoadOrder, index: int, group: str, tensors: list[memoryview]
    ) -> None:
        start = index * self._chunk_blocks
        blocks = order.blocks[start : start + self._chunk_blocks]
        skipped = order.skipped_blocks if index == 0 else 0
        write = partial(self._copies.write, group, tensors, blocks, skipped)
        future = asyncio.get_running_loop().run_in_executor(None, write)
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            # No thread may write into the blocks after the load was reported.
            await asyncio.wait([future])
            raise

    async def _save(
        self, client: StoreClient, order: SaveOrder, groups: tuple[LayerGroup, ...]
    ) -> None:
        reason: Reason | None = Reason.OTHER
        try:
            async with self._writers:
                is_stored = await client.store(order.chunk[self._layout.rank], groups)
                reason = None if is_stored else self._observer.not_stored
        finally:
            self._saved.put(SaveReport(order.chunk[0].key, reason))

    async def _close(self) -> None:
        pending = [asyncio.wrap_future(future) for future in tuple(self._pending)]
        await asyncio.gather(*pending, return_exceptions=True)
        if self._client is not None:
            await self._client.close()


def _all_of(queue: SimpleQueue[T]) -> list[T]:
    return [queue.get() for _ in range(queue.qsize())]
