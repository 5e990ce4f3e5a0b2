"""Loads from the end of a stored prefix."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tandem_kvstore.chain import Outcome, Progress, load_rear
from tandem_kvstore.chunk_store import Chunk
from tandem_kvstore.errors import KvRejected, Reason

from .kv import cancel_when, chain, client, engine, group_specs
from .servers import file_store
from .test_faults import FAULTS, Fault


@dataclass
class Watch:
    """Claims the chunks from `first` on, and keeps what a load told."""

    first: int
    found: int = 0
    claimed: list[int] = field(default_factory=list)
    lost: list[tuple[list[Chunk], Reason | None]] = field(default_factory=list)

    def on_chain(self, chunks: int) -> None:
        self.found = chunks

    def claim(self, index: int, pending: int) -> bool:
        if index < self.first:
            return False
        self.claimed.append(index)
        return True

    def on_lost(self, chunks: Sequence[Chunk], reason: Reason | None) -> None:
        self.lost.append((list(chunks), reason))


async def test_chunks_are_claimed_from_the_last_one_to_the_first_that_is_refused() -> None:
    order, watch, progress = [], Watch(first=3), Progress()

    async def load(chunk: int) -> None:
        order.append(chunk)

    assert await load_rear(load, 40, watch, progress) == Outcome(3)
    assert order == watch.claimed == list(reversed(range(3, 40)))
    assert progress.chunks == 37


async def test_few_chunks_are_claimed_at_once() -> None:
    watch, goes_on = Watch(first=0), asyncio.Event()

    async def load(_: int) -> None:
        await goes_on.wait()

    task = asyncio.create_task(load_rear(load, 40, watch, Progress()))
    await asyncio.sleep(0)
    assert len(watch.claimed) == 8
    goes_on.set()
    assert await task == Outcome(0)


async def test_chunks_before_a_failure_count_for_nothing() -> None:
    watch, progress, cancelled = Watch(first=0), Progress(), []

    async def load(chunk: int) -> None:
        if chunk == 5:
            raise KvRejected(Reason.CORRUPT, "damaged")
        if chunk < 5:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(chunk)
                raise

    assert await load_rear(load, 8, watch, progress) == Outcome(5, Reason.CORRUPT)
    assert progress.chunks == 2
    # No load goes on behind the engine's back.
    assert sorted(cancelled) == list(range(5))


async def test_a_load_that_is_cancelled_keeps_the_last_chunks() -> None:
    progress, blocked = Progress(), asyncio.Event()

    async def load(chunk: int) -> None:
        if chunk == 4:
            blocked.set()
            await asyncio.Event().wait()

    await cancel_when(blocked, load_rear(load, 6, Watch(first=0), progress))
    assert progress.chunks == 1


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
async def test_a_wrong_object_ends_the_rear(tmp_path: Path, fault: Fault, reason: Reason) -> None:
    server, chunks, watch = file_store(tmp_path), chain(1, 6), Watch(first=1)
    await engine(server.location).put_all(chunks)
    fault(server, chunks)
    reader, behind, counts = client(server.location)
    deadline = asyncio.timeout(60)
    result = await reader.load_rear(chunks, group_specs(), behind.deliver, watch, deadline)
    assert result.reason is reason
    if watch.found == 6:
        # Its data: the chunks behind it came.
        assert (result.chunks, watch.lost) == (2, [([chunks[3]], reason)])
    else:
        # Its manifest: the stored prefix ends before it.
        assert (watch.found, result.chunks) == (3, 2)
        assert watch.lost == [(chunks[3:], reason)]
    assert sum(counts.not_loaded.values()) == len(watch.lost[0][0])
    groups = [name for name, _ in group_specs()]
    came = [i for i in range(6) if all((i, name) in behind.delivered for name in groups)]
    assert set(range(watch.found - result.chunks, watch.found)) <= set(came)
    assert 3 not in came
    await reader.close()


async def test_a_deadline_that_is_moved_ends_a_load(tmp_path: Path) -> None:
    server, chunks, watch = file_store(tmp_path), chain(1, 6), Watch(first=0)
    await engine(server.location).put_all(chunks)
    reader, _, _ = client(server.location)
    deadline = asyncio.timeout(None)

    async def deliver(_index: int, _group: str, _tensors: list[memoryview]) -> None:
        # As when computing has come to the rear.
        if deadline.when() is None:
            deadline.reschedule(0.0)
        await asyncio.Event().wait()

    result = await reader.load_rear(chunks, group_specs(), deliver, watch, deadline)
    assert (result.chunks, result.reason) == (0, Reason.TIMEOUT)
    await reader.close()
