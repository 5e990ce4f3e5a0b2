"""KV that is loaded layer by layer while the rest of the prompt is computed: the same answers."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tandem_engine.blocks import BlocksStored
from tandem_engine.tiers import chunk_memory
from tandem_engine.tiers.arriving import ArrivingKv, LayersCut
from tandem_kvstore import client
from tandem_kvstore.format import manifest
from tandem_kvstore.format.tensors import Buffer
from tandem_kvstore.guard.load_guard import Decision, Hit, Way
from tandem_kvstore.stores.files import FileStore

from ..engines import Tally, expected, finish, prompt, running, until
from .asking import CHUNK, CHUNKS, LENGTH, ask, storage, submit
from .conftest import PatientGuard

pytestmark = pytest.mark.long

_LAST_GROUP = "-001-"
"""In the names of the data objects of the second of two layers."""


class EagerGuard(PatientGuard):
    """Overlaps loading and computing whatever the times of this machine."""

    def decide(self, hit: Hit, now: float) -> Decision:
        way = Way.LAYERS if hit.groups > 1 else Way.LOAD
        return replace(super().decide(hit, now), way=way)


class BoundedGuard(EagerGuard):
    """Gives every load the same time, by which a test finds the load's deadline."""

    SECONDS = 61.0

    def decide(self, hit: Hit, now: float) -> Decision:
        return replace(super().decide(hit, now), deadline=self.SECONDS)


@dataclass
class Gate:
    """Keeps the data of the second layer back until `opened`."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: threading.Event = field(default_factory=threading.Event)
    """Set when a step waits for the second layer."""
    opens_for_steps: bool = True
    """Whether a step that waits opens it: a load that no step overlaps would never end."""

    def notice(self, loop: asyncio.AbstractEventLoop, layers: int) -> None:
        if layers == 2:
            self.waiting.set()
            if self.opens_for_steps:
                loop.call_soon_threadsafe(self.opened.set)


@pytest.fixture(autouse=True)
def layer_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer in each group, in data objects of their own, as those of large models."""
    monkeypatch.setattr(chunk_memory, "_GROUP_BYTES", 1)
    monkeypatch.setattr(manifest, "MAX_INLINE", 0)
    monkeypatch.setattr(client, "LoadGuard", EagerGuard)


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, loop = Gate(), asyncio.get_running_loop()
    get, wait = FileStore.get, ArrivingKv.wait

    async def gated_get(store: FileStore, name: str, limit: int, *, is_cut: bool = False) -> Buffer:
        if _LAST_GROUP in name:
            await gate.opened.wait()
        return await get(store, name, limit, is_cut=is_cut)

    def noticed_wait(kv: ArrivingKv, layers: int) -> None:
        gate.notice(loop, layers)
        wait(kv, layers)

    monkeypatch.setattr(FileStore, "get", gated_get)
    monkeypatch.setattr(ArrivingKv, "wait", noticed_wait)
    return gate


def last_group_of(directory: Path, chunk: int) -> Path:
    """The data of the second layer of a chunk of the prompt."""
    for file in directory.rglob("?" * 64):
        if json.loads(file.read_bytes())["manifest"]["token_count"] == (chunk + 1) * CHUNK:
            (data,) = file.parent.glob(f"{file.name}{_LAST_GROUP}*")
            return data
    raise AssertionError(f"chunk {chunk} is not stored")


def device_hashes(tally: Tally) -> Iterator[bytes]:
    for event in tally.events:
        if isinstance(event, BlocksStored) and event.medium == "GPU":
            yield from event.hashes


async def test_a_step_computes_the_first_layer_while_the_second_one_loads(
    stored: Path, gate: Gate
) -> None:
    tally = Tally()
    async with running(tally, kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        # The second layer's data come only when a step waits for them.
        await ask(engine, prompt(LENGTH))
        assert gate.waiting.is_set()
        # From the device's prefix cache.
        await ask(engine, prompt(LENGTH))
    assert tally.counts["storage_loaded"] == CHUNKS * CHUNK


async def test_a_step_that_is_dropped_although_all_kv_arrived_is_computed_again(
    stored: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline may end a load after its last data came and before the step is told."""
    on_group = ArrivingKv.on_group

    def untold(kv: ArrivingKv, index: int) -> None:
        if index == 0:
            on_group(kv, index)

    monkeypatch.setattr(ArrivingKv, "on_group", untold)
    async with running(kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        await ask(engine, prompt(LENGTH))
        assert gate.waiting.is_set()
        await ask(engine, prompt(LENGTH))


async def test_waiting_for_layers_is_no_computing(stored: Path, gate: Gate) -> None:
    gate.opens_for_steps = False
    async with running(kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        begin = time.perf_counter()
        generation = submit(engine, prompt(LENGTH))
        await until(gate.waiting.is_set)
        # Time passes in which the step can compute nothing.
        closed = time.perf_counter()
        expected(prompt(LENGTH, seed=1), 8)
        held = time.perf_counter() - closed
        gate.opened.set()
        first = await anext(generation)
        total = time.perf_counter() - begin
        await finish(generation)
    timing = first.timing
    assert timing is not None
    assert timing.compute is not None
    assert timing.queue is not None
    assert timing.transfer is not None
    assert timing.transfer >= held
    assert timing.compute <= total - held
    assert timing.queue + timing.transfer <= total


@pytest.mark.parametrize("damage", ["corrupt", "truncated", "missing"])
@pytest.mark.parametrize("chunk", [0, 3, CHUNKS - 1])
async def test_what_was_computed_before_a_fault_was_noticed_is_dropped(
    stored: Path, gate: Gate, chunk: int, damage: str
) -> None:
    file = last_group_of(stored, chunk)
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(data[:-1])
    else:
        data[-1] ^= 1
        file.write_bytes(data)
    tally = Tally()
    async with running(tally, kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        await ask(engine, prompt(LENGTH))
        # The first layer of all tokens after the stored ones was computed by then.
        assert gate.waiting.is_set()
        # Answered from the device's prefix cache, which must have nothing of the dropped step.
        await ask(engine, prompt(LENGTH))
    assert tally.counts["storage_loaded"] == chunk * CHUNK
    assert tally.counts[f"not_loaded_{damage}"] == CHUNKS - chunk
    hashes = list(device_hashes(tally))
    assert len(hashes) == len(set(hashes))


async def test_a_load_that_its_deadline_ends_is_computed(
    stored: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LoadGuard", BoundedGuard)
    gate.opens_for_steps = False
    timeout, deadlines = asyncio.timeout, []

    def recorded_timeout(seconds: float | None) -> asyncio.Timeout:
        made = timeout(seconds)
        if seconds == BoundedGuard.SECONDS:
            deadlines.append(made)
        return made

    monkeypatch.setattr(asyncio, "timeout", recorded_timeout)
    tally = Tally()
    async with running(tally, kv_storage=storage(stored)) as engine, timeout(60):
        generation = submit(engine, prompt(LENGTH))
        # Not before: the look-up and the first layer's groups have ended then.
        await until(gate.waiting.is_set)
        (deadline,) = deadlines
        deadline.reschedule(asyncio.get_running_loop().time())
        answer, _ = await finish(generation)
        assert answer == expected(prompt(LENGTH), 8)
    assert tally.counts["storage_loaded"] == 0
    assert tally.counts["not_loaded_timeout"] == CHUNKS


async def test_an_abort_ends_a_step_that_waits_for_layers(stored: Path, gate: Gate) -> None:
    gate.opens_for_steps = False
    async with running(kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        generation = submit(engine, prompt(LENGTH))
        await until(gate.waiting.is_set)
        engine.abort("a")
        _, last = await finish(generation)
        assert last.finish_reason == "abort"
        gate.opened.set()
        await ask(engine, prompt(LENGTH), "b")


async def test_an_engine_stops_while_a_step_waits_for_layers(stored: Path, gate: Gate) -> None:
    gate.opens_for_steps = False
    async with asyncio.timeout(60), running(kv_storage=storage(stored)) as engine:
        generation = submit(engine, prompt(LENGTH))
        await until(gate.waiting.is_set)
        await engine.stop()
        _, last = await finish(generation)
        assert last.finish_reason == "abort"


async def test_a_running_request_does_not_wait_for_another_ones_store(
    stored: Path, gate: Gate
) -> None:
    gate.opens_for_steps = False
    first = prompt(20, seed=1)
    async with running(kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        decoding = submit(engine, first, "decoding", 60)
        head = await anext(decoding)
        loading = submit(engine, prompt(LENGTH), "loading")
        rest, _ = await finish(decoding)
        assert [*head.token_ids, *rest] == expected(first, 60)
        gate.opened.set()
        answer, _ = await finish(loading)
        assert answer == expected(prompt(LENGTH), 8)


async def test_a_new_request_does_not_wait_for_another_ones_store(stored: Path, gate: Gate) -> None:
    gate.opens_for_steps = False
    async with running(kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        loading = submit(engine, prompt(LENGTH), "loading")
        await until(gate.waiting.is_set)
        await ask(engine, prompt(20, seed=1), "new")
        gate.opened.set()
        answer, _ = await finish(loading)
        assert answer == expected(prompt(LENGTH), 8)


async def test_many_requests_at_once_get_right_answers(stored: Path) -> None:
    tally = Tally()
    prompts = [(*prompt(LENGTH)[: 40 + 9 * i], *prompt(50, seed=i + 1)) for i in range(12)]
    async with running(tally, kv_storage=storage(stored), num_blocks=40) as engine:
        await asyncio.gather(*(ask(engine, p, str(i)) for i, p in enumerate(prompts)))
    assert tally.counts["storage_loaded"] > 0


def test_a_wait_ends_when_layers_do_not_come() -> None:
    kv = ArrivingKv([1, 2], lambda _: None, lambda: None)
    kv.on_chain(3)
    kv.on_group(0)
    kv.wait(1)
    kv.on_cut()
    kv.wait(1)
    with pytest.raises(LayersCut):
        kv.wait(2)
