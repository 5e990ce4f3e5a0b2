"""TandemStorageConnector on real vLLM: engines load what others stored; tokens never change."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .engines import MODEL_NAME, metric
from .single import SingleVllm, single_vllm
from .storage import CHUNK, packages, transfer_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def test_an_engine_loads_what_the_one_before_it_stored(
    model: Path, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    config = transfer_config(f"file://{store}")
    prompts = [prompt(seed, length) for seed, length in ((1, 1500), (2, 3 * CHUNK), (3, 100))]
    env = {"PYTHONPATH": packages(tmp_path)}
    with single_vllm(model, tmp_path, "--kv-transfer-config", config, env=env) as engine:
        await engine.ready()
        first = [await completion(http, engine, tokens) for tokens in prompts]
        # An empty step reports what was written: no request is needed for it.
        await engine.metric_reaches(http, "tandem_vllm_storage_stored_tokens_total", 8 * CHUNK)
        page = await engine.metrics(http)
    assert metric(page, "tandem_vllm_storage_loaded_tokens_total") == 0

    with single_vllm(model, tmp_path, "--kv-transfer-config", config, env=env) as engine:
        await engine.ready()
        second = [await completion(http, engine, tokens) for tokens in prompts]
        page = await engine.metrics(http)
    assert second == first
    loaded = 5 * CHUNK + 3 * CHUNK
    assert metric(page, "tandem_vllm_storage_loaded_tokens_total") == loaded
    source = "vllm:prompt_tokens_by_source_total"
    # Of a prompt that was loaded as a whole, the last token is computed.
    assert metric(page, source, source="external_kv_transfer") in (loaded, loaded - 1)
    assert metric(page, source, source="local_compute") <= sum(map(len, prompts)) - loaded + 1


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(4, 190), k=length)


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
