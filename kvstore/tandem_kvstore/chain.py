"""A prompt as a chain of chunks: the values that look-ups and loads pass, and how far they came."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Protocol

from .errors import KvRejected, Reason, StoreError, message_of
from .format.manifest import Manifest
from .format.tensors import TensorSpec

_log = logging.getLogger(__name__)

_REAR_WINDOW: Final = 8
"""Chunks of a rear that are loaded at once. More: computing comes to chunks that have just been
asked for. Fewer: slower on stores with long delays."""

Groups = Sequence[tuple[str, tuple[TensorSpec, ...]]]
"""Name and tensors of each layer group of a chunk."""

Deliver = Callable[[int, str, list[memoryview]], Awaitable[None]]
"""Takes the verified tensors of a layer group: index of the chunk, name of the group, tensors in
the order of the group's specs. The views are valid until it returns."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A place in a chain of chunks."""

    key: str
    previous: str
    """Key of the chunk before; empty for the first."""
    token_count: int
    """Tokens from the start of the prompt to the end of this chunk."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a look-up or a load came."""

    chunks: int
    """Leading chunks that are there, or that were delivered as a whole."""
    reason: Reason | None = None
    """Why it ended before the last chunk; None: it did not."""
    bytes: int = 0
    """Bytes of verified tensors."""
    message: str = field(default="", compare=False)
    """The store's own message for `reason`."""


def chunks_of(keys: Sequence[str], chunk_tokens: int) -> list[Chunk]:
    """The chunks of a chain of keys."""
    return [
        Chunk(key, previous, i * chunk_tokens)
        for i, (previous, key) in enumerate(pairwise(("", *keys)), 1)
    ]


@dataclass(slots=True)
class Progress:
    """How far a load has come, also when it is cancelled."""

    chunks: int = 0
    bytes: int = 0


class LayerWatch(Protocol):
    """Follows a load that goes layer group by layer group."""

    def on_chain(self, chunks: int) -> None:
        """The look-up ended: the store has the first `chunks` chunks."""

    def on_group(self, index: int) -> None:
        """Layer groups 0 to `index` of all these chunks are verified and delivered."""

    def on_cut(self) -> None:
        """Not all of these chunks can be used. The load goes on with those that can."""


class RearWatch(Protocol):
    """Follows the load of a rear: chunks from the last one towards the first, while an engine
    computes those before it."""

    def on_chain(self, chunks: int) -> None:
        """The look-up ended: the store has the first `chunks` chunks, at least one."""

    def claim(self, index: int, pending: int) -> bool:
        """Whether to load chunk `index`, beside `pending` chunks that are being loaded. After a
        yes, the engine must not compute it; after a no, none before it is asked for."""

    def on_lost(self, chunks: Sequence[Chunk], reason: Reason | None) -> None:
        """The load ended at the first of these chunks; see `Outcome`."""


def chunk_of(manifest: Manifest) -> Chunk:
    """The place that a manifest describes."""
    return Chunk(manifest.prefix_hash, manifest.previous, manifest.token_count)


async def load_in_order(loads: Sequence[Coroutine[Any, Any, None]], progress: Progress) -> Outcome:
    """Run the loads of a chain's chunks at once; those behind a failure count for nothing."""
    tasks = [asyncio.ensure_future(load) for load in loads]
    try:
        for task in tasks:
            await task
            progress.chunks += 1
    except (StoreError, KvRejected) as err:
        log_rejected(err)
        return Outcome(progress.chunks, err.reason, progress.bytes, message_of(err))
    finally:
        await end_tasks(tasks)
    return Outcome(progress.chunks, None, progress.bytes)


async def load_by_layers(
    load: Callable[[int, int], Coroutine[Any, Any, None]],
    chunks: int,
    groups: int,
    watch: LayerWatch,
    progress: Progress,
) -> Outcome:
    """Run `load(chunk, group)` for all: the first group of each chunk, then the second, …

    A chunk that cannot be used ends the chain before it. The groups of the chunks that are left
    still come, but `watch` hears of no further group.
    """
    rows = [
        [asyncio.ensure_future(load(chunk, group)) for chunk in range(chunks)]
        for group in range(groups)
    ]
    end, reason, message = chunks, None, ""
    try:
        for index, row in enumerate(rows):
            for chunk, task in enumerate(row[:end]):
                try:
                    await task
                except (StoreError, KvRejected) as err:
                    log_rejected(err)
                    end, reason, message = chunk, err.reason, message_of(err)
                    watch.on_cut()
                    await end_tasks([task for other in rows for task in other[end:]])
                    break
            if reason is None:
                watch.on_group(index)
    finally:
        progress.chunks = _complete(rows, end)
        await end_tasks([task for row in rows for task in row])
    return Outcome(progress.chunks, reason, progress.bytes, message)


async def load_rear(
    load: Callable[[int], Coroutine[Any, Any, None]],
    chunks: int,
    watch: RearWatch,
    progress: Progress,
) -> Outcome:
    """Run `load(chunk)` from the last of `chunks` chunks to the first one that `watch` claims.

    `progress` counts from the end; chunks before a failure count for nothing. Of the outcome,
    `chunks` are those before the one that failed.
    """
    pending: deque[asyncio.Future[None]] = deque()
    first = chunks
    try:
        while True:
            while first and len(pending) < _REAR_WINDOW and watch.claim(first - 1, len(pending)):
                first -= 1
                pending.append(asyncio.ensure_future(load(first)))
            if not pending:
                return Outcome(first, None, progress.bytes)
            # In order: a chunk counts if all behind it have come.
            await pending[0]
            pending.popleft()
            progress.chunks += 1
    except (StoreError, KvRejected) as err:
        log_rejected(err)
        return Outcome(chunks - progress.chunks - 1, err.reason, progress.bytes, message_of(err))
    finally:
        await end_tasks(pending)


def _complete(rows: Sequence[Sequence[asyncio.Future[None]]], end: int) -> int:
    """Leading chunks of the first `end` whose groups have all been delivered."""
    for chunk in range(end):
        for row in rows:
            task = row[chunk]
            if not task.done() or task.cancelled() or task.exception() is not None:
                return chunk
    return end


async def end_tasks(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait until it has ended: no task may write into blocks later."""
    for task in tasks:
        task.cancel()
    is_cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            # The caller's own, such as a deadline, which cancels only once: it must not be lost.
            is_cancelled = True
    for task in tasks:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, StoreError | KvRejected):
            raise error
    if is_cancelled:
        raise asyncio.CancelledError


def log_rejected(err: StoreError | KvRejected) -> None:
    # A chunk that is missing is no event: most prompts are new.
    if err.reason is not Reason.MISSING:
        _log.warning("KV in storage not used: %s", err)
