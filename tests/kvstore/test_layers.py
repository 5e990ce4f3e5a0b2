"""Loads that go layer group by layer group."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tandem_kvstore.chain import Outcome, Progress, load_by_layers
from tandem_kvstore.errors import KvRejected, Reason
from tandem_kvstore.format.manifest import MAX_INLINE

from .kv import cancel_when, chain, client, engine, group_specs
from .servers import file_store
from .test_faults import FAULTS, Fault


@dataclass
class Watch:
    """What a load told."""

    told: list[object] = field(default_factory=list)

    def on_chain(self, chunks: int) -> None:
        self.told.append(chunks)

    def on_group(self, index: int) -> None:
        self.told.append(f"group {index}")

    def on_cut(self) -> None:
        self.told.append("cut")


async def test_a_deadline_that_fires_while_a_cut_chunk_ends_is_not_lost() -> None:
    ending, goes_on = asyncio.Event(), asyncio.Event()

    async def load(chunk: int, group: int) -> None:
        if chunk == 0:
            await asyncio.Event().wait()
        if group == 0:
            raise KvRejected(Reason.CORRUPT, "damaged")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            # As a copy into blocks, which is not broken off.
            ending.set()
            await goes_on.wait()
            raise

    async def first(chunk: int, group: int) -> None:
        if (chunk, group) != (0, 0):
            await load(chunk, group)

    task = asyncio.ensure_future(load_by_layers(first, 2, 2, Watch(), Progress()))
    await ending.wait()
    task.cancel()
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.wait([task], timeout=20)
    assert task.cancelled()


async def test_the_first_groups_of_all_chunks_come_first() -> None:
    order, watch = [], Watch()

    async def load(chunk: int, group: int) -> None:
        order.append((group, chunk))

    outcome = await load_by_layers(load, 3, 2, watch, Progress())
    assert outcome == Outcome(3)
    assert order == sorted(order)
    assert watch.told == ["group 0", "group 1"]


async def test_a_fault_ends_the_chain_before_its_chunk() -> None:
    loaded, watch, progress = set(), Watch(), Progress()

    async def load(chunk: int, group: int) -> None:
        # Let the failure be noticed first, whichever chunk it concerns.
        await asyncio.sleep(0)
        if (chunk, group) == (2, 1):
            raise KvRejected(Reason.CORRUPT, "damaged")
        loaded.add((chunk, group))

    outcome = await load_by_layers(load, 4, 3, watch, progress)
    assert outcome == Outcome(2, Reason.CORRUPT)
    assert progress.chunks == 2
    assert {(chunk, group) for chunk in range(2) for group in range(3)} <= loaded
    assert watch.told == ["group 0", "cut"]


async def test_a_load_that_is_cancelled_keeps_whole_chunks() -> None:
    progress, blocked = Progress(), asyncio.Event()

    async def load(chunk: int, group: int) -> None:
        if (chunk, group) == (1, 1):
            blocked.set()
            await asyncio.Event().wait()

    await cancel_when(blocked, load_by_layers(load, 3, 2, Watch(), progress))
    assert progress.chunks == 1


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
async def test_a_wrong_object_ends_a_layered_load(
    tmp_path: Path, fault: Fault, reason: Reason
) -> None:
    server, chunks, watch = file_store(tmp_path), chain(1, 6), Watch()
    await engine(server.location).put_all(chunks)
    fault(server, chunks)
    reader, behind, counts = client(server.location)
    result = await reader.load(chunks, group_specs(), behind.deliver, context=0, watch=watch)
    assert (result.chunks, result.reason) == (3, reason)
    assert counts.not_loaded == {reason: 3}
    behind.assert_delivered(chunks[:3])
    # Faults of a manifest shorten the chain before a group comes.
    assert watch.told in (
        [6, "cut"],
        [6, "group 0", "cut"],
        [3, "group 0", "group 1"],
    )
    await reader.close()


async def test_chunks_of_one_object_come_as_a_whole(tmp_path: Path) -> None:
    server, chunks, watch = file_store(tmp_path), chain(1, 4), Watch()
    await engine(server.location, max_inline=MAX_INLINE).put_all(chunks)
    reader, behind, _ = client(server.location)
    result = await reader.load(chunks, group_specs(), behind.deliver, context=0, watch=watch)
    assert (result.chunks, result.reason) == (4, None)
    behind.assert_delivered(chunks)
    assert watch.told == [4]
    await reader.close()
