"""The precise index: real engines' KV events, real tokenization, the real EPP behind Envoy."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract import ports
from tandem_local.addresses import allocate

from ...engine.engines import tiny_model
from ..real import Epp, envoy, envoy_settings, epp, process, until

# Four starts of an engine, each of which imports torch.
pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]
ENGINES = ("engine-1", "engine-2", "engine-3")
EVENTS = json.dumps(
    {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{ports.KV_EVENTS}",
        "replay_endpoint": f"tcp://*:{ports.KV_EVENTS_REPLAY}",
        "topic": "kv@pod@tiny",
    }
)
CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Answer in one word, and think of the weather. " * 6},
        {"role": "user", "content": [{"type": "text", "text": "Which ship finds the harbour?"}]},
    ],
    "max_tokens": 2,
    "temperature": 0,
}


@asynccontextmanager
async def engine(address: str, *flags: str, model: Path | None = None) -> AsyncIterator[str]:
    """A `tandem-engine` that publishes KV events; yields its URL."""
    command = (
        *(sys.executable, "-m", "tandem_engine.main", "--model", model or tiny_model()),
        *("--served-model-name", "tiny", "--host", address, "--port", str(ports.ENGINE_PREFILL)),
        *("--num-gpu-blocks-override", "256", "--kv-events-config", EVENTS),
        *flags,
    )
    url = f"http://{address}:{ports.ENGINE_PREFILL}"
    async with process(*command, OMP_NUM_THREADS="1") as started:

        async def answers() -> bool:
            assert started.returncode is None, "tandem-engine ended at its start"
            try:
                return (await _get(url + "/health"))[0] == 200
            except aiohttp.ClientError:
                return False

        await until(answers, within=120)
        yield url


async def _get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def _post(url: str, body: object) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def _config(urls: dict[str, str]) -> str:
    return json.dumps(
        {
            "backends": [
                {"name": name, "url": url, "role": "unified"} for name, url in urls.items()
            ],
            "plugins": [
                {"type": "precise-prefix-cache-producer"},
                # A deadline that a busy test machine meets.
                {
                    "type": "token-producer",
                    "parameters": {"path": str(tiny_model()), "vllm": {"timeout": "20s"}},
                },
                {"type": "prefix-cache-scorer"},
            ],
        }
    )


@asynccontextmanager
async def _envoy(directory: Path, picker: Epp, fallback: str) -> AsyncIterator[str]:
    address = fallback.removeprefix("http://")
    settings = envoy_settings(picker.grpc, [address], "FULL_DUPLEX_STREAMED")
    async with envoy(directory, settings) as url:
        yield url


async def test_requests_follow_blocks_that_the_epp_did_not_place(tmp_path: Path) -> None:
    needed = [ports.ENGINE_PREFILL, ports.KV_EVENTS, ports.KV_EVENTS_REPLAY]
    addresses = allocate(dict.fromkeys(ENGINES, needed), str(tmp_path))
    async with AsyncExitStack() as stack:
        # Both at once: an engine takes several seconds to import torch.
        starts = (stack.enter_async_context(engine(addresses[name])) for name in ENGINES[:2])
        await asyncio.gather(*starts)
        urls = {name: f"http://{addresses[name]}:{ports.ENGINE_PREFILL}" for name in ENGINES}
        # Before the EPP starts: it learns of these blocks from the replay.
        first = await _post(urls["engine-2"] + "/v1/chat/completions", CHAT)
        config = tmp_path / "router.yaml"
        config.write_text(_config(urls))
        picker = await stack.enter_async_context(epp(config))
        gateway = await stack.enter_async_context(_envoy(tmp_path, picker, urls["engine-1"]))
        await _knows(picker, 'blocks{backend="engine-2"}')
        answer = await _post(gateway + "/v1/chat/completions", CHAT)
        figures = await picker.figures()
        # Exactly the tokens that the engine itself found in its cache.
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["prompt_tokens"] - 16
        ratio = figures['tandem_epp_prefix_hit_ratio_sum{source="estimated"}']
        assert ratio == pytest.approx(cached / first["usage"]["prompt_tokens"])
        assert figures['tandem_epp_tokenization_seconds_count{result="tokenized"}'] == 1
        await _follows_an_engine(picker, gateway, addresses["engine-3"])


async def _knows(picker: Epp, figure: str) -> None:
    async def known() -> bool:
        return (await picker.figures()).get(f"tandem_epp_kv_{figure}", 0.0) > 0

    await until(known, within=60)


async def _follows_an_engine(picker: Epp, gateway: str, address: str) -> None:
    """An engine that starts after the EPP, stores blocks, and comes back empty."""
    prompt = {"model": "tiny", "prompt": list(range(4, 104)), "max_tokens": 1}
    async with engine(address) as url:
        await _knows(picker, 'events_knowledge{backend="engine-3"}')
        await _post(url + "/v1/completions", prompt)
        await _knows(picker, 'blocks{backend="engine-3"}')
        await until(lambda: picker.serves(*ENGINES), within=60)
        answer = await _post(gateway + "/v1/completions", prompt)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96

    async def state(knowledge: float) -> bool:
        figures = await picker.figures()
        return figures['tandem_epp_kv_events_knowledge{backend="engine-3"}'] == knowledge

    await until(lambda: state(0), within=60)
    async with engine(address):
        await until(lambda: state(2), within=60)
        assert (await picker.figures())['tandem_epp_kv_blocks{backend="engine-3"}'] == 0
