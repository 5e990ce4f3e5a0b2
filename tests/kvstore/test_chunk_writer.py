"""Writes of chunks whose layer groups come one after another."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tandem_kvstore import client as client_module
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.manifest import MAX_INLINE
from tandem_kvstore.format.tensors import LayerGroup
from tandem_kvstore.stores.files import FileStore

from .kv import Engine, chain, client, engine, group_specs, layer_groups
from .servers import Server, file_store


@dataclass
class Coming:
    """The groups of a chunk, of which the test sends one after another."""

    queue: asyncio.Queue[LayerGroup | None] = field(default_factory=asyncio.Queue)
    waits: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while a write waits for a group."""

    def __aiter__(self) -> AsyncIterator[LayerGroup]:
        return self

    async def __anext__(self) -> LayerGroup:
        self.waits.set()
        group = await self.queue.get()
        self.waits.clear()
        if group is None:
            raise StopAsyncIteration
        return group

    async def send(self, group: LayerGroup | None) -> None:
        """Send a group, and wait until the write asks for the next one."""
        await self.waits.wait()
        self.waits.clear()
        self.queue.put_nowait(group)
        if group is not None:
            await self.waits.wait()


async def names(behind: Engine) -> list[str]:
    return [info.name async for info in behind.objects.scan()]


async def until_written(behind: Engine, objects: int) -> None:
    async with asyncio.timeout(20):
        while len(await names(behind)) < objects:
            await asyncio.sleep(0.01)


@pytest.mark.component
async def test_a_group_is_written_when_it_comes_and_the_manifest_last(server: Server) -> None:
    (chunk,), behind, coming = chain(1, 1), engine(server.location), Coming()
    write = asyncio.create_task(behind.chunks.put(chunk, coming))
    for number, group in enumerate(layer_groups(chunk), 1):
        await coming.send(group)
        await until_written(behind, number)
        assert not await behind.chunks.has(chunk)
    await coming.send(None)
    assert await write
    assert (await behind.chunks.fetch([chunk], group_specs(), behind.deliver)).chunks == 1
    behind.assert_delivered([chunk])
    await behind.chunks.close()


@pytest.mark.component
async def test_a_write_that_is_given_up_is_invisible(server: Server) -> None:
    (chunk,), behind, coming = chain(1, 1), engine(server.location), Coming()
    write = asyncio.create_task(behind.chunks.put(chunk, coming))
    for group in layer_groups(chunk):
        await coming.send(group)
    write.cancel()
    await asyncio.wait([write])
    assert write.cancelled()
    assert not await behind.chunks.has(chunk)
    # What it left does not hinder the next writer, not even one of the same bytes.
    assert await behind.chunks.put(chunk, layer_groups(chunk))
    assert (await behind.chunks.fetch([chunk], group_specs(), behind.deliver)).chunks == 1
    await behind.chunks.close()


async def test_small_groups_that_come_one_by_one_are_one_object(tmp_path: Path) -> None:
    (chunk,), coming = chain(1, 1), Coming()
    behind = engine(file_store(tmp_path).location, max_inline=MAX_INLINE)
    write = asyncio.create_task(behind.chunks.put(chunk, coming))
    for group in layer_groups(chunk):
        await coming.send(group)
        assert await names(behind) == []
    await coming.send(None)
    assert await write
    assert await names(behind) == [chunk.key]
    assert (await behind.chunks.fetch([chunk], group_specs(), behind.deliver)).chunks == 1
    behind.assert_delivered([chunk])


@pytest.mark.parametrize("writes_whole", [False, True])
async def test_of_two_writers_the_first_to_end_is_read(
    tmp_path: Path, *, writes_whole: bool
) -> None:
    (chunk,), coming = chain(1, 1), Coming()
    behind = engine(file_store(tmp_path).location)
    write = asyncio.create_task(behind.chunks.put(chunk, coming))
    for group in layer_groups(chunk, writer=1):
        await coming.send(group)
    other: list[LayerGroup] | Coming = layer_groups(chunk, writer=2)
    if not writes_whole:
        other = Coming()
        for group in layer_groups(chunk, writer=2):
            other.queue.put_nowait(group)
        other.queue.put_nowait(None)
    assert await behind.chunks.put(chunk, other)
    await coming.send(None)
    assert not await write
    assert (await behind.chunks.fetch([chunk], group_specs(), behind.deliver)).chunks == 1
    behind.assert_delivered([chunk], writers=(2,))


async def test_a_failed_write_ends_before_the_next_group_comes(tmp_path: Path) -> None:
    (chunk,), coming = chain(1, 1), Coming()
    behind = engine(file_store(tmp_path).location)
    failed = asyncio.Event()

    async def put(name: str, parts: object) -> None:
        failed.set()
        raise ConnectionResetError

    behind.objects.put = put  # type: ignore[method-assign,assignment]
    write = asyncio.create_task(behind.chunks.put(chunk, coming))
    first, second = layer_groups(chunk)
    await coming.send(first)
    await failed.wait()
    coming.queue.put_nowait(second)
    with pytest.raises(ConnectionResetError):
        await write


@pytest.mark.parametrize(
    ("is_last_written", "is_late"),
    [
        pytest.param(False, True, id="awaited"),
        pytest.param(True, True, id="written-late"),
        pytest.param(True, False, id="store-stalls"),
    ],
)
async def test_a_chunk_whose_groups_come_slower_than_a_write_may_take_is_written_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_last_written: bool, is_late: bool
) -> None:
    """The deadline ends while a group is awaited, or while the manifest is written: after groups
    that came late, or because the store stalls."""
    (chunk,), coming = chain(1, 1), Coming()
    behind = engine(file_store(tmp_path).location)
    guarded, _, counts = client(file_store(tmp_path).location)
    deadlines: list[asyncio.Timeout] = []
    timeout = asyncio.timeout

    def recorded_timeout(_: float | None) -> asyncio.Timeout:
        deadlines.append(timeout(60))
        return deadlines[-1]

    # Half of it is the time after which groups are late.
    monkeypatch.setattr(client_module, "WRITE_SECONDS", 0.0 if is_late else 120.0)
    monkeypatch.setattr(client_module.asyncio, "timeout", recorded_timeout)
    begun, put_if = asyncio.Event(), FileStore.put_if

    async def first_stalls(store: FileStore, name: str, *rest: Any) -> None:
        if not begun.is_set():
            begun.set()
            await asyncio.Event().wait()
        await put_if(store, name, *rest)

    write = asyncio.create_task(guarded.store(chunk, coming))
    first, second = layer_groups(chunk)
    async with timeout(60):
        await coming.send(first)
        if is_last_written:
            monkeypatch.setattr(FileStore, "put_if", first_stalls)
            await coming.send(second)
            await coming.send(None)
            await begun.wait()
        coming.waits.clear()
        deadlines[0].reschedule(asyncio.get_running_loop().time())
        if not is_last_written:
            # This write ends, and the chunk waits for its other groups.
            await coming.send(second)
            assert not await behind.chunks.has(chunk)
            await coming.send(None)
        assert await write is is_late
    loaded = await behind.chunks.fetch([chunk], group_specs(), behind.deliver)
    assert loaded.chunks == int(is_late)
    # Groups that come slowly are no fault of the store.
    assert bool(counts.failures) is not is_late
    assert counts.not_stored == ({} if is_late else {Reason.TIMEOUT: 1})
    await guarded.close()
