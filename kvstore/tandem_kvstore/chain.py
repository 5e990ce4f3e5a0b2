"""A prompt as a chain of chunks, and the three orders in which the chunks of a chain are loaded."""

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
"""Chunks of a rear that are loaded at once. More: computing reaches chunks whose load has just
begun. Fewer: slower on stores with long delays."""

Groups = Sequence[tuple[str, tuple[TensorSpec, ...]]]
"""Name and tensors of each layer group of a chunk."""

Deliver = Callable[[int, str, list[memoryview]], Awaitable[None]]
"""Takes the verified tensors of a layer group: index of the chunk, name of the group, tensors in
the order of the group's specs. The views are valid until it returns."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk's place in a chain."""

    key: str
    previous: str
    """Key of the chunk before; empty for the first."""
    token_count: int
    """Tokens from the start of the prompt to the end of this chunk."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a look-up or a load came."""

    chunks: int
    """Leading chunks that are stored, or after a load that were delivered as a whole."""
    reason: Reason | None = None
    """Why it ended before the last chunk; None: it reached the last one."""
    bytes: int = 0
    """Bytes of verified tensors."""
    message: str = field(default="", compare=False)
    """The error's message, without the object's name."""


def chunks_of(keys: Sequence[str], chunk_tokens: int) -> list[Chunk]:
    """The chunks of a chain of keys."""
    return [
        Chunk(key, previous, i * chunk_tokens)
        for i, (previous, key) in enumerate(pairwise(("", *keys)), 1)
    ]


@dataclass(slots=True)
class Progress:
    """How far a load has come; right at any time, so also after it was cancelled."""

    chunks: int = 0
    bytes: int = 0


class LayerWatch(Protocol):
    """Receives the progress of a load that goes layer group by layer group."""

    def on_chain(self, chunks: int) -> None:
        """The look-up ended: the store has the first `chunks` chunks."""

    def on_group(self, index: int) -> None:
        """Layer groups 0 to `index` of all these chunks are verified and delivered."""

    def on_cut(self) -> None:
        """A chunk cannot be used. The load goes on with those before it."""


class RearWatch(Protocol):
    """Receives the progress of the load of a rear, and decides how far it goes: the load takes
    chunks from the last one towards the first, while the engine computes from the first."""

    def on_chain(self, chunks: int) -> None:
        """The look-up ended: the store has the first `chunks` chunks, at least one."""

    def claim(self, index: int, pending: int) -> bool:
        """Whether to load chunk `index`, beside `pending` chunks that are being loaded. After True
        the engine must not compute it; after False no chunk before it is claimed."""

    def on_lost(self, chunks: Sequence[Chunk], reason: Reason | None) -> None:
        """The load ended at the first of `chunks`, for `reason`."""


def chunk_of(manifest: Manifest) -> Chunk:
    """The place in a chain that a manifest describes."""
    return Chunk(manifest.prefix_hash, manifest.previous, manifest.token_count)


async def load_in_order(loads: Sequence[Coroutine[Any, Any, None]], progress: Progress) -> Outcome:
    """Run the loads of a chain's chunks at once. After a failure, later chunks do not count."""
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

    If a chunk cannot be used, the load goes on with the chunks before it, and calls `on_cut` of
    `watch`, then no more `on_group`.
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

    `progress` counts from the last chunk; after a failure, chunks before the one that failed do
    not count. `Outcome.chunks` is the index of the first chunk that was loaded, or of the one that
    failed.
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
            # In order: a chunk counts only if all chunks behind it have come.
            await pending[0]
            pending.popleft()
            progress.chunks += 1
    except (StoreError, KvRejected) as err:
        log_rejected(err)
        return Outcome(chunks - progress.chunks - 1, err.reason, progress.bytes, message_of(err))
    finally:
        await end_tasks(pending)


def _complete(rows: Sequence[Sequence[asyncio.Future[None]]], end: int) -> int:
    """How many leading chunks, of the first `end`, have all their groups."""
    for chunk in range(end):
        for row in rows:
            task = row[chunk]
            if not task.done() or task.cancelled() or task.exception() is not None:
                return chunk
    return end


async def end_tasks(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the tasks that still run and wait until they have ended: no task may write into
    blocks after its load. Raises an unexpected error of a task."""
    for task in tasks:
        task.cancel()
    is_cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            # The caller itself is cancelled, for instance by its deadline, and only once: raise
            # it again when the tasks have ended.
            is_cancelled = True
    for task in tasks:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, StoreError | KvRejected):
            raise error
    if is_cancelled:
        raise asyncio.CancelledError


def log_rejected(err: StoreError | KvRejected) -> None:
    """Log why KV was not loaded."""
    # Not for missing chunks: most prompts are new.
    if err.reason is not Reason.MISSING:
        _log.warning("KV in storage not used: %s", err)
