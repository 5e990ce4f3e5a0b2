"""TandemStorageConnector on real vLLM: engines load what others stored; tokens never change."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .engines import MODEL_NAME, metric
from .single import SingleVllm, single_vllm
from .storage import CHUNK, data_objects, packages, transfer_config

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
