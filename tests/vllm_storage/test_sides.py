"""Loads and saves of both sides: what comes back, and what vLLM is told."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tandem_kvstore import maintenance
from tandem_kvstore.chunk_store import Chunk
from tandem_kvstore.client import StoreClient
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.tensors import LayerGroup
from tandem_kvstore.guard.load_guard import Decision, Hit, LoadGuard

from .sides import BLOCK, CHUNK, Engine, FakeRequest

MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(ranks: int = 1, weights: str = "w") -> Engine:
        engines.append(Engine(tmp_path, ranks, weights))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_engine_loads_what_was_saved(engine: MakeEngine, ranks: int) -> None:
    first, second = engine(ranks), engine(ranks)
    tokens = list(range(2 * CHUNK + 3))
    first.compute(FakeRequest("a", tokens), [0, 1, 2, 3, 4], 7.0)

    assert first.counted.stored == 2 * CHUNK
    request = FakeRequest("b", tokens)
    assert second.ask(request) == 2 * CHUNK
    assert second.load(request, [9, 8, 7, 6, 5]) == set()
    for cache in second.caches:
        for layer in cache:
            assert (layer[[9, 8, 7, 6]] == 7.0).all()
            assert (layer[[5, 4, 10]] == 0.0).all()


def test_what_vllm_has_of_the_first_chunk_is_no_gain_of_a_load(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, hits = list(range(2 * CHUNK + 3)), list[Hit]()
    engine().compute(FakeRequest("a", tokens), [0, 1, 2, 3, 4], 7.0)
    second, decide = engine(), LoadGuard.decide

    def recorded(guard: LoadGuard, hit: Hit, now: float) -> Decision:
        hits.append(hit)
        return decide(guard, hit, now)

    monkeypatch.setattr(LoadGuard, "decide", recorded)
    assert second.ask(FakeRequest("b", tokens), BLOCK) == 2 * CHUNK - BLOCK
    [hit] = hits
    assert (hit.chunks, hit.context, hit.cached) == (2, 0, BLOCK)


def test_writing_begins_with_the_next_step(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the tokens of the step that computed the KV are sampled."""
    writes: list[str] = []
    store = StoreClient.store

    async def recorded(client: StoreClient, chunk: Chunk, groups: Sequence[LayerGroup]) -> bool:
        writes.append(chunk.key)
        return await store(client, chunk, groups)

    monkeypatch.setattr(StoreClient, "store", recorded)
    first = engine()
    [worker], request = first.workers, FakeRequest("a", list(range(CHUNK)))
    first.ask(request)
    orders = first.scheduler.orders([(request, [0, 1], 0, CHUNK)])
    worker.begin_step()
    worker.load(orders)
    worker.save(orders)
    # Whatever the step gave to the store's thread has begun when this returns.
    worker._thread.call(asyncio.sleep(0))
    assert not writes
    worker.begin_step()
    while first.scheduler.is_writing:
        first.step()
    assert first.counted.stored == CHUNK
    assert len(writes) == 1


def test_an_engine_that_stops_writes_what_it_has_copied(engine: MakeEngine, tmp_path: Path) -> None:
    first = Engine(tmp_path)
    [worker], request = first.workers, FakeRequest("a", list(range(CHUNK)))
    first.ask(request)
    orders = first.scheduler.orders([(request, [0, 1], 0, CHUNK)])
    worker.begin_step()
    worker.load(orders)
    worker.save(orders)
    first.close()
    assert engine().ask(FakeRequest("b", [*range(CHUNK), 1])) == CHUNK


def test_blocks_that_are_cached_locally_are_not_written(engine: MakeEngine) -> None:
    first, second = engine(), engine()
    tokens = list(range(2 * CHUNK))
    first.compute(FakeRequest("a", tokens), [0, 1, 2, 3], 7.0)

    assert second.load(FakeRequest("b", tokens), [9, 8, 7, 6], computed=BLOCK) == set()
    [[layer, _]] = second.caches
    assert (layer[9] == 0.0).all()
    assert (layer[[8, 7, 6]] == 7.0).all()


def test_bounds_in_a_file_hold_as_soon_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "COLLECT_SECONDS", 0.01)
    bounds, store = tmp_path / "bounds.json", tmp_path / "kv"
    bounds.write_text("{}")
    engine = Engine(store, bounds_file=bounds)
    engine.compute(FakeRequest("a", list(range(2 * CHUNK))), [0, 1, 2, 3], 7.0)
    assert len(stored_chunks(store)) == 2
    bounds.write_text('{"capacity_bytes": 1}')
    # The collector deletes the data of a chunk only when it has no manifest.
    while stored_chunks(store):
        engine.step()
    engine.close()


def stored_chunks(store: Path) -> list[Path]:
    return list(store.rglob("?" * 64))


def test_after_a_failed_load_the_answer_is_0(engine: MakeEngine, tmp_path: Path) -> None:
    first, second = engine(), engine()
    tokens = list(range(2 * CHUNK))
    first.compute(FakeRequest("a", tokens), [0, 1, 2, 3], 7.0)
    for file in tmp_path.rglob("*"):
        # The data of a chunk so small follow its manifest, whose name is a hash.
        if file.is_file() and len(file.name) >= 64:
            file.write_bytes(file.read_bytes()[:-1] + b"x")

    request = FakeRequest("b", tokens)
    assert second.load(request, [9, 8, 7, 6]) == {"b"}
    assert second.ask(request) == 0
    assert second.counted.not_loaded == [Reason.CORRUPT]


def test_other_weights_find_nothing(engine: MakeEngine) -> None:
    first, second = engine(), engine(weights="others")
    tokens = list(range(2 * CHUNK))
    first.compute(FakeRequest("a", tokens), [0, 1, 2, 3], 7.0)
    assert second.ask(FakeRequest("b", tokens)) == 0
    assert second.counted.not_loaded == [Reason.MISSING]


def test_a_load_of_a_request_that_ended_is_reported(engine: MakeEngine) -> None:
    """vLLM frees the blocks of an aborted request only when its load is reported as ended."""
    first, second = engine(), engine()
    tokens = list(range(2 * CHUNK))
    first.compute(FakeRequest("a", tokens), [0, 1, 2, 3], 7.0)

    request = FakeRequest("b", tokens)
    second.scheduler.start_load(request, [9, 8, 7, 6], second.ask(request))
    second.scheduler.finish("b")
    [worker] = second.workers
    worker.load(second.scheduler.orders(()))
    ended = worker.take_ended_loads()
    while not ended:
        ended = worker.take_ended_loads()
    assert [load.request_id for load in ended] == ["b"]


def test_tokens_of_an_answer_are_saved_when_they_are_final(engine: MakeEngine) -> None:
    first = engine()
    request = FakeRequest("a", list(range(CHUNK)), num_prompt_tokens=CHUNK - 2)
    # The newest of the 8 tokens is not computed: no chunk is complete.
    assert not first.scheduler.orders([(request, [0, 1], CHUNK - 2, 1)]).saves
    request.tokens.append(99)
    assert len(first.scheduler.orders([(request, [0, 1, 2], CHUNK - 1, 1)]).saves) == 1
    assert not first.scheduler.orders([(request, [0, 1, 2], CHUNK, 1)]).saves


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_chunk_that_the_store_lost_is_stored_again(
    engine: MakeEngine, tmp_path: Path, *, is_damaged: bool
) -> None:
    """By the engine that had stored it, too, when it computes the chunk again."""
    first = engine()
    tokens = list(range(2 * CHUNK))
    first.compute(FakeRequest("a", tokens), [0, 1, 2, 3], 7.0)
    originals = {file: file.read_bytes() for file in stored_chunks(tmp_path)}
    assert len(originals) == 2
    for file in originals:
        if is_damaged:
            file.write_bytes(b"no manifest\n")
        else:
            file.unlink()

    first.compute(FakeRequest("b", tokens), [9, 8, 7, 6], 7.0)
    assert first.counted.not_loaded[-1] is (Reason.CORRUPT if is_damaged else Reason.MISSING)
    assert first.counted.stored == 4 * CHUNK
    assert engine().load(FakeRequest("c", tokens), [5, 4, 3, 2]) == set()


def test_chunks_before_those_that_were_looked_up_do_not_count_as_stored(tmp_path: Path) -> None:
    """vLLM had the first chunk in its own cache; its save was refused before."""
    engine, tokens = Engine(tmp_path), list(range(2 * CHUNK + 1))
    request = FakeRequest("a", tokens)
    assert engine.ask(request, computed=CHUNK) == 0
    assert engine.scheduler.take_events() == []
    orders = engine.scheduler.orders([(request, [0, 1, 2, 3, 4], CHUNK, CHUNK + 1)])
    assert len(orders.saves) == 2
    engine.close()
