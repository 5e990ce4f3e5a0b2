"""TandemStorageConnector on real vLLM: engines load what others stored; tokens never change."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract import endpoints, headers
from tandem_contract.paths import RoutingPath

from ..kvstore.servers import store_in_this_process
from .api_requests import KINDS, ask
from .engines import MODEL_NAME, make_pair, metric
from .pairs import Moved, Pair, until
from .pairs import page as metrics_page
from .single import SingleVllm, single_vllm
from .storage import CHUNK, data_objects, mount_packages, packages, transfer_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LOADED = "tandem_vllm_storage_loaded_tokens_total"
STORED = "tandem_vllm_storage_stored_tokens_total"
NOT_LOADED = "tandem_vllm_storage_not_loaded_chunks_total"


async def test_an_engine_that_restarted_loads_what_it_stored(
    model: Path, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    config = transfer_config(f"file://{store}")
    # One ends in a chunk, one with a chunk, and one has none.
    prompts = [prompt(seed, length) for seed, length in ((1, 1500), (2, 3 * CHUNK), (3, 100))]
    in_chunks = 5 * CHUNK + 3 * CHUNK
    env = {"PYTHONPATH": packages(tmp_path), "VLLM_SERVER_DEV_MODE": "1"}
    with single_vllm(model, tmp_path, "--kv-transfer-config", config, env=env) as engine:
        await engine.ready()
        first = [await completion(http, engine, tokens) for tokens in prompts]
        # No request is needed for the engine to notice that its writes have ended.
        await engine.metric_reaches(http, STORED, in_chunks)
        assert metric(await engine.metrics(http), LOADED) == 0

    with single_vllm(model, tmp_path, "--kv-transfer-config", config, env=env) as engine:
        await engine.ready()
        before = await engine.metrics(http)
        # A load has a deadline, which it can miss on a busy machine: the prompt is computed then.
        while metric(page := await engine.metrics(http), LOADED) < in_chunks:
            assert [await completion(http, engine, tokens) for tokens in prompts] == first
            await forget(http, engine)
        loaded = metric(page, LOADED)
        assert metric(page, "vllm:external_prefix_cache_hits_total") >= loaded
        assert metric(before, "vllm:external_prefix_cache_hits_total") == 0

        for path in data_objects(store):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        while not metric(await engine.metrics(http), NOT_LOADED, reason="corrupt"):
            assert [await completion(http, engine, tokens) for tokens in prompts] == first
            await forget(http, engine)


async def test_storage_beside_a_hand_off(
    model: Path, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """NIXL comes first; the prefill engine saves, and nothing depends on the store."""
    kind = KINDS["completions"]
    body = kind.body("All the same. " * 80, cache_salt="a conversation")
    async with AsyncExitStack() as stack, AsyncExitStack() as store:
        server = await store.enter_async_context(store_in_this_process(tmp_path / "store"))
        engines = make_pair(model, tmp_path, storage={"endpoint": server.location.endpoint})
        for engine in engines:
            mount_packages(engine, tmp_path)
        pair = Pair(*engines, tmp_path)
        stack.callback(pair.end)
        await asyncio.to_thread(pair.start)
        await pair.shake_hands(http)

        moved = await Moved(http, pair.decode.url(endpoints.METRICS)).begin()
        answer = await pair.handed_off(http, kind, body)
        assert answer.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE

        async def is_transferred() -> bool:
            return await moved.by("vllm:nixl_bytes_transferred_sum") > 0

        await until(is_transferred, 120)
        assert await moved.by(LOADED) == 0, "the hand-off comes first"
        text = kind.text(answer)
        assert kind.text(await pair.alone(http, kind, body)) == text

        async def is_stored() -> bool:
            page = await metrics_page(http, pair.prefill.url(endpoints.METRICS))
            return metric(page, STORED) >= CHUNK

        async def without_peer() -> str:
            # The prompt is in the decode engine's prefix cache from the request before.
            async with http.post(pair.decode.url("/reset_prefix_cache")) as reset:
                assert reset.status == 200
            return kind.text(await ask(http, pair.decode.url(kind.path), body))

        await until(is_stored, 120)
        # It loads the chunk or computes it, as the cost model decides.
        assert await without_peer() == text

        await store.aclose()
        moved = await Moved(http, pair.decode.url(endpoints.METRICS)).begin()
        while not await moved.by(NOT_LOADED):
            assert await without_peer() == text
        assert kind.text(await pair.handed_off(http, kind, body)) == text


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(4, 190), k=length)


async def forget(http: aiohttp.ClientSession, engine: SingleVllm) -> None:
    """Empty the engine's own prefix cache."""
    async with http.post(f"{engine.url}/reset_prefix_cache") as answer:
        assert answer.status == 200, await answer.text()


async def completion(
    http: aiohttp.ClientSession, engine: SingleVllm, tokens: Sequence[int]
) -> list[Any]:
    """The ids of the tokens that the engine answers."""
    body = {
        "model": MODEL_NAME, "prompt": list(tokens), "max_tokens": 8, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    async with http.post(f"{engine.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        [choice] = (await answer.json())["choices"]
    return list(choice["token_ids"])
