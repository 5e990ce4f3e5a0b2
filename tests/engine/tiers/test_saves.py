"""Chunks that are saved layer group by layer group while a step computes them."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tandem_engine.engine import Engine, Generation
from tandem_engine.tiers import chunk_memory, saves
from tandem_engine.tiers.chunk_memory import ChunkMemory
from tandem_engine.tiers.step_layers import StepLayers
from tandem_kvstore.client import StoreClient
from tandem_kvstore.errors import StoreUnavailable
from tandem_kvstore.format import manifest
from tandem_kvstore.format.collection import WRITE_SECONDS
from tandem_kvstore.format.tensors import Buffer
from tandem_kvstore.stores.files import FileStore

from ..engines import Tally, all_free, expected, finish, prompt, running, until
from ..test_handoff import Pair
from ..test_streams import LONG, decode, prefill
from .asking import CHUNK, CHUNKS, LENGTH, ask, storage, submit

pytestmark = pytest.mark.long

_CHUNK_BYTES = 2 * 2 * CHUNK * 2 * 16 * 8
"""Layers, keys and values, tokens, heads, their width, bytes of float64."""


@pytest.fixture(autouse=True)
def layer_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer in each group, in data objects of their own, as those of large models."""
    monkeypatch.setattr(chunk_memory, "_GROUP_BYTES", 1)
    monkeypatch.setattr(manifest, "MAX_INLINE", 0)


@dataclass
class StepGate:
    """Holds the first step that saves after its first layer, until `opened`."""

    opened: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    """Set when the first layer is computed."""


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepGate]:
    gate, on_layer = StepGate(), StepLayers.on_layer

    def held(layers: StepLayers, count: int) -> None:
        on_layer(layers, count)
        gate.reached.set()
        assert gate.opened.wait(60)

    monkeypatch.setattr(StepLayers, "on_layer", held)
    yield gate
    gate.opened.set()


@dataclass
class StoreGate:
    """Holds writes of data objects until `opened`."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch) -> StoreGate:
    gate, put = StoreGate(), FileStore.put

    async def held(files: FileStore, name: str, parts: Sequence[Buffer]) -> None:
        gate.asked.append(name)
        await gate.opened.wait()
        await put(files, name, parts)

    monkeypatch.setattr(FileStore, "put", held)
    return gate


def manifests(directory: Path) -> int:
    return len(list(directory.rglob("?" * 64)))


def data_objects(directory: Path, group: str) -> int:
    return len(list(directory.rglob(f"*-{group}-*")))


async def assert_stored(directory: Path, tokens: tuple[int, ...], chunks: int) -> None:
    """An engine answers from `chunks` stored chunks of the prompt as if it had computed them."""
    tally = Tally()
    async with running(tally, kv_storage=storage(directory)) as engine:
        await ask(engine, tokens)
    assert tally.counts["storage_loaded"] == chunks * CHUNK


async def first_layers_written(engine: Engine, directory: Path, step: StepGate) -> Generation:
    """A request whose step is held when the first layer of its chunks is in the store."""
    generation = submit(engine, prompt(LENGTH))
    await until(lambda: data_objects(directory, "000") == CHUNKS)
    # The step's thread gives the layer to the store first.
    await until(step.reached.is_set)
    return generation


async def test_layers_are_written_while_the_step_computes_later_ones(
    tmp_path: Path, step: StepGate
) -> None:
    tally = Tally()
    settings = storage(tmp_path, host_bytes=1 << 30)
    async with running(tally, kv_storage=settings) as engine, asyncio.timeout(60):
        generation = await first_layers_written(engine, tmp_path, step)
        assert data_objects(tmp_path, "001") == manifests(tmp_path) == 0
        assert tally.counts["host_stored"] == 0
        step.opened.set()
        answer, _ = await finish(generation)
        assert answer == expected(prompt(LENGTH), 8)
    assert tally.counts["storage_stored"] == tally.counts["host_stored"] == CHUNKS * CHUNK
    await assert_stored(tmp_path, prompt(LENGTH), CHUNKS)


async def test_a_step_that_lasts_longer_than_a_write_may_take_is_stored(
    tmp_path: Path, step: StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout, writes = asyncio.timeout, list[asyncio.Timeout]()

    def recorded_timeout(seconds: float | None) -> asyncio.Timeout:
        deadline = timeout(seconds)
        if seconds == WRITE_SECONDS:
            writes.append(deadline)
        return deadline

    monkeypatch.setattr(asyncio, "timeout", recorded_timeout)
    tally = Tally()
    async with running(tally, kv_storage=storage(tmp_path)) as engine, timeout(60):
        generation = await first_layers_written(engine, tmp_path, step)
        for write in writes:
            write.reschedule(asyncio.get_running_loop().time())
        await until(lambda: all(write.expired() for write in writes))
        assert manifests(tmp_path) == 0
        step.opened.set()
        await finish(generation)
    assert len(writes) == 2 * CHUNKS
    assert tally.counts["storage_stored"] == CHUNKS * CHUNK
    assert not tally.failures
    await assert_stored(tmp_path, prompt(LENGTH), CHUNKS)


async def test_chunks_that_several_steps_compute(tmp_path: Path) -> None:
    settings = storage(tmp_path)
    async with running(kv_storage=settings, max_num_batched_tokens=48) as engine:
        await ask(engine, prompt(LENGTH))
    await assert_stored(tmp_path, prompt(LENGTH), CHUNKS)


@pytest.mark.parametrize("layer", [1, 2])
async def test_a_step_that_fails_leaves_nothing_that_a_reader_sees(
    tmp_path: Path, step: StepGate, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    held = StepLayers.on_layer

    def failing(layers: StepLayers, count: int) -> None:
        held(layers, count)
        if count == layer:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(StepLayers, "on_layer", failing)
    tally = Tally()
    settings = storage(tmp_path, host_bytes=1 << 30)
    async with running(tally, kv_storage=settings) as engine, asyncio.timeout(60):
        generation = await first_layers_written(engine, tmp_path, step)
        step.opened.set()
        _, last = await finish(generation)
        assert last.finish_reason == "error"
        await until(lambda: all_free(engine))
    assert manifests(tmp_path) == 0
    assert tally.counts["host_stored"] == tally.counts["storage_stored"] == 0
    monkeypatch.setattr(StepLayers, "on_layer", held)
    await assert_stored(tmp_path, prompt(LENGTH), 0)


async def test_an_aborted_request_leaves_nothing_that_a_reader_sees(
    tmp_path: Path, step: StepGate
) -> None:
    tally = Tally()
    settings = storage(tmp_path, host_bytes=1 << 30)
    async with running(tally, kv_storage=settings) as engine, asyncio.timeout(60):
        generation = await first_layers_written(engine, tmp_path, step)
        engine.abort("a")
        _, last = await finish(generation)
        assert last.finish_reason == "abort"
        step.opened.set()
        await until(lambda: all_free(engine))
        assert manifests(tmp_path) == 0
        assert tally.counts["host_stored"] == 0
        # What it left does not hinder the next request.
        await ask(engine, prompt(LENGTH), "b")
    await assert_stored(tmp_path, prompt(LENGTH), CHUNKS)


async def test_one_of_two_requests_for_a_chunk_is_aborted(
    tmp_path: Path, step: StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither is loaded, so that both are in one step.
    monkeypatch.setattr(StoreClient, "may_have", lambda *_: False)
    async with running(kv_storage=storage(tmp_path)) as engine, asyncio.timeout(60):
        first = submit(engine, prompt(LENGTH), "a")
        second = submit(engine, prompt(LENGTH), "b")
        await until(lambda: data_objects(tmp_path, "000") == CHUNKS)
        engine.abort("a")
        step.opened.set()
        assert (await finish(first))[1].finish_reason == "abort"
        assert (await finish(second))[0] == expected(prompt(LENGTH), 8)
    monkeypatch.setattr(StoreClient, "may_have", lambda *_: True)
    await assert_stored(tmp_path, prompt(LENGTH), CHUNKS)


async def test_two_engines_write_one_chunk(tmp_path: Path, step: StepGate) -> None:
    settings = storage(tmp_path)
    async with (
        running(kv_storage=settings) as first,
        running(kv_storage=settings, max_num_batched_tokens=64) as second,
        asyncio.timeout(60),
    ):
        generations = [submit(engine, prompt(LENGTH)) for engine in (first, second)]
        await until(step.reached.is_set)
        step.opened.set()
        for generation in generations:
            assert (await finish(generation))[0] == expected(prompt(LENGTH), 8)
    await assert_stored(tmp_path, prompt(LENGTH), CHUNKS)


async def test_a_decode_engine_reads_the_layers_of_a_step_that_is_saved(tmp_path: Path) -> None:
    async with Pair(storage=storage(tmp_path)) as pair, asyncio.timeout(60):
        reader, writer = decode(pair), prefill(pair)
        assert (await finish(reader))[0] == expected(LONG, 8)
        await finish(writer)
        await until(lambda: all_free(pair.p))
    assert pair.counts_p.counts["stored"] == len(LONG) // CHUNK
    await assert_stored(tmp_path, LONG, len(LONG) // CHUNK)


async def test_an_engine_stops_while_a_step_is_saved(tmp_path: Path, step: StepGate) -> None:
    async with running(kv_storage=storage(tmp_path)) as engine, asyncio.timeout(60):
        generation = await first_layers_written(engine, tmp_path, step)
        stop = asyncio.create_task(engine.stop())
        assert (await finish(generation))[1].finish_reason == "abort"
        step.opened.set()
        await stop
    assert manifests(tmp_path) == 0


async def test_a_stop_does_not_wait_for_a_stalled_store(
    tmp_path: Path,
    store: StoreGate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(saves, "_FLUSH_SECONDS", 0.01)
    async with running(kv_storage=storage(tmp_path)) as engine, asyncio.timeout(60):
        await ask(engine, prompt(LENGTH))
        await until(lambda: bool(store.asked))
    assert manifests(tmp_path) == 0
    assert f"{CHUNKS} chunks were not written before the stop" in caplog.text


async def test_a_stalled_store_delays_no_request_and_keeps_no_block(
    tmp_path: Path, store: StoreGate
) -> None:
    async with running(kv_storage=storage(tmp_path)) as engine, asyncio.timeout(60):
        await ask(engine, prompt(LENGTH))
        await until(lambda: all_free(engine))
        assert manifests(tmp_path) == 0
        store.opened.set()
    await assert_stored(tmp_path, prompt(LENGTH), CHUNKS)


async def test_a_store_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def put(files: FileStore, name: str, parts: Sequence[Buffer]) -> None:
        raise StoreUnavailable(f"{name}: no answer")

    tally = Tally()
    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "put", put)
        settings = storage(tmp_path, host_bytes=1 << 30)
        async with running(tally, kv_storage=settings) as engine, asyncio.timeout(60):
            await ask(engine, prompt(LENGTH))
            await until(lambda: tally.counts["not_stored_unavailable"] == CHUNKS)
    assert tally.counts["host_stored"] == CHUNKS * CHUNK
    await assert_stored(tmp_path, prompt(LENGTH), 0)


async def test_copies_keep_their_blocks(
    tmp_path: Path, step: StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow copies of later layers: another prompt must not get the blocks meanwhile."""
    release, read = threading.Event(), ChunkMemory.read

    def slow_read(
        memory: ChunkMemory,
        blocks: Sequence[int],
        first: int = 0,
        end: int | None = None,
        is_running: Callable[[], bool] | None = None,
    ) -> object:
        assert first == 0 or release.wait(60)
        return read(memory, blocks, first, end, is_running)

    monkeypatch.setattr(ChunkMemory, "read", slow_read)
    settings, other = storage(tmp_path), prompt(LENGTH, 1)
    async with running(kv_storage=settings, num_blocks=14) as engine, asyncio.timeout(60):
        generation = await first_layers_written(engine, tmp_path, step)
        step.opened.set()
        await finish(generation)
        waiting = submit(engine, other, "b")
        assert engine.stats().free_blocks == 14 - CHUNKS * CHUNK // 16
        release.set()
        assert (await finish(waiting))[0] == expected(other, 8)
    await assert_stored(tmp_path, prompt(LENGTH), CHUNKS)
    await assert_stored(tmp_path, other, CHUNKS)


async def test_no_copy_waits_for_layers_behind_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, which the step's thread is ahead of: it has passed all layers at once."""
    passed, on_layer, read = threading.Event(), StepLayers.on_layer, ChunkMemory.read
    parts: list[tuple[int, int | None]] = []

    def held(layers: StepLayers, count: int) -> None:
        on_layer(layers, count)
        if count == 2:
            passed.set()
            assert copied.wait(60)

    def noted_read(
        memory: ChunkMemory,
        blocks: Sequence[int],
        first: int = 0,
        end: int | None = None,
        is_running: Callable[[], bool] | None = None,
    ) -> object:
        assert passed.wait(60)
        parts.append((first, end))
        if len(parts) == 2 * CHUNKS:
            copied.set()
        return read(memory, blocks, first, end, is_running)

    copied = threading.Event()
    monkeypatch.setattr(StepLayers, "on_layer", held)
    monkeypatch.setattr(ChunkMemory, "read", noted_read)
    async with running(kv_storage=storage(tmp_path)) as engine, asyncio.timeout(60):
        await ask(engine, prompt(LENGTH))
    assert sorted(parts) == [(0, 1)] * CHUNKS + [(1, 2)] * CHUNKS


async def test_copies_are_bounded(tmp_path: Path, step: StepGate) -> None:
    tally = Tally()
    settings = storage(tmp_path, pending_bytes=2 * _CHUNK_BYTES)
    async with running(tally, kv_storage=settings) as engine, asyncio.timeout(60):
        generation = submit(engine, prompt(LENGTH))
        await until(lambda: data_objects(tmp_path, "000") == 2)
        # What a running step does not save is asked for again after it.
        assert tally.counts["not_stored_busy"] == 0
        step.opened.set()
        await finish(generation)
    assert tally.counts["not_stored_busy"] > 0
    assert tally.counts["stored"] + tally.counts["not_stored_busy"] == CHUNKS


@contextmanager
def at_random(monkeypatch: pytest.MonkeyPatch, source: random.Random) -> Iterator[None]:
    """Slow, failing writes, and steps that end before, between and after them."""
    put, put_if, on_layer = FileStore.put, FileStore.put_if, StepLayers.on_layer

    async def turns(most: int) -> None:
        for _ in range(source.randrange(most)):
            await asyncio.sleep(0)

    async def slow_put(files: FileStore, name: str, parts: Sequence[Buffer]) -> None:
        await turns(source.choice((1, 30, 1000)))
        if source.random() < 0.02:
            raise StoreUnavailable(f"{name}: no answer")
        await put(files, name, parts)

    async def slow_put_if(
        files: FileStore, name: str, parts: Sequence[Buffer], version: str | None
    ) -> None:
        await turns(source.choice((1, 30, 1000)))
        await put_if(files, name, parts, version)

    def slow_layer(layers: StepLayers, count: int) -> None:
        on_layer(layers, count)
        # Other threads may run.
        threading.Event().wait(source.choice((0, 0, 0.003)))

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "put", slow_put)
        patch.setattr(FileStore, "put_if", slow_put_if)
        patch.setattr(StepLayers, "on_layer", slow_layer)
        yield


@pytest.mark.parametrize("seed", range(3))
async def test_every_interleaving_stores_what_was_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two writers, shared prefixes, too few blocks, aborts, failed writes and a stop, at random:
    what is stored gives the same answers."""
    source, common = random.Random(seed), prompt(LENGTH)
    prompts = [
        (*common[: source.randrange(40, LENGTH)], *prompt(source.randrange(1, 60), i))
        for i in range(10)
    ]
    tally = Tally()
    settings = storage(
        tmp_path,
        host_bytes=source.choice((0, 100_000)),
        pending_bytes=source.choice((3 * _CHUNK_BYTES, 1 << 29)),
    )

    async def send(engine: Engine, name: str, tokens: tuple[int, ...]) -> None:
        for _ in range(source.randrange(1000)):
            await asyncio.sleep(0)
        generation = submit(engine, tokens, name, 20)
        if source.random() < 0.3:
            for _ in range(source.randrange(500)):
                await asyncio.sleep(0)
            engine.abort(name)
            await finish(generation)
            return
        assert (await finish(generation))[0] == expected(tokens, 20)

    with at_random(monkeypatch, source):
        async with (
            running(tally, kv_storage=settings, num_blocks=36) as first,
            running(kv_storage=settings, max_num_batched_tokens=100) as second,
            asyncio.timeout(100),
        ):
            await asyncio.gather(
                *(
                    send(engine, str(i), tokens)
                    for engine in (first, second)
                    for i, tokens in enumerate(prompts)
                )
            )
    assert tally.counts["stored"] > 0
    tally = Tally()
    async with running(tally, kv_storage=storage(tmp_path)) as engine, asyncio.timeout(100):
        for i, tokens in enumerate(prompts):
            answer, _ = await finish(submit(engine, tokens, str(i), 20))
            assert answer == expected(tokens, 20)
    assert tally.counts["storage_loaded"] > 0
    reasons = {
        name for name in tally.counts if name.startswith("not_loaded") and tally.counts[name]
    }
    assert reasons <= {"not_loaded_missing"}
