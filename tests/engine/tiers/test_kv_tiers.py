"""The engine with host memory and external storage: the same answers, and less to compute."""

import asyncio
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem_contract import metrics as names
from tandem_engine.blocks import BlocksRemoved, BlocksStored
from tandem_engine.engine import Engine
from tandem_engine.metrics import EngineMetrics
from tandem_engine.tiers.chunk_memory import ChunkMemory
from tandem_engine.tiers.settings import KvStorageConfig
from tandem_engine.types import Request
from tandem_kvstore import maintenance
from tandem_kvstore.errors import StoreFull
from tandem_kvstore.stores.files import FileStore

from ..engines import GREEDY, Tally, expected, finish, prompt, running, until

pytestmark = pytest.mark.long

CHUNK = 32
LENGTH = 200


def storage(directory: Path, bounds_file: Path | None = None, **settings: int) -> KvStorageConfig:
    """A directory as external storage; the smallest chunks."""
    return KvStorageConfig(
        endpoint=f"file://{directory}",
        chunk_tokens=CHUNK,
        bounds_file=str(bounds_file) if bounds_file else None,
        **settings,
    )


def host(size: int) -> KvStorageConfig:
    return KvStorageConfig(host_bytes=size, chunk_tokens=CHUNK)


async def ask(
    engine: Engine, tokens: tuple[int, ...], name: str = "a", count: int = 8, salt: str = ""
) -> None:
    """Send one request, and compare its answer with the dense reference."""
    request = Request(name, tokens, GREEDY(max_tokens=count), cache_salt=salt)
    answer, _ = await finish(engine.submit(request))
    assert answer == expected(tokens, count)


def chunk_files(directory: Path) -> int:
    return sum(len(file.name) == 64 for file in directory.rglob("*"))


async def test_a_restarted_engine_loads_what_it_computed_before(tmp_path: Path) -> None:
    first, second = Tally(), Tally()
    async with running(first, kv_storage=storage(tmp_path)) as engine:
        await ask(engine, prompt(LENGTH))
    # 200 tokens of the prompt and 7 of the answer: six full chunks.
    assert chunk_files(tmp_path) == first.counts["stored"] == 6
    assert first.counts["computed"] == LENGTH
    async with running(second, kv_storage=storage(tmp_path)) as engine:
        await ask(engine, prompt(LENGTH))
    assert second.counts["external"] == second.counts["storage_loaded"] == 6 * CHUNK
    assert second.counts["computed"] == LENGTH - 6 * CHUNK
    assert second.counts["stored"] == 0


async def test_a_prompt_of_whole_chunks_computes_its_last_token_only(tmp_path: Path) -> None:
    tally = Tally()
    async with running(kv_storage=storage(tmp_path)) as engine:
        await ask(engine, prompt(4 * CHUNK))
    async with running(tally, kv_storage=storage(tmp_path)) as engine:
        await ask(engine, prompt(4 * CHUNK))
    assert tally.counts["external"] == 4 * CHUNK - 1
    assert tally.counts["computed"] == 1


async def test_the_next_turn_of_a_conversation_loads_question_and_answer(tmp_path: Path) -> None:
    tally = Tally()
    question = prompt(90)
    async with running(kv_storage=storage(tmp_path)) as engine:
        await ask(engine, question, count=40)
    turn = (*question, *expected(question, 40), *prompt(30, seed=9))
    async with running(tally, kv_storage=storage(tmp_path)) as engine:
        await ask(engine, turn)
    assert tally.counts["storage_loaded"] == 4 * CHUNK


async def test_what_the_gpu_lost_comes_from_host_memory() -> None:
    tally = Tally()
    # Blocks for one prompt: each prompt evicts the one before.
    async with running(tally, kv_storage=host(1 << 30), num_blocks=15) as engine:
        for seed in range(3):
            await ask(engine, prompt(LENGTH, seed))
        await until(lambda: tally.counts["host_stored"] == 18 * CHUNK)
        await ask(engine, prompt(LENGTH, 0))
    assert tally.counts["host_loaded"] == 6 * CHUNK
    assert tally.counts["computed"] == 3 * LENGTH + LENGTH - 6 * CHUNK


async def test_host_memory_is_bounded_and_evicts_the_least_recently_used() -> None:
    tally = Tally()
    size = 6 * 2 * CHUNK * 2 * 2 * 16 * 8  # six chunks of two layers, in float64
    async with running(tally, kv_storage=host(size), num_blocks=15) as engine:
        for seed in range(3):
            await ask(engine, prompt(LENGTH, seed))
        await until(lambda: tally.counts["host_stored"] == 18 * CHUNK)
        assert tally.counts["host_bytes"] == size
        await ask(engine, prompt(LENGTH, 2))
    removed = [e for e in tally.events if isinstance(e, BlocksRemoved) and e.medium == "CPU"]
    assert len(removed) == 12


async def test_host_memory_keeps_a_prompt_that_was_used_again() -> None:
    tally, size = Tally(), 2 * 6 * 2 * CHUNK * 2 * 2 * 16 * 8  # of two prompts
    async with running(tally, kv_storage=host(size), num_blocks=14) as engine:
        for seed in (0, 1, 0):
            await ask(engine, prompt(LENGTH, seed))
        await until(lambda: tally.counts["host_stored"] == 12 * CHUNK)
        await ask(engine, prompt(LENGTH, 2))
        await until(lambda: tally.counts["host_stored"] == 18 * CHUNK)
        # The second prompt has left for the third one, and not the first, which was used since.
        loaded = tally.counts["host_loaded"]
        assert loaded == 6 * CHUNK
        await ask(engine, prompt(LENGTH, 0))
        assert tally.counts["host_loaded"] == loaded + 6 * CHUNK
        await ask(engine, prompt(LENGTH, 1))
        assert tally.counts["host_loaded"] == loaded + 6 * CHUNK


async def test_a_chunk_whose_write_failed_is_written_from_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put_if(files: FileStore, name: str, *_: object) -> None:
        raise StoreFull(f"{name}: the store is full")

    def read(*_: object) -> None:
        raise AssertionError("the chunk is in host memory")

    tally = Tally()
    async with running(tally, kv_storage=storage(tmp_path, host_bytes=1 << 30)) as engine:
        with monkeypatch.context() as full:
            full.setattr(FileStore, "put_if", put_if)
            await ask(engine, prompt(LENGTH))
            await until(lambda: tally.counts["not_stored_full"] == 6)
        assert tally.counts["host_stored"] == 6 * CHUNK
        monkeypatch.setattr(ChunkMemory, "read", read)
        assert engine.reset_prefix_cache()
        await ask(engine, prompt(LENGTH))
        await until(lambda: tally.counts["storage_stored"] == 6 * CHUNK)
    assert chunk_files(tmp_path) == 6


async def test_the_metrics_page_has_what_each_tier_stored_and_loaded(tmp_path: Path) -> None:
    metrics, settings = EngineMetrics("tiny"), storage(tmp_path, host_bytes=1 << 30)

    def value(name: str, **labels: str) -> float | None:
        labels |= {"model_name": "tiny", "engine": "0"}
        return metrics.registry.get_sample_value(name, labels)

    async with running(metrics, kv_storage=settings) as engine:
        await ask(engine, prompt(LENGTH))
        await until(lambda: value(names.ENGINE_TIER_STORED, tier="storage") == 6 * CHUNK)
        assert value(names.ENGINE_TIER_STORED, tier="host") == 6 * CHUNK
        size = value(names.ENGINE_HOST_TIER_BYTES)
        assert size == 6 * 2 * CHUNK * 2 * 2 * 16 * 8
        assert engine.reset_prefix_cache()
        await ask(engine, prompt(LENGTH))
    assert value(names.ENGINE_TIER_LOADED, tier="host") == 6 * CHUNK
    assert value(names.ENGINE_TIER_LOADED, tier="storage") == 0
    metrics = EngineMetrics("tiny")
    async with running(metrics, kv_storage=settings) as engine:
        await ask(engine, prompt(LENGTH))
    assert value(names.ENGINE_TIER_LOADED, tier="storage") == 6 * CHUNK
    assert value(names.ENGINE_TIER_LOADED, tier="host") == 0
    loaded = value(names.ENGINE_STORAGE_LOAD_BYTES)
    assert loaded is not None
    assert loaded >= size
    assert value(f"{names.ENGINE_STORAGE_LOAD_SECONDS}_count") == 1


async def test_events_name_the_tier(tmp_path: Path) -> None:
    tally = Tally()
    async with running(tally, kv_storage=storage(tmp_path, host_bytes=1 << 30)) as engine:
        await ask(engine, prompt(LENGTH))
    media: dict[str, list[bytes]] = {}
    for event in tally.events:
        if isinstance(event, BlocksStored):
            media.setdefault(event.medium, []).extend(event.hashes)
    assert sorted(media["CPU"]) == sorted(media["STORAGE"])
    assert set(media["CPU"]) <= set(media["GPU"])
    assert len(media["CPU"]) == 12


def in_storage(tally: Tally, kind: type[BlocksStored | BlocksRemoved]) -> list[bytes]:
    """Hashes in the KV events of storage, of one kind."""
    return [
        block_hash
        for event in tally.events
        if isinstance(event, kind) and event.medium == "STORAGE"
        for block_hash in event.hashes
    ]


async def test_chunks_that_the_collector_deletes_have_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "COLLECT_SECONDS", 0.01)
    tally = Tally()
    async with running(tally, kv_storage=storage(tmp_path, capacity_bytes=1)) as engine:
        await ask(engine, prompt(LENGTH))
        await until(lambda: len(in_storage(tally, BlocksRemoved)) == 12)
    assert sorted(in_storage(tally, BlocksRemoved)) == sorted(in_storage(tally, BlocksStored))


async def test_bounds_in_a_file_hold_as_soon_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "COLLECT_SECONDS", 0.01)
    tally, bounds = Tally(), tmp_path / "bounds.json"
    bounds.write_text("{}")
    async with running(tally, kv_storage=storage(tmp_path / "kv", bounds)) as engine:
        await ask(engine, prompt(LENGTH))
        await until(lambda: tally.counts["storage_stored"] == 6 * CHUNK)
        bounds.write_text('{"capacity_bytes": 1}')
        await until(lambda: len(in_storage(tally, BlocksRemoved)) == 12)
    assert chunk_files(tmp_path) == 0


async def test_chunks_that_a_load_finds_missing_have_an_event(tmp_path: Path) -> None:
    tally = Tally()
    async with running(tally, kv_storage=storage(tmp_path)) as engine:
        await ask(engine, prompt(LENGTH))
        await until(lambda: tally.counts["storage_stored"] == 6 * CHUNK)
        for file in tmp_path.rglob("?" * 64):
            file.unlink()
        assert engine.reset_prefix_cache()
        await ask(engine, prompt(LENGTH))
        # Computed again, so stored again.
        await until(lambda: tally.counts["storage_stored"] == 12 * CHUNK)
    removed = in_storage(tally, BlocksRemoved)
    assert len(removed) == 12
    assert sorted(in_storage(tally, BlocksStored)) == sorted(2 * removed)


async def test_two_engines_share_what_either_computed(tmp_path: Path) -> None:
    counts = Tally()
    async with (
        running(kv_storage=storage(tmp_path)) as writer,
        running(counts, kv_storage=storage(tmp_path)) as reader,
    ):
        await ask(writer, prompt(LENGTH))
        async with asyncio.timeout(20):
            while chunk_files(tmp_path) < 6:
                await asyncio.sleep(0.01)
        await ask(reader, prompt(LENGTH))
    assert counts.counts["storage_loaded"] == 6 * CHUNK


async def test_damaged_chunks_are_computed_and_replaced(tmp_path: Path) -> None:
    async with running(kv_storage=storage(tmp_path)) as engine:
        await ask(engine, prompt(LENGTH))
    # A small chunk's data follow its manifest.
    for file in tmp_path.rglob("?" * 64):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    tally, again = Tally(), Tally()
    async with running(tally, kv_storage=storage(tmp_path)) as engine:
        await ask(engine, prompt(LENGTH))
    assert tally.counts["not_loaded_corrupt"] == 6
    assert tally.counts["computed"] == LENGTH
    # The first chunk was found damaged and written again; the others are found by the next engines.
    async with running(again, kv_storage=storage(tmp_path)) as engine:
        await ask(engine, prompt(LENGTH))
    assert again.counts["storage_loaded"] >= CHUNK


async def test_an_aborted_load_frees_its_blocks(tmp_path: Path) -> None:
    async with running(kv_storage=storage(tmp_path)) as engine:
        await ask(engine, prompt(LENGTH))
    async with running(kv_storage=storage(tmp_path)) as engine:
        generation = engine.submit(Request("a", prompt(LENGTH), GREEDY(max_tokens=8)))
        await until(lambda: engine.stats().waiting_for_kv == 1)
        engine.abort("a")
        _, last = await finish(generation)
        assert last.finish_reason == "abort"
        await ask(engine, prompt(LENGTH), "b")


async def test_many_requests_at_once_get_right_answers(tmp_path: Path) -> None:
    # Shared prefixes, few blocks and little host memory: evictions, preemptions and loads overlap.
    source = random.Random(18)
    system = prompt(96)
    tally = Tally()
    settings = storage(tmp_path, host_bytes=300_000)
    for start in range(2):
        async with running(tally, kv_storage=settings, num_blocks=40) as engine:
            prompts = [(*system, *prompt(source.randrange(5, 150), i)) for i in range(12)]
            await asyncio.gather(
                *(ask(engine, tokens, f"{start}-{i}") for i, tokens in enumerate(prompts))
            )
    assert tally.counts["storage_loaded"] > 0


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
async def test_short_prompts(tmp_path: Path, length: int) -> None:
    for _ in range(2):
        async with running(kv_storage=storage(tmp_path)) as engine:
            await ask(engine, prompt(length))


async def test_a_request_that_waits_for_pinned_blocks_is_woken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    read = ChunkMemory.read

    def slow_read(memory: ChunkMemory, blocks: Sequence[int]) -> object:
        release.wait(20)
        return read(memory, blocks)

    monkeypatch.setattr(ChunkMemory, "read", slow_read)
    # All blocks for one prompt, and the copies of its chunks keep them after its end.
    async with running(kv_storage=host(1 << 30), num_blocks=14) as engine:
        await ask(engine, prompt(LENGTH))
        generation = engine.submit(Request("b", prompt(LENGTH, 1), GREEDY(max_tokens=8)))
        await until(lambda: engine.stats().waiting == 1)
        release.set()
        answer, _ = await finish(generation)
        assert answer == expected(prompt(LENGTH, 1), 8)


async def test_two_salts_share_no_block_on_any_tier(tmp_path: Path) -> None:
    settings = storage(tmp_path, host_bytes=1 << 30)
    first = Tally()
    async with running(first, kv_storage=settings) as engine:
        for salt in ("", "tenant-1", "tenant-2"):
            await ask(engine, prompt(LENGTH), salt=salt)
        # The device's prefix cache and host memory of one engine.
        assert first.counts["hits"] == first.counts["host_loaded"] == 0
        await ask(engine, prompt(LENGTH), salt="tenant-1")
    assert first.counts["computed"] == 3 * LENGTH + LENGTH - first.counts["hits"]
    assert first.counts["hits"] > 0
    other, same = Tally(), Tally()
    async with running(other, kv_storage=settings) as engine:
        await ask(engine, prompt(LENGTH), salt="tenant-3")
    assert other.counts["storage_loaded"] == 0
    async with running(same, kv_storage=settings) as engine:
        await ask(engine, prompt(LENGTH), salt="tenant-2")
    assert same.counts["storage_loaded"] == 6 * CHUNK
    hashes = [h for e in first.events if isinstance(e, BlocksStored) for h in e.hashes]
    salts = {e.cache_salt for e in first.events if isinstance(e, BlocksStored)}
    assert salts == {"", "tenant-1", "tenant-2"}
    assert len(set(hashes)) == 3 * 12
