"""Stores without conditional writes: two writers, and the election of a collector.

versitygw without its metadata ignores If-None-Match and has no ETag; `tandem store` answers as a
store that refuses conditions, or that ignores them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tandem_kvstore.collector import Collector
from tandem_kvstore.errors import StoreDenied, StoreUnsupported
from tandem_kvstore.format.collection import Bounds
from tandem_kvstore.probe import probe_store

from .gate import deny_conditions, gate, refuse_conditions
from .kv import chain, engine, group_specs, layer_groups
from .servers import Server, store_in_this_process, tandem_store, versitygw

pytestmark = pytest.mark.component

BOUNDS = Bounds(capacity=10**9, max_age=1e9)


@pytest.fixture(params=["refuse", "ignore", "s3"])
async def unconditional(
    request: pytest.FixtureRequest, tmp_path: Path, versitygw_program: None
) -> AsyncIterator[Server]:
    """A running, empty store without conditional writes."""
    async with AsyncExitStack() as stack:
        if request.param == "s3":
            start = versitygw(tmp_path, posix=("--nometa",))
        else:
            start = tandem_store(tmp_path, "--no-conditional", request.param)
        yield await stack.enter_async_context(start)


async def test_the_last_of_two_writers_counts_and_they_are_not_mixed(
    unconditional: Server,
) -> None:
    chunks, first, second = chain(1, 4), *(engine(unconditional.location) for _ in range(2))
    await asyncio.gather(first.put_all(chunks, writer=1), second.put_all(chunks, writer=2))
    assert (await first.chunks.fetch(chunks, group_specs(), first.deliver)).chunks == 4
    first.assert_delivered(chunks, writers=(1, 2))
    # A reader that has the first writer's manifest still finds the data that it names.
    manifests, _ = await first.chunks.find(chunks)
    assert await second.chunks.put(chunks[0], layer_groups(chunks[0], writer=3))
    assert (await first.chunks.load(manifests, group_specs(), first.deliver)).chunks == 4
    first.assert_delivered(chunks, writers=(1, 2))
    # Who looks up the chunk from now on gets the last writer's.
    await first.chunks.fetch(chunks[:1], group_specs(), first.deliver)
    first.assert_delivered(chunks[:1], writers=(3,))
    for client in (first, second):
        await client.chunks.close()


async def test_collectors_that_start_together_end_with_one(unconditional: Server) -> None:
    client = engine(unconditional.location)
    await client.put_all(chain(1, 1))
    collectors = [Collector(client.objects, lambda: BOUNDS, lease=60.0) for _ in range(3)]
    for now in (0.0, 20.0, 40.0):
        plans = await asyncio.gather(*(collector.collect(now=now) for collector in collectors))
        if now:
            assert sum(plan is not None for plan in plans) == 1
    await client.chunks.close()


async def test_a_collector_that_stopped_is_replaced(unconditional: Server) -> None:
    client = engine(unconditional.location)
    await client.put_all(chain(1, 1))
    first, second = (Collector(client.objects, lambda: BOUNDS, lease=60.0) for _ in range(2))
    await first.collect(now=0.0)
    assert await second.collect(now=5.0) is None
    assert await first.collect(now=50.0) is not None
    # The lease was renewed: its duration counts from when the second saw the renewal.
    assert await second.collect(now=64.0) is None
    assert await second.collect(now=100.0) is None
    await second.collect(now=125.0)
    assert await first.collect(now=126.0) is None
    assert await second.collect(now=127.0) is not None
    await client.chunks.close()


async def test_the_probe_says_what_is_missing(unconditional: Server) -> None:
    result = await probe_store(unconditional.location)
    assert (result.works, result.is_limited) == (True, True)
    assert result.detail.startswith("reads and writes, but lacks conditional writes")
    assert "#stores-without-conditional-writes" in result.fix


async def test_an_s3_store_that_answers_501_to_a_condition_is_known_as_such(
    tmp_path: Path, versitygw_program: None
) -> None:
    async with versitygw(tmp_path) as server, gate(server.location, refuse_conditions) as front:
        client = engine(front.location)
        with pytest.raises(StoreUnsupported):
            await client.objects.put_if("object", (b"data",), None)
        (chunk,) = chain(1, 1)
        assert await client.chunks.put(chunk, layer_groups(chunk, writer=1))
        assert await client.chunks.put(chunk, layer_groups(chunk, writer=2))
        assert (await client.chunks.fetch([chunk], group_specs(), client.deliver)).chunks == 1
        client.assert_delivered([chunk], writers=(2,))
        await client.chunks.close()


@pytest.mark.parametrize("protocol", ["http", "s3"])
async def test_a_store_that_denies_conditions_is_used_without_them(
    tmp_path: Path, versitygw_program: None, protocol: str
) -> None:
    start = store_in_this_process if protocol == "http" else versitygw
    async with start(tmp_path) as server, gate(server.location, deny_conditions) as front:
        result = await probe_store(front.location)
        assert (result.works, result.is_limited) == (True, True)
        assert result.detail == (
            "reads and writes, but lacks the right to write with If-None-Match"
        )
        assert "without a condition on s3:if-none-match" in result.fix
        assert "of two writers the last one counts" in result.fix
        client, (chunk,) = engine(front.location), chain(1, 1)
        with pytest.raises(StoreDenied):
            await client.objects.put_if("object", (b"data",), None)
        for writer in (1, 2):
            assert await client.chunks.put(chunk, layer_groups(chunk, writer=writer))
        await client.chunks.fetch([chunk], group_specs(), client.deliver)
        client.assert_delivered([chunk], writers=(2,))
        collector = Collector(client.objects, lambda: BOUNDS)
        assert [await collector.collect() is not None for _ in range(3)] == [False, True, True]
        await client.chunks.close()
