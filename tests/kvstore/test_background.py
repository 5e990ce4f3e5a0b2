"""What runs in the background of an engine goes on after any error."""

import asyncio
import logging
from pathlib import Path

import pytest

from tandem_kvstore.collector import Collector
from tandem_kvstore.format.collection import LEASE, Bounds
from tandem_kvstore.format.tensors import Buffer
from tandem_kvstore.guard.breaker import Breaker, BreakerSettings, BreakerState
from tandem_kvstore.health import PROBE_NAME, StoreHealth
from tandem_kvstore.stores.base import TaggedObject
from tandem_kvstore.stores.files import FileStore

from ..epp.real import until
from .kv import Counts


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
