"""Hand-offs through storage between two engines that share a directory and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tandem_contract.kv_reference import (
    KvReference,
    LoadLeg,
    StoreAnswer,
    StoreLeg,
    read_reference,
)
from tandem_engine.engine import Engine
from tandem_engine.tiers import saves
from tandem_engine.tiers.settings import KvStorageConfig
from tandem_engine.types import Delta, KvTransfer, Request
from tandem_local.ports import free_port

from ..engines import GREEDY, Tally, expected, finish, prompt, running

CHUNK = 32
LENGTH = 200
TOKENS = prompt(LENGTH)
WHOLE = 6 * CHUNK
"""Tokens of TOKENS in full chunks."""
SOON = 1e-6
"""A time limit that ends before any object was read."""


def storage(directory: Path, namespace: str = "kv") -> KvStorageConfig:
    return KvStorageConfig(
        endpoint=f"file://{directory}", kv_namespace=namespace, chunk_tokens=CHUNK
    )


async def ask(engine: Engine, name: str, kv: KvTransfer, tokens: tuple[int, ...] = TOKENS) -> Delta:
    """Send one leg, compare its tokens with the dense reference, and return the last delta."""
    count = 1 if isinstance(kv, StoreLeg) else 8
    request = Request(name, tokens, GREEDY(max_tokens=count), kv)
    answer, last = await finish(engine.submit(request))
    assert answer == expected(tokens, count)
    return last


async def stored(engine: Engine, name: str, timeout: float = 60.0) -> StoreAnswer:
    last = await ask(engine, name, StoreLeg(timeout))
    return msgspec.convert(last.kv_transfer_params, StoreAnswer)


@dataclass
class Pair:
    p: Engine
    d: Engine
    counts_d: Tally = field(default_factory=Tally)


@asynccontextmanager
async def pair(directory: Path, namespace_d: str = "kv") -> AsyncIterator[Pair]:
    counts = Tally()
    async with (
        running(kv_storage=storage(directory)) as p,
        running(counts, kv_storage=storage(directory, namespace_d)) as d,
    ):
        yield Pair(p, d, counts)


async def reference(p: Engine, name: str = "a") -> KvReference:
    answer = await stored(p, name)
    assert answer.tandem_kv_reference is not None
    return answer.tandem_kv_reference


async def test_the_answer_names_kv_that_is_visible_and_decode_loads_it(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        named = await reference(both.p)
        # The path of the reference is the manifest's, below the endpoint.
        assert (tmp_path / named.path).is_file()
        assert named.token_count == WHOLE
        await ask(both.d, "b", LoadLeg(named, 60.0))
    counts = both.counts_d.counts
    assert counts["storage_loaded"] == WHOLE
    assert counts["computed"] == LENGTH - WHOLE
    assert counts["pull_failures"] == 0


async def test_every_chunk_that_an_answer_names_is_in_the_store(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        for index in range(8):
            tokens = prompt(LENGTH, index)
            last = await ask(both.p, f"p{index}", StoreLeg(60.0), tokens)
            files = sum(len(file.name) == 64 for file in tmp_path.rglob("*"))
            assert files >= (index + 1) * 6
            assert last.kv_transfer_params is not None
            read_reference(last.kv_transfer_params["tandem_kv_reference"])


async def test_kv_that_the_prefill_engine_had_already_is_named_too(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        first = await reference(both.p, "a")
        assert await reference(both.p, "again") == first


async def test_chunks_that_the_store_lost_are_not_named_and_are_stored_again(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as both:
        whole = await reference(both.p, "a")
        for file in tmp_path.rglob("*"):
            if len(file.name) == 64:
                file.unlink()
        # The engine believes that it is stored; only the look-up shows that it is not.
        assert await stored(both.p, "b") == StoreAnswer(tandem_kv_not_stored="missing")
        assert await reference(both.p, "c") == whole


async def test_a_prompt_without_a_chunk_has_nothing_to_store(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        last = await ask(both.p, "a", StoreLeg(60.0), prompt(CHUNK - 1))
    assert last.kv_transfer_params == {"tandem_kv_not_stored": "short"}


async def test_an_engine_without_storage_says_so_and_answers() -> None:
    counts = Tally()
    key = "ab" * 32
    async with running(counts) as engine:
        answer = await stored(engine, "a")
        assert answer == StoreAnswer(tandem_kv_not_stored="not_configured")
    async with running(counts, kv_storage=KvStorageConfig(host_bytes=1 << 20)) as engine:
        assert await stored(engine, "a") == answer
        await ask(engine, "b", LoadLeg(KvReference(f"kv/{key}", key, 256), 60.0))
    assert counts.counts["pull_failures"] == 1


async def test_a_store_that_is_down_is_named_as_the_reason() -> None:
    down = KvStorageConfig(
        endpoint=f"http://127.0.0.1:{free_port('127.0.0.1')}", chunk_tokens=CHUNK
    )
    async with running(kv_storage=down) as engine:
        answer = await stored(engine, "a")
    assert answer.tandem_kv_not_stored in ("unavailable", "breaker_open")


async def test_writes_that_take_longer_than_the_limit_are_not_named(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        late = StoreAnswer(tandem_kv_not_stored="timeout")
        assert await stored(both.p, "a", SOON) == late


async def test_a_load_that_is_late_is_computed_and_counted(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        named = await reference(both.p)
        await ask(both.d, "b", LoadLeg(named, SOON))
    assert both.counts_d.counts["computed"] == LENGTH
    assert both.counts_d.counts["pull_failures"] == 1
    assert both.counts_d.counts["not_loaded_timeout"] == 6


async def test_a_reference_of_another_prompt_reads_nothing(tmp_path: Path) -> None:
    """Also where it names objects of this store, which another request has written."""
    other = prompt(LENGTH, seed=5)
    async with pair(tmp_path) as both:
        named = await reference(both.p)
        await ask(both.d, "b", LoadLeg(named, 60.0), other)
    assert both.counts_d.counts["storage_loaded"] == 0
    assert both.counts_d.counts["pull_failures"] == 1
    assert both.counts_d.counts["computed"] == LENGTH


async def test_a_reference_outside_of_the_namespace_reads_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path, namespace_d="other") as both:
        named = await reference(both.p)
        await ask(both.d, "b", LoadLeg(named, 60.0))
        outside = KvReference(f"../kv/{named.prefix_hash}", named.prefix_hash, WHOLE)
        await ask(both.d, "c", LoadLeg(outside, 60.0))
    assert both.counts_d.counts["storage_loaded"] == 0
    assert both.counts_d.counts["pull_failures"] == 2


async def test_kv_that_the_decode_engine_has_is_not_loaded(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        named = await reference(both.p)
        await ask(both.d, "b", LoadLeg(named, 60.0))
        await ask(both.d, "c", LoadLeg(named, 60.0))
    assert both.counts_d.counts["loads"] == 1
    assert both.counts_d.counts["pull_failures"] == 0


async def test_a_stop_ends_prefills_that_wait_for_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saves, "_FLUSH_SECONDS", 0.01)
    writing, over = asyncio.Event(), asyncio.Event()

    async def answer_reads_only(request: web.Request) -> web.Response:
        if request.method == "PUT":
            writing.set()
            await over.wait()
        return web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer_reads_only)
    async with TestServer(app) as server:
        silent = KvStorageConfig(endpoint=str(server.make_url("")), chunk_tokens=CHUNK)
        async with running(kv_storage=silent) as engine:
            request = Request("a", TOKENS, GREEDY(max_tokens=1), StoreLeg(3600.0))
            answer = asyncio.create_task(finish(engine.submit(request)))
            await writing.wait()
        _, last = await answer
        over.set()
    assert last.finish_reason == "abort"
