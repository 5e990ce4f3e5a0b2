"""What serves an engine goes on after any error, and ends when the engine does."""

import asyncio
import logging
from pathlib import Path

import pytest

from tandem_kvstore import maintenance
from tandem_kvstore.chunk_store import ChunkStore
from tandem_kvstore.client import StoreClient
from tandem_kvstore.collector import Collector
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.collection import LEASE, Bounds
from tandem_kvstore.format.tensors import Buffer
from tandem_kvstore.guard.breaker import Breaker, BreakerSettings, BreakerState
from tandem_kvstore.health import PROBE_NAME, StoreHealth
from tandem_kvstore.location import store_location
from tandem_kvstore.maintenance import Maintenance
from tandem_kvstore.stores import open_store
from tandem_kvstore.stores.base import TaggedObject
from tandem_kvstore.stores.files import FileStore

from ..epp.real import until
from .kv import CHUNK_TOKENS, IDENTITY, Counts, chain, engine
from .servers import file_store


class DefectiveStore(FileStore):
    """A directory whose first request raises an error that no store raises."""

    is_defective = True

    def _fail_once(self) -> None:
        if self.is_defective:
            self.is_defective = False
            raise RuntimeError("a defect")

    async def get(self, name: str, limit: int, *, is_cut: bool = False) -> Buffer:
        self._fail_once()
        return await super().get(name, limit, is_cut=is_cut)

    async def get_tagged(self, name: str, limit: int) -> TaggedObject:
        self._fail_once()
        return await super().get_tagged(name, limit)


async def test_the_collector_outlives_a_defect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector(DefectiveStore(tmp_path), lambda: Bounds(1, 1.0))
    task = asyncio.create_task(collector.run(0.01))

    async def has_lease() -> bool:
        return (tmp_path / LEASE).exists()

    with caplog.at_level(logging.ERROR):
        await until(has_lease)
    assert "a defect" in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("size", [0, 5000])
async def test_probes_outlive_a_defect_and_an_object_of_their_name(
    tmp_path: Path, size: int
) -> None:
    (tmp_path / PROBE_NAME).write_bytes(bytes(size))
    breaker = Breaker(BreakerSettings(failures=1, cool_down=0.01))
    health = StoreHealth(breaker, DefectiveStore(tmp_path), Counts())
    health.record_failure("the store is down")

    async def is_closed() -> bool:
        return breaker.state is BreakerState.CLOSED

    await until(is_closed)
    await health.close()


async def test_an_engine_that_stops_does_not_wait_for_a_store_that_stalls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped = asyncio.Event()

    async def stall(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stopped.wait()
        writer.close()

    monkeypatch.setattr(maintenance, "LAST_RECORD_SECONDS", 0.1)
    async with await asyncio.start_server(stall, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        objects = open_store(store_location(f"http://127.0.0.1:{port}", "kv", timeout=600.0))
        work = Maintenance(objects, lambda: Bounds(1, 1.0))
        work.touches.add(["key"])
        async with asyncio.timeout(120.0):
            await work.close()
        stopped.set()
        await objects.close()


async def test_a_look_up_with_a_defect_finds_nothing(tmp_path: Path) -> None:
    location, chunks = file_store(tmp_path).location, chain(1, 2)
    writer = engine(location)
    await writer.put_all(chunks)
    objects = DefectiveStore(location.directory)
    store = ChunkStore(objects, location, IDENTITY)
    client = StoreClient(store, objects, Counts(), chunk_tokens=CHUNK_TOKENS, chunk_bytes=1)
    assert await client.find(chunks) == (0, Reason.OTHER)
    assert await client.find(chunks) == (2, None)
    await client.close()
