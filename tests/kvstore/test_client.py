"""The client's choices: what it asks a store for, and when."""

import asyncio
from pathlib import Path

import pytest

from tandem_kvstore.errors import Reason
from tandem_kvstore.format.collection import LOAD_SECONDS

from .kv import chain, client, engine, group_specs
from .servers import file_store


async def test_kv_that_was_just_stored_is_loaded_although_it_was_missing_before(
    tmp_path: Path,
) -> None:
    location, chunks = file_store(tmp_path).location, chain(1, 3)
    reader, behind, _ = client(location)
    assert (await reader.load(chunks, group_specs(), behind.deliver, 0)).reason is Reason.MISSING
    assert await reader.find(chunks) == (0, Reason.MISSING)
    writer = engine(location)
    await writer.put_all(chunks)
    await writer.chunks.close()
    # A request without a hand-off believes the miss for some seconds.
    assert (await reader.load(chunks, group_specs(), behind.deliver, 0)).chunks == 0
    assert await reader.find(chunks) == (3, None)
    result = await reader.load(chunks, group_specs(), behind.deliver, 0, limit=60.0)
    assert (result.chunks, result.reason) == (3, None)
    await reader.close()


async def test_a_hand_off_loads_what_computing_would_be_faster_for(tmp_path: Path) -> None:
    location, chunks = file_store(tmp_path).location, chain(1, 3)
    writer = engine(location)
    await writer.put_all(chunks)
    await writer.chunks.close()
    reader, behind, _ = client(location, compute=1e-9)
    quick = await reader.load(chunks, group_specs(), behind.deliver, 0)
    assert quick.reason is Reason.UNPROFITABLE
    assert (await reader.load(chunks, group_specs(), behind.deliver, 0, limit=60.0)).chunks == 3
    await reader.close()


async def test_an_open_breaker_ends_hand_offs_at_once(tmp_path: Path) -> None:
    reader, behind, _ = client(file_store(tmp_path).location)
    for _attempt in range(5):
        reader.guard.breaker.record_failure(0.0)
    result = await reader.load(chain(1, 3), group_specs(), behind.deliver, 0, limit=60.0)
    assert result.reason is Reason.BREAKER_OPEN
    assert await reader.find(chain(1, 3)) == (0, Reason.BREAKER_OPEN)
    await reader.close()


async def test_a_load_ends_before_the_collector_may_delete_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, chunks = file_store(tmp_path).location, chain(1, 3)
    writer = engine(location)
    await writer.put_all(chunks)
    await writer.chunks.close()
    timeout, loads = asyncio.timeout, list[asyncio.Timeout]()

    def recorded_timeout(seconds: float | None) -> asyncio.Timeout:
        deadline = timeout(seconds)
        if seconds == LOAD_SECONDS:
            loads.append(deadline)
        return deadline

    monkeypatch.setattr(asyncio, "timeout", recorded_timeout)

    async def deliver(_: int, __: str, ___: list[memoryview]) -> None:
        if not loads[0].expired():
            loads[0].reschedule(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    reader, _, _ = client(location)
    # An hour: of a user's time limit of hand-offs, or half of what a slow engine computes.
    result = await reader.load(chunks, group_specs(), deliver, 0, limit=3600.0)
    assert (result.chunks, result.reason) == (0, Reason.TIMEOUT)
    await reader.close()
