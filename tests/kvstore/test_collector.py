"""The collector: a property test of the plan against a model, and real stores."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_kvstore import collector as collector_module
from tandem_kvstore.collector import Collector, Touches
from tandem_kvstore.errors import Reason, StoreDenied, StoreFull
from tandem_kvstore.format.collection import (
    LEASE,
    LOAD_SECONDS,
    TOUCH_PREFIX,
    WRITE_SECONDS,
    Bounds,
    Collection,
    Unreferenced,
    plan_collection,
)
from tandem_kvstore.stores import ObjectInfo
from tandem_kvstore.stores.base import UNFINISHED

from .gate import error, gate
from .kv import Engine, chain, engine, group_specs
from .servers import Server, file_store, small_disk, tandem_store, versitygw

KEYS = [f"{i:064x}" for i in range(6)]
BOUNDS = Bounds(capacity=1000, max_age=500.0, io_deadline=50.0)


async def fill(writer: Engine) -> None:
    """Write until not even a small object has room."""
    for size in (1 << 16, 1 << 12, 1):
        with suppress(StoreFull):
            for key in map("{:064x}".format, count()):
                await writer.objects.put(f"{key}-{size}", [bytes(size)])


def namespace() -> st.SearchStrategy[list[ObjectInfo]]:
    """Objects of some chunks, complete or not."""
    names = [name for key in KEYS for name in (key, f"{key}-00-aa", f"{key}-01-bb")]
    item = st.builds(
        ObjectInfo, st.sampled_from(names), st.integers(1, 400), st.integers(0, 1000).map(float)
    )
    return st.lists(item, unique_by=lambda info: info.name)


@given(
    namespace(),
    st.dictionaries(st.sampled_from(KEYS), st.integers(0, 1000).map(float)),
    st.integers(1000, 2000).map(float),
)
def test_the_plan_keeps_its_promises(
    objects: list[ObjectInfo], uses: dict[str, float], now: float
) -> None:
    plan = plan_collection(objects, uses, {}, BOUNDS, now=now, monotonic=5.0)
    manifests = {
        i.name: max(i.modified, uses.get(i.name, 0.0)) for i in objects if "-" not in i.name
    }
    kept = manifests.keys() - set(plan.manifests)
    # Nothing stays that is too old, and nothing leaves that was used after a chunk that stays.
    assert all(now - manifests[key] <= BOUNDS.max_age for key in kept)
    assert all(manifests[a] <= manifests[b] for a in plan.manifests for b in kept)
    # Data of a chunk that had its manifest until now is never deleted with it.
    assert not any(name[:64] in manifests for name in plan.data)
    # Nothing is deleted the first time that it is seen without a manifest.
    assert plan.data == ()
    size = sum(i.size for i in objects if i.name[:64] in kept)
    unreferenced = sum(i.size for i in objects if i.name[:64] not in manifests)
    if plan.size > BOUNDS.capacity and kept:
        assert size <= BOUNDS.capacity - unreferenced or size <= 0.9 * BOUNDS.capacity
    later = plan_collection(objects, uses, plan.unreferenced, BOUNDS, now=now + 51, monotonic=56.0)
    for info in objects:
        is_orphan = "-" in info.name and info.name[:64] not in manifests
        assert (info.name in later.data) == is_orphan


def test_data_that_is_written_again_waits_for_its_manifest() -> None:
    name = f"{KEYS[0]}-00-aa"
    seen = {name: Unreferenced(100.0, 90.0)}
    fresh = [ObjectInfo(name, 10, 190.0)]
    plan = plan_collection(fresh, {}, seen, BOUNDS, now=200.0, monotonic=200.0)
    assert plan.data == ()
    assert plan_collection(
        fresh, {}, plan.unreferenced, BOUNDS, now=251.0, monotonic=251.0
    ).data == (name,)


@pytest.mark.parametrize("step", [-1e6, 1e6])
def test_data_wait_as_long_when_the_stores_clock_is_set(step: float) -> None:
    name, now = f"{KEYS[0]}-00-aa", 1e9
    data = [ObjectInfo(name, 10, now)]
    plan = plan_collection(data, {}, {}, BOUNDS, now=now, monotonic=0.0)
    plan = plan_collection(data, {}, plan.unreferenced, BOUNDS, now=now + step, monotonic=40.0)
    assert plan.data == ()
    plan = plan_collection(data, {}, plan.unreferenced, BOUNDS, now=now + step, monotonic=60.0)
    assert plan.data == (name,)


def test_unfinished_objects_make_room_before_chunks_do() -> None:
    chunks = [ObjectInfo(key, 100, 10_000.0) for key in KEYS]
    left = ObjectInfo(f"{UNFINISHED}x", 1000, 0.0)
    plan = plan_collection([*chunks, left], {}, {}, BOUNDS, now=10_000.0, monotonic=0.0)
    assert plan.unfinished == (left.name,)
    assert plan.manifests == ()


def test_what_the_store_refuses_to_delete_makes_no_room() -> None:
    chunks = [ObjectInfo(key, 160, 10_000.0) for key in KEYS[:5]]
    kept = ObjectInfo(f"{KEYS[5]}-00-aa", 600, 0.0)
    plan = plan_collection(
        [*chunks, kept], {}, {}, BOUNDS, now=10_000.0, monotonic=100.0, kept={kept.name}
    )
    assert plan.data == ()
    # 1,400 bytes are stored, and 900 may be.
    assert len(plan.manifests) == 4


@pytest.mark.component
async def test_a_namespace_stays_within_its_capacity(server: Server) -> None:
    old, young, used = chain(1, 2), chain(2, 2), chain(3, 1)
    client = engine(server.location)
    await client.put_all([*used, *old, *young])
    size = sum([info.size async for info in client.objects.scan()])
    touches = Touches(client.objects)
    touches.add([chunk.key for chunk in used])
    await touches.flush()
    bounds = Bounds(capacity=size - 1, max_age=1e9, io_deadline=-1.0)
    collector = Collector(client.objects, lambda: bounds)
    plan = await collector.collect(now=0.0)
    assert plan is not None
    assert plan.manifests
    assert used[0].key not in plan.manifests
    # A reader that has the manifest still gets the data.
    assert plan.data == ()
    # The next rounds delete the data.
    for now in (1.0, 2.0):
        await collector.collect(now=now)
    names = [info.name async for info in client.objects.scan()]
    assert not any(name[:64] in plan.manifests for name in names)
    # Capacity is kept, and what stays can be loaded.
    left = [c for c in (*used, *old, *young) if c.key not in plan.manifests]
    assert sum([info.size async for info in client.objects.scan()]) < size
    assert used[0] in left
    manifests, outcome = await client.chunks.find(used)
    assert outcome.reason is None
    assert (await client.chunks.load(manifests, group_specs(), client.deliver)).chunks == 1
    await client.chunks.close()


@pytest.mark.component
@pytest.mark.parametrize("record", [b'["\xff"]', b" " * (5 << 20)])
async def test_a_touch_record_that_cannot_be_read_is_left_out(
    tmp_path: Path, record: bytes
) -> None:
    server, bounds = file_store(tmp_path), Bounds(capacity=1, max_age=1e9)
    writer = engine(server.location)
    await writer.put_all(chain(1, 2))
    await writer.objects.put(f"{TOUCH_PREFIX}another.1", [record])
    plan = await Collector(writer.objects, lambda: bounds).collect()
    assert plan is not None
    assert len(plan.manifests) == 2


@pytest.mark.component
@pytest.mark.parametrize("denied", [1, 3, 4])
async def test_locked_objects_do_not_stop_the_collector(
    tmp_path: Path, versitygw_program: None, monkeypatch: pytest.MonkeyPatch, denied: int
) -> None:
    monkeypatch.setattr(collector_module, "_DENIALS", 3)
    chunks = chain(1, 8)
    locked = {chunk.key for chunk in chunks[:denied]}

    deletions: list[str] = []

    def refuse(request: web.Request) -> web.Response | None:
        name = request.path.rpartition("/")[2]
        if request.method == "DELETE":
            deletions.append(name)
        is_locked = request.method == "DELETE" and name in locked
        return error(403, "AccessDenied") if is_locked else None

    async with versitygw(tmp_path) as server, gate(server.location, refuse) as between:
        writer = engine(between.location)
        await writer.put_all(chunks)
        bounds = Bounds(capacity=1, max_age=1e9, io_deadline=-1.0)
        collector = Collector(writer.objects, lambda: bounds)
        # Three refusals in a row end a round: there may be no right to delete. The next round
        # leaves those objects alone.
        for _ in range(2):
            with suppress(StoreDenied):
                await collector.collect()
        names = {info.name async for info in writer.objects.scan()}
        assert names.intersection(chunk.key for chunk in chunks) == locked
        deletions.clear()
        assert await collector.collect() is not None
        assert not locked.intersection(deletions)
        # Without any right to delete, a round asks for three objects only.
        more = chain(2, 8)
        await writer.put_all(more)
        locked.update(chunk.key for chunk in more)
        deletions.clear()
        with pytest.raises(StoreDenied):
            await collector.collect()
        assert len(deletions) == 3


@pytest.mark.component
@pytest.mark.parametrize("start", [versitygw, tandem_store])
async def test_a_store_that_is_full_is_collected(
    tmp_path: Path,
    start: Callable[..., AbstractAsyncContextManager[Server]],
    versitygw_program: None,
) -> None:
    bounds = Bounds(capacity=1, max_age=1e9, io_deadline=-1.0)
    directory = tmp_path / "objects"
    async with start(directory, within=small_disk(directory)) as server:
        writer = engine(server.location)
        removed: list[str] = []
        first, second = (
            Collector(writer.objects, lambda: bounds, on_removed=removed.extend) for _ in range(2)
        )
        assert await first.collect() is not None
        await fill(writer)
        assert await first.collect() is not None
        await fill(writer)
        assert await second.collect(now=0.0) is None
        # It takes the lease over.
        assert await second.collect(now=1000.0) is not None
        await writer.put_all(chain(2, 1))
        await writer.objects.delete(LEASE)
        await fill(writer)
        removed.clear()
        # A manifest makes room for the first lease of a namespace.
        assert await first.collect() is not None
        assert removed[0] == chain(2, 1)[0].key
        await writer.put_all(chain(1, 1))
        await writer.chunks.close()


@pytest.mark.component
async def test_a_reader_keeps_what_it_is_reading(server: Server) -> None:
    chunks, client = chain(1, 3), engine(server.location)
    await client.put_all(chunks)
    manifests, _ = await client.chunks.find(chunks)
    collector = Collector(client.objects, lambda: Bounds(capacity=1, max_age=1e9))
    plan = await collector.collect(now=0.0)
    assert isinstance(plan, Collection)
    assert len(plan.manifests) == 3
    await collector.collect(now=1.0)
    assert (await client.chunks.load(manifests, group_specs(), client.deliver)).chunks == 3
    client.assert_delivered(chunks)
    assert (await client.chunks.find(chunks))[1].reason is Reason.MISSING
    await client.chunks.close()


@pytest.mark.component
async def test_one_collector_is_elected_and_replaced_when_it_stops(server: Server) -> None:
    client = engine(server.location)
    await client.put_all(chain(1, 1))
    bounds = Bounds(capacity=10**9, max_age=1e9)
    first, second = (Collector(client.objects, lambda: bounds, lease=60.0) for _ in range(2))
    assert await first.collect(now=0.0) is not None
    assert await second.collect(now=5.0) is None
    assert await first.collect(now=50.0) is not None
    # The lease was renewed: its duration counts from when the second saw the renewal.
    assert await second.collect(now=64.0) is None
    assert await second.collect(now=100.0) is None
    assert await second.collect(now=125.0) is not None
    assert await first.collect(now=126.0) is None
    await client.chunks.close()


DEADLINE = Bounds(capacity=1, max_age=1e9)


class Simulation:
    """A namespace in which nothing may stay, two collectors that take turns, and writers, on one
    clock. A reader reads each manifest at the last moment before it is deleted."""

    def __init__(self, io_deadline: float) -> None:
        self.now = 1000.0
        self.bounds = replace(DEADLINE, io_deadline=io_deadline)
        self.objects: dict[str, float] = {}
        self.manifests_to_come: list[tuple[float, str]] = []
        self.readers: list[tuple[float, tuple[str, ...]]] = []
        self.collector = 0
        self.unreferenced: Mapping[str, Unreferenced] = {}

    def data_of(self, key: str) -> tuple[str, ...]:
        return f"{key}-00-aa", f"{key}-01-bb"

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        for at, key in sorted(self.manifests_to_come):
            if at <= end:
                self.objects[key] = at
                self.manifests_to_come.remove((at, key))
        self.now = end

    def write(self, key: str, seconds: float) -> None:
        """Write data now, and their manifest after at most WRITE_SECONDS."""
        self.objects |= dict.fromkeys(self.data_of(key), self.now)
        self.manifests_to_come.append((self.now + min(seconds, WRITE_SECONDS), key))

    def collect(self, collector: int) -> None:
        # As `Collector` does when it takes the lease of another one.
        if collector != self.collector:
            self.collector, self.unreferenced = collector, {}
        objects = [ObjectInfo(name, 10, modified) for name, modified in self.objects.items()]
        now = self.now
        plan = plan_collection(objects, {}, self.unreferenced, self.bounds, now=now, monotonic=now)
        for key in plan.manifests:
            self.readers.append((self.now + LOAD_SECONDS, self.data_of(key)))
        for name in (*plan.manifests, *plan.data):
            del self.objects[name]
        self.unreferenced = plan.unreferenced

    def is_lost(self) -> bool:
        """Whether data are gone that a reader reads now, or that a manifest to come names."""
        read = [names for end, names in self.readers if end >= self.now]
        written = [self.data_of(key) for _, key in self.manifests_to_come]
        return any(name not in self.objects for names in read + written for name in names)


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "collect", "collect"]),
            st.integers(0, 1),
            st.sampled_from([0.0, 60.0, 110.0, 301.0]),
        ),
        min_size=10,
        max_size=40,
    )
)
def test_no_reader_loses_what_it_reads_whatever_writers_and_collectors_do(
    actions: list[tuple[str, int, float]],
) -> None:
    simulation = Simulation(DEADLINE.io_deadline)
    for action, number, seconds in actions:
        if action == "write":
            simulation.write(KEYS[0], seconds)
        for _ in range(6):
            if action == "collect":
                simulation.collect(number)
            simulation.wait(seconds / 6)
            assert not simulation.is_lost()
    # And everything leaves.
    simulation.wait(WRITE_SECONDS)
    for _ in range(3):
        simulation.collect(0)
        simulation.wait(301.0)
    assert simulation.objects == {}


@pytest.mark.parametrize(
    ("manifest_after", "needed"), [(0.0, LOAD_SECONDS), (WRITE_SECONDS, WRITE_SECONDS)]
)
def test_a_deadline_shorter_than_a_load_or_a_write_loses_data(
    manifest_after: float, needed: float
) -> None:
    def is_lost(io_deadline: float) -> bool:
        simulation = Simulation(io_deadline)
        simulation.write(KEYS[0], manifest_after)
        simulation.wait(0.0)
        for second in range(400):
            simulation.collect(0)
            if simulation.is_lost():
                return True
            # The second round sees at once what the first one has deleted.
            simulation.wait(1.0 if second else 0.0)
        return False

    assert is_lost(needed - 1.0)
    assert not is_lost(max(needed, LOAD_SECONDS))
    assert DEADLINE.io_deadline > needed
