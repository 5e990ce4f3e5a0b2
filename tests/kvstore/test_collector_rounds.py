"""Rounds of a collector that last longer than its lease, or in which its process is paused."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem_kvstore import collector
from tandem_kvstore.collector import Collector
from tandem_kvstore.format.collection import TOUCH_PREFIX, Bounds
from tandem_kvstore.format.tensors import Buffer
from tandem_kvstore.stores import ObjectInfo, files
from tandem_kvstore.stores.files import FileStore

from .kv import chain, engine
from .servers import file_store

NOTHING_STAYS = Bounds(capacity=1, max_age=1e9, io_deadline=-1.0)
LEASE = 60.0


async def _nothing() -> None:
    pass


class SlowStore(FileStore):
    """A directory with a clock; `on_listed` runs at the end of each listing."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.now = 0.0
        self.seconds_of_a_delete = self.seconds_of_a_listed_object = 0.0
        self.on_record: Callable[[], Awaitable[None]] = _nothing
        self.on_delete: Callable[[], Awaitable[None]] = _nothing
        self.on_listed: Callable[[], Awaitable[None]] = _nothing

    async def scan(self) -> AsyncIterator[ObjectInfo]:
        async for info in super().scan():
            yield info
        await self.on_listed()

    def listing(self) -> Iterator[ObjectInfo]:
        for info in super().listing():
            self.now += self.seconds_of_a_listed_object
            yield info

    async def get(self, name: str, limit: int, *, is_cut: bool = False) -> Buffer:
        if name.startswith(TOUCH_PREFIX):
            await self.on_record()
        return await super().get(name, limit, is_cut=is_cut)

    async def delete(self, name: str) -> None:
        self.now += self.seconds_of_a_delete
        await self.on_delete()
        await super().delete(name)


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    """With four chunks."""
    server = file_store(tmp_path)
    client = engine(server.location)
    await client.put_all(chain(1, 4))
    store = SlowStore(server.directory)
    monkeypatch.setattr(collector, "time", SimpleNamespace(monotonic=lambda: store.now))
    return store


def collectors(store: SlowStore) -> list[Collector]:
    """Two; only the first one deletes data at once."""
    bounds = NOTHING_STAYS, replace(NOTHING_STAYS, io_deadline=300.0)
    return [Collector(store, lambda b=b: b, lease=LEASE) for b in bounds]  # type: ignore[misc]


async def test_a_long_round_keeps_the_lease(store: SlowStore) -> None:
    first, second = collectors(store)
    store.seconds_of_a_delete = 25.0

    async def look() -> None:
        assert await second.collect() is None

    store.on_delete = look
    plan = await first.collect()
    assert plan is not None
    assert len(plan.manifests) == 4
    assert store.now > LEASE
    assert not [info for info in store.entries() if len(info.name) == 64]


async def test_a_listing_that_takes_long_keeps_the_lease(
    store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LISTED_AT_ONCE", 4)
    first, _ = collectors(store)
    store.seconds_of_a_listed_object = LEASE / 5
    plan = await first.collect()
    assert plan is not None
    assert len(plan.manifests) == 4


async def test_a_round_that_reads_many_records_keeps_the_lease(store: SlowStore) -> None:
    first, second = collectors(store)
    assert await first.collect() is not None
    # The second process knows this lease: it takes over when it has not changed for a minute.
    assert await second.collect() is None
    for number in range(4):
        await store.put(f"{TOUCH_PREFIX}writer.{number}", (b"[]",))

    async def look() -> None:
        store.now += 25.0
        assert await second.collect() is None

    store.on_record = look
    assert await first.collect() is not None
    assert store.now > LEASE


async def test_data_that_are_written_again_after_the_listing_stay(store: SlowStore) -> None:
    first, _ = collectors(store)
    assert await first.collect() is not None
    again, *others = (info.name for info in store.entries() if len(info.name) > 64)

    async def write_again() -> None:
        later = store.entry(again).modified + 300.0
        os.utime(store.directory / again, (later, later))

    store.on_listed = write_again
    plan = await first.collect()
    assert plan is not None
    assert {again, *others} == set(plan.data)
    names = {info.name for info in store.entries()}
    assert again in names
    assert not names.intersection(others)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_process_that_was_paused_deletes_nothing(
    store: SlowStore, is_replaced: bool
) -> None:
    first, second = collectors(store)
    assert await first.collect() is not None
    data = [info.name for info in store.entries() if len(info.name) > 64]
    assert len(data) == 8

    async def pause() -> None:
        store.on_listed = _nothing
        if is_replaced:
            assert await second.collect() is None
        store.now += LEASE + 1.0
        if is_replaced:
            assert await second.collect() is not None

    store.on_listed = pause
    assert await first.collect() is None
    assert {info.name for info in store.entries()} >= set(data)
