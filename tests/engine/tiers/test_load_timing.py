"""Queue, transfer and compute of a request that is computed while its KV is loaded: a second in
which it waits for the store is no computing, whether the load then brings something or not."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tandem_contract.timing import Timing
from tandem_engine.tiers.rear import RearLoad
from tandem_kvstore import client
from tandem_kvstore.format.tensors import Buffer
from tandem_kvstore.guard.load_guard import Hit
from tandem_kvstore.stores.files import FileStore

from ..engines import Tally, expected, finish, prompt, running
from .asking import CHUNK, CHUNKS, LENGTH, storage, submit
from .conftest import FRONT, BothGuard


class DividingGuard(BothGuard):
    """Has one more chunk computed when the store has fewer than predicted."""

    def split(self, hit: Hit) -> tuple[int, float]:
        return 1, 0.0


@dataclass
class Gate:
    """Keeps manifests or data back until `opened`."""

    look_ups: bool = False
    """Whether the manifests are kept back, and with them the data."""
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    awaited: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the front is computed, and computing waits for the load."""


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, get, set_awaited = Gate(), FileStore.get, RearLoad.set_awaited

    async def gated_get(store: FileStore, name: str, limit: int, *, is_cut: bool = False) -> Buffer:
        # The data of a small chunk follow its manifest, and a look-up asks without them.
        if gate.look_ups or not is_cut:
            await gate.opened.wait()
        return await get(store, name, limit, is_cut=is_cut)

    def noted(load: RearLoad) -> None:
        set_awaited(load)
        gate.awaited.set()

    monkeypatch.setattr(FileStore, "get", gated_get)
    monkeypatch.setattr(RearLoad, "set_awaited", noted)
    monkeypatch.setattr(client, "LoadGuard", BothGuard)
    return gate


@dataclass
class Answer:
    """What the engine reported, beside what the test has measured. Seconds."""

    timing: Timing
    total: float
    """From the request to its first token."""
    held: float
    """For which its load was kept back while nothing was left to compute before it."""


@asynccontextmanager
async def answered(directory: Path, gate: Gate, tally: Tally) -> AsyncIterator[Answer]:
    async with running(tally, kv_storage=storage(directory)) as engine, asyncio.timeout(60):
        begin = time.perf_counter()
        generation = submit(engine, prompt(LENGTH))
        await gate.awaited.wait()
        closed = time.perf_counter()
        # Takes some time.
        expected.__wrapped__(prompt(LENGTH, seed=1), 8)
        held = time.perf_counter() - closed
        gate.opened.set()
        first = await anext(generation)
        total = time.perf_counter() - begin
        assert first.timing is not None
        yield Answer(first.timing, total, held)
        await finish(generation)


def chunk_file(directory: Path, chunk: int) -> Path:
    end = f'"token_count":{(chunk + 1) * CHUNK}'.encode()
    (file,) = (f for f in directory.rglob("?" * 64) if end in f.read_bytes()[:1000])
    return file


async def test_waiting_for_a_rear_is_transfer(stored: Path, gate: Gate) -> None:
    tally = Tally()
    async with answered(stored, gate, tally) as answer:
        queue, compute, transfer = figures(answer.timing)
        assert transfer >= answer.held
        assert compute <= answer.total - answer.held
        assert queue + transfer <= answer.total
        assert queue + compute <= answer.total - answer.held
    assert tally.counts["storage_loaded"] == (CHUNKS - FRONT) * CHUNK


async def test_waiting_for_a_rear_that_cannot_be_used_is_no_computing(
    stored: Path, gate: Gate
) -> None:
    last, tally = chunk_file(stored, CHUNKS - 1), Tally()
    last.write_bytes(last.read_bytes()[:-1])
    async with answered(stored, gate, tally) as answer:
        assert answer.timing.transfer is None
        queue, compute, _ = figures(answer.timing)
        assert compute <= answer.total - answer.held
        # It delayed the request without bringing anything, as a queue does.
        assert queue >= answer.held
        assert queue + compute <= answer.total
    assert tally.counts["storage_loaded"] == 0


async def test_waiting_for_a_look_up_is_no_computing_if_computing_goes_on_then(
    stored: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LoadGuard", DividingGuard)
    chunk_file(stored, CHUNKS - 1).unlink()
    gate.look_ups, tally = True, Tally()
    async with answered(stored, gate, tally) as answer:
        queue, compute, transfer = figures(answer.timing)
        assert transfer >= answer.held
        assert compute <= answer.total - answer.held
        assert queue + transfer <= answer.total
    # Of five chunks, a third one was computed.
    assert tally.counts["storage_loaded"] == (CHUNKS - 1 - FRONT - 1) * CHUNK


def figures(timing: Timing) -> tuple[float, float, float]:
    """Queue, compute and transfer; 0 if no transfer is reported."""
    assert timing.queue is not None
    assert timing.compute is not None
    return timing.queue, timing.compute, timing.transfer or 0.0
