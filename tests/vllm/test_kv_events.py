"""The EPP's precise index with the events and the render endpoint of real vLLM."""

import asyncio
import json
import os
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract import endpoints
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_epp.backends.pod_blocks import PodBlocks
from tandem_epp.kv_events.collector import EventCollector, PodEngine
from tandem_epp.kv_events.feed import Knowledge
from tandem_epp.kv_events.subscriber import EngineAddress
from tandem_epp.tokenization.tokenizer import PromptTokenizer, TokenizerSettings
from tandem_local.addresses import free_port
from tandem_local.process import tail

from .engines import MODEL_NAME, ON_A_CPU, STARTS_WITHIN, VENV, Spawned

pytestmark = pytest.mark.vllm
BLOCK = 32
POD = "vllm-0"
ANSWER = {"model": MODEL_NAME, "max_tokens": 1, "temperature": 0}
TEXT = "The prefill pod reads all of the prompt at once and leaves its blocks behind. " * 4


class PublishingVllm:
    """One engine, without a hand-off, that publishes KV events."""

    def __init__(self, model: Path, directory: Path) -> None:
        serving, self._events, self._replay = (free_port("127.0.0.1") for _ in range(3))
        self.url, self._log = f"http://127.0.0.1:{serving}", directory / "vllm.log"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._events}",
            "replay_endpoint": f"tcp://*:{self._replay}",
            "topic": "kv@vllm-0@tiny",
        }
        command = (
            *(str(VENV / "bin/python"), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", MODEL_NAME, "--dtype", "float32"),
            *("--host", "127.0.0.1", "--port", str(serving), "--block-size", str(BLOCK)),
            *("--max-model-len", "4096", "--enforce-eager", "--num-gpu-blocks-override", "256"),
            *("--enable-scale-out", "--enable-prompt-tokens-details"),
            *("--kv-events-config", json.dumps(events)),
        )
        env = {"PATH": os.environ["PATH"], "USER": "tandem", "VLLM_SERVER_DEV_MODE": "1"}
        self.process = Spawned(command, {**env, **ON_A_CPU}, self._log)

    @property
    def address(self) -> EngineAddress:
        events, replay = (f"tcp://127.0.0.1:{port}" for port in (self._events, self._replay))
        return EngineAddress(events, replay, "kv@")

    async def ready(self) -> None:
        async with asyncio.timeout(STARTS_WITHIN):
            while not self._is_healthy():
                assert not self.process.ended(), "\n".join(tail(self._log))
                await asyncio.sleep(0.2)

    def _is_healthy(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(self.url + endpoints.HEALTH, timeout=30):
            return True
        return False


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PublishingVllm]:
    running = PublishingVllm(model, tmp_path_factory.mktemp("events"))
    yield running
    running.process.end()


@pytest.fixture
async def collector() -> AsyncIterator[EventCollector]:
    new_collector = EventCollector(PodBlocks())
    yield new_collector
    await new_collector.close()


@pytest.fixture
async def tokenizer(engine: PublishingVllm) -> AsyncIterator[PromptTokenizer]:
    settings = TokenizerSettings(url=engine.url, model=MODEL_NAME, deadline=60.0)
    new_tokenizer = PromptTokenizer(settings, lambda *_: None)
    yield new_tokenizer
    await new_tokenizer.close()


async def _ask(http: aiohttp.ClientSession, url: str, body: object) -> int:
    """Send a request; returns the tokens that the engine found in its cache."""
    async with http.post(url, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def _cached(
    collector: EventCollector, tokenizer: PromptTokenizer, kind: RequestKind, body: Any
) -> int:
    """The tokens that the index has of a prompt, as the engine counts: it computes at least one."""
    prompt = await tokenizer.tokenize(kind, json.dumps(body).encode())
    assert prompt is not None
    match = collector.match(prompt)
    prefix = match.cached(POD)
    assert prefix is not None
    return min(prefix.total, (match.prompt_tokens - 1) // BLOCK * BLOCK)


async def test_the_index_knows_what_the_engine_finds_in_its_cache(
    engine: PublishingVllm,
    collector: EventCollector,
    tokenizer: PromptTokenizer,
    http: aiohttp.ClientSession,
) -> None:
    await engine.ready()
    requests: list[tuple[RequestKind, dict[str, Any]]] = [
        (RequestKind.COMPLETIONS, {"prompt": TEXT}),
        (RequestKind.COMPLETIONS, {"prompt": TEXT, "cache_salt": "tenant"}),
        (RequestKind.COMPLETIONS, {"prompt": list(range(10, 110))}),
        (RequestKind.CHAT, {"messages": [{"role": "user", "content": TEXT}]}),
    ]
    half = len(requests) // 2
    for kind, fields in requests[:half]:
        await _ask(http, engine.url + PATHS[kind], ANSWER | fields)
    # The first half is replayed, the rest comes while the collector listens.
    collector.sync([PodEngine(POD, 1, engine.address)])
    async with asyncio.timeout(60):
        while collector.knowledge(POD) is not Knowledge.WHOLE:
            await asyncio.sleep(0.05)
    for kind, fields in requests[half:]:
        await _ask(http, engine.url + PATHS[kind], ANSWER | fields)
    for kind, fields in requests:
        body = ANSWER | fields
        async with asyncio.timeout(60):
            while not (known := await _cached(collector, tokenizer, kind, body)):
                await asyncio.sleep(0.05)
        assert await _ask(http, engine.url + PATHS[kind], body) == known
    assert collector.events["malformed"] == collector.events["unplaced"] == 0
    async with http.post(engine.url + "/reset_prefix_cache") as response:
        assert response.status == 200
    # vLLM publishes events with its next step; this prompt is shorter than a block.
    await _ask(http, engine.url + PATHS[RequestKind.COMPLETIONS], ANSWER | {"prompt": [5, 6, 7]})
    async with asyncio.timeout(60):
        while collector.blocks.count(POD):
            await asyncio.sleep(0.05)
