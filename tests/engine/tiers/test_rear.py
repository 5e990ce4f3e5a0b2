"""Computing the front of a prompt while the rear is loaded: the same answers, and no wait."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem_engine.blocks import BlocksStored
from tandem_engine.engine import Engine
from tandem_engine.step import Chunk, SampledToken
from tandem_engine.step_runner import StepRunner
from tandem_engine.tiers.rear import Prefix, RearLoad
from tandem_kvstore import client
from tandem_kvstore.chain import Chunk as Place
from tandem_kvstore.format.tensors import Buffer
from tandem_kvstore.guard.load_guard import Decision, Hit, Way
from tandem_kvstore.stores.files import FileStore

from ..engines import Tally, expected, finish, prompt, running, until
from .asking import CHUNK, CHUNKS, LENGTH, ask, storage, submit
from .conftest import FRONT, BothGuard

pytestmark = pytest.mark.long


class ImpatientGuard(BothGuard):
    """Waits for nothing."""

    max_wait = 0.0


@dataclass
class Gate:
    """Keeps the data of chunks back until `opened`; manifests come at once."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[str] = field(default_factory=list)
    """Keys of the chunks whose data were asked for."""


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, get = Gate(), FileStore.get

    async def gated_get(store: FileStore, name: str, limit: int, *, is_cut: bool = False) -> Buffer:
        # The data of a small chunk follow its manifest, and a look-up asks without them.
        if not is_cut:
            gate.asked.append(name)
            await gate.opened.wait()
        return await get(store, name, limit, is_cut=is_cut)

    monkeypatch.setattr(FileStore, "get", gated_get)
    return gate


@pytest.fixture(autouse=True)
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LoadGuard", BothGuard)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Request id, first token and end of each chunk that was computed."""
    computed: list[tuple[str, int, int]] = []
    advance = Engine._advance

    def noted(engine: Engine, chunk: Chunk, sampled: SampledToken | None, *, is_cut: bool) -> None:
        computed.append((chunk.sequence.id, chunk.start, chunk.end))
        advance(engine, chunk, sampled, is_cut=is_cut)

    monkeypatch.setattr(Engine, "_advance", noted)
    return computed


def chunk_file(directory: Path, chunk: int) -> Path:
    """The object of a chunk of the prompt."""
    end = f'"token_count":{(chunk + 1) * CHUNK}'.encode()
    (file,) = (f for f in directory.rglob("?" * 64) if end in f.read_bytes()[:1000])
    return file


def front_steps(steps: list[tuple[str, int, int]]) -> list[tuple[int, int]]:
    """The chunks of a prompt that were computed before its first token."""
    return [(start, end) for _, start, end in steps if end <= LENGTH]


async def test_the_front_is_computed_while_the_rear_is_loaded(
    stored: Path, gate: Gate, steps: list[tuple[str, int, int]]
) -> None:
    tally = Tally()
    async with running(tally, kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        generation = submit(engine, prompt(LENGTH))
        await until(lambda: bool(steps))
        gate.opened.set()
        answer, _ = await finish(generation)
        assert answer == expected(prompt(LENGTH), 8)
        # The last chunk first.
        assert gate.asked[0] == chunk_file(stored, CHUNKS - 1).name
        # From the device's prefix cache.
        await ask(engine, prompt(LENGTH))
    assert front_steps(steps)[:2] == [(0, FRONT * CHUNK), (CHUNKS * CHUNK, LENGTH)]
    assert tally.counts["storage_loaded"] == (CHUNKS - FRONT) * CHUNK
    assert tally.counts["external"] == (CHUNKS - FRONT) * CHUNK
    # The front is stored, too: nothing is written again.
    assert tally.counts["stored_new"] == 0


async def test_a_stalled_store_does_not_delay_a_request(
    stored: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LoadGuard", ImpatientGuard)
    tally = Tally()
    async with running(tally, kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        # The data never come.
        await ask(engine, prompt(LENGTH))
    assert not gate.opened.is_set()
    assert tally.counts["storage_loaded"] == 0
    assert tally.counts["not_loaded_timeout"] == 1


async def test_a_running_request_does_not_wait_for_the_rear_of_another(
    stored: Path, gate: Gate
) -> None:
    async with running(kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        loading = submit(engine, prompt(LENGTH), "loading")
        await until(lambda: bool(gate.asked))
        await ask(engine, prompt(20, seed=1), "new")
        gate.opened.set()
        answer, _ = await finish(loading)
        assert answer == expected(prompt(LENGTH), 8)


def corrupt(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [corrupt, truncate])
@pytest.mark.parametrize("chunk", [FRONT, 3, CHUNKS - 1])
async def test_the_chunks_behind_an_unusable_one_are_used(
    stored: Path, chunk: int, damage: Callable[[Path], None]
) -> None:
    damage(chunk_file(stored, chunk))
    tally = Tally()
    async with running(tally, kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        await ask(engine, prompt(LENGTH))
        # From the device's prefix cache.
        await ask(engine, prompt(LENGTH))
        # The engine replaces the chunk that it computed.
        await until(lambda: tally.counts["stored"] > 0)
    assert tally.counts["storage_loaded"] == (CHUNKS - 1 - chunk) * CHUNK
    hashes = [
        block_hash
        for event in tally.events
        if isinstance(event, BlocksStored) and event.medium == "GPU"
        for block_hash in event.hashes
    ]
    assert len(hashes) == len(set(hashes))


@pytest.mark.parametrize("missing", [0, 1, FRONT, 4])
async def test_a_prefix_that_is_stored_in_part_is_divided_again(stored: Path, missing: int) -> None:
    chunk_file(stored, missing).unlink()
    tally = Tally()
    async with running(tally, kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        await ask(engine, prompt(LENGTH))
    assert tally.counts["storage_loaded"] == max(0, missing - FRONT) * CHUNK
    assert tally.counts["not_loaded_missing"] == CHUNKS - missing


async def test_a_cached_prefix_is_neither_computed_nor_loaded(
    stored: Path, steps: list[tuple[str, int, int]]
) -> None:
    tally, cached = Tally(), 48
    async with running(tally, kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        await ask(engine, (*prompt(LENGTH)[:cached], *prompt(10, seed=1)), "first")
        tally.counts["storage_loaded"] = 0
        steps.clear()
        await ask(engine, prompt(LENGTH), "second")
    # A chunk and a half are cached: half a chunk and another one are computed.
    assert front_steps(steps)[:2] == [(cached, 3 * CHUNK), (CHUNKS * CHUNK, LENGTH)]
    assert tally.counts["storage_loaded"] == (CHUNKS - 3) * CHUNK


async def test_an_abort_ends_a_wait_for_the_rear(stored: Path, gate: Gate) -> None:
    async with running(kv_storage=storage(stored)) as engine, asyncio.timeout(60):
        generation = submit(engine, prompt(LENGTH))
        await until(lambda: bool(gate.asked))
        engine.abort("a")
        _, last = await finish(generation)
        assert last.finish_reason == "abort"
        gate.opened.set()
        await ask(engine, prompt(LENGTH), "b")


async def test_an_engine_stops_while_a_rear_is_loaded(stored: Path, gate: Gate) -> None:
    async with asyncio.timeout(60), running(kv_storage=storage(stored)) as engine:
        generation = submit(engine, prompt(LENGTH))
        await until(lambda: bool(gate.asked))
        await engine.stop()
        _, last = await finish(generation)
        assert last.finish_reason == "abort"


async def test_a_wait_that_ended_leaves_no_deadline() -> None:
    """Computing was done before the look-up, which then found less: it goes on."""
    guard = SimpleNamespace(split=lambda _: (2, 0.0))
    store = SimpleNamespace(guard=guard, hit=lambda *_: None)
    prefix = Prefix([Place("", "", 0)] * 8, 0, CHUNK, 8 * CHUNK)
    decision = Decision(8, 60.0, way=Way.BOTH, front=2, max_wait=60.0)
    load = RearLoad(store, prefix, decision, 0, on_found=lambda _: None, on_lost=lambda *_: None)
    async with load.deadline:
        load.rear.front = load.rear.start
        load.set_awaited()
        assert load.deadline.when() is not None
        load.on_chain(6)
        assert load.rear.start == 4 * CHUNK
        assert load.deadline.when() is None
        load.rear.front = load.rear.start
        load.set_awaited()
        assert load.deadline.when() is not None


class RandomGuard(BothGuard):
    """Divides, claims and waits at random."""

    source = random.Random(0)

    def decide(self, hit: Hit, now: float) -> Decision:
        decision = super().decide(hit, now)
        if decision.way is not Way.BOTH:
            return decision
        front = self.source.randrange(1, hit.chunks)
        return replace(decision, front=front, max_wait=self.source.choice((0.0, 60.0)))

    def split(self, hit: Hit) -> tuple[int, float]:
        return self.source.randrange(hit.chunks + 1), 0.0

    def is_load_sooner(self, tokens: int, context: int, size: int) -> bool:
        return self.source.random() < 0.5


@pytest.mark.parametrize("seed", range(4))
async def test_every_interleaving_gives_right_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Slow and stalled reads, damaged and missing chunks, shared prefixes, too few blocks, aborts
    and slow steps, at random."""
    source = random.Random(seed)
    get, run = FileStore.get, StepRunner.run

    async def turns(most: int) -> None:
        for _ in range(source.randrange(most)):
            await asyncio.sleep(0)

    async def slow_get(store: FileStore, name: str, limit: int, *, is_cut: bool = False) -> Buffer:
        await turns(source.choice((1, 30, 1000)))
        return await get(store, name, limit, is_cut=is_cut)

    async def slow_run(runner: StepRunner, step: object) -> object:
        await turns(source.choice((1, 30, 1000)))
        return await run(runner, step)  # type: ignore[arg-type]

    common = prompt(LENGTH)
    prompts = [
        (*common[: source.randrange(40, LENGTH)], *prompt(source.randrange(1, 60), i))
        for i in range(10)
    ]
    async with running(kv_storage=storage(tmp_path), num_blocks=200) as engine:
        await asyncio.gather(*(ask(engine, p, str(i)) for i, p in enumerate(prompts)))
    for file in tmp_path.rglob("?" * 64):
        if source.random() < 0.1:
            source.choice((corrupt, truncate, Path.unlink))(file)
    RandomGuard.source = source
    monkeypatch.setattr(client, "LoadGuard", RandomGuard)
    monkeypatch.setattr(FileStore, "get", slow_get)
    monkeypatch.setattr(StepRunner, "run", slow_run)
    tally = Tally()
    settings = storage(tmp_path, host_bytes=source.choice((0, 100_000)))
    async with running(tally, kv_storage=settings, num_blocks=36) as engine, asyncio.timeout(100):

        async def one(name: str, tokens: tuple[int, ...]) -> None:
            await turns(1000)
            generation = submit(engine, tokens, name, 20)
            if source.random() < 0.2:
                await turns(2000)
                engine.abort(name)
                await finish(generation)
                return
            answer, _ = await finish(generation)
            assert answer == expected(tokens, 20)

        for number in range(2):
            await asyncio.gather(*(one(f"{number} {i}", p) for i, p in enumerate(prompts)))
    assert tally.counts["storage_loaded"] > 0
    assert tally.counts["preempted"] > 0
