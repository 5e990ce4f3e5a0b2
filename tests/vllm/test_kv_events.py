"""The EPP's precise index with the events and the render endpoint of real vLLM."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_epp.prefix.kv_events.collector import EventCollector, PodEngine
from tandem_epp.prefix.kv_events.feed import Knowledge
from tandem_epp.prefix.kv_events.subscriber import EngineAddress
from tandem_epp.prefix.pod_blocks import PodBlocks
from tandem_epp.prefix.tokenization.tokenizer import PromptTokenizer, TokenizerSettings
from tandem_local.ports import free_port

from .engines import MODEL_NAME
from .single import BLOCK, SingleVllm, single_vllm

pytestmark = pytest.mark.vllm
POD = "vllm-0"
ANSWER = {"model": MODEL_NAME, "max_tokens": 1, "temperature": 0}
RESPONSE = {"model": MODEL_NAME, "max_output_tokens": 1, "temperature": 0}
TEXT = "The prefill pod reads all of the prompt at once and leaves its blocks behind. " * 4


@pytest.fixture(scope="module")
def address() -> EngineAddress:
    """Where the engine publishes its events."""
    events, replay = (f"tcp://127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2))
    return EngineAddress(events, replay, "kv@")


@pytest.fixture(scope="module")
def engine(
    model: Path, address: EngineAddress, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SingleVllm]:
    """One engine that publishes KV events."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": address.events.replace("127.0.0.1", "*"),
        "replay_endpoint": address.replay.replace("127.0.0.1", "*"),
        "topic": "kv@vllm-0@tiny",
    }
    flags = ("--enable-scale-out", "--kv-events-config", json.dumps(events))
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    with single_vllm(model, tmp_path_factory.mktemp("events"), *flags, env=env) as running:
        yield running


@pytest.fixture
async def collector() -> AsyncIterator[EventCollector]:
    new_collector = EventCollector(PodBlocks())
    yield new_collector
    await new_collector.close()


@pytest.fixture
async def tokenizer(engine: SingleVllm) -> AsyncIterator[PromptTokenizer]:
    settings = TokenizerSettings(url=engine.url, model=MODEL_NAME, deadline=60.0)
    new_tokenizer = PromptTokenizer(settings, lambda *_: None)
    yield new_tokenizer
    await new_tokenizer.close()


def _body(kind: RequestKind, fields: dict[str, Any]) -> dict[str, Any]:
    return (RESPONSE if kind is RequestKind.RESPONSES else ANSWER) | fields


async def _ask(
    http: aiohttp.ClientSession, url: str, kind: RequestKind, fields: dict[str, Any]
) -> int:
    """Send a request; returns the tokens that the engine found in its cache."""
    async with http.post(url + PATHS[kind], json=_body(kind, fields)) as response:
        answer = await response.json()
        assert response.status == 200, answer
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


async def _cached(
    collector: EventCollector, tokenizer: PromptTokenizer, kind: RequestKind, body: Any
) -> int:
    """The tokens that the index has of a prompt, as the engine counts: it computes at least one."""
    prompt = await tokenizer.tokenize(kind, json.dumps(body).encode())
    assert prompt is not None
    match = await collector.match(prompt)
    prefix = match.cached(POD)
    assert prefix is not None
    return min(prefix.total, (match.prompt_tokens - 1) // BLOCK * BLOCK)


async def test_the_index_knows_what_the_engine_finds_in_its_cache(
    engine: SingleVllm,
    address: EngineAddress,
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
        (RequestKind.RESPONSES, {"instructions": "Be brief.", "input": TEXT}),
    ]
    half = len(requests) // 2
    for kind, fields in requests[:half]:
        await _ask(http, engine.url, kind, fields)
    # The first half is replayed, the rest comes while the collector listens.
    collector.sync([PodEngine(POD, 1, address)])
    async with asyncio.timeout(60):
        while collector.knowledge(POD) is not Knowledge.WHOLE:
            await asyncio.sleep(0.05)
    for kind, fields in requests[half:]:
        await _ask(http, engine.url, kind, fields)
    for kind, fields in requests:
        body = _body(kind, fields)
        async with asyncio.timeout(60):
            while not (known := await _cached(collector, tokenizer, kind, body)):
                await asyncio.sleep(0.05)
        assert await _ask(http, engine.url, kind, fields) == known
    assert collector.events["malformed"] == collector.events["unplaced"] == 0
    async with http.post(engine.url + "/reset_prefix_cache") as response:
        assert response.status == 200
    # vLLM publishes events with its next step; this prompt is shorter than a block.
    await _ask(http, engine.url, RequestKind.COMPLETIONS, {"prompt": [5, 6, 7]})
    async with asyncio.timeout(60):
        while collector.blocks.count(POD):
            await asyncio.sleep(0.05)


async def test_a_model_directory_gives_the_tokens_that_the_engine_renders(
    engine: SingleVllm, tokenizer: PromptTokenizer, model: Path
) -> None:
    await engine.ready()
    local = PromptTokenizer(TokenizerSettings(directory=str(model), deadline=60.0), lambda *_: None)
    answer = {"type": "output_text", "text": "Blocks.", "annotations": []}
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": TEXT}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [answer],
        },
        {"role": "user", "content": "Whose?"},
    ]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    function = {"name": "count", "arguments": '{"of": "blocks"}'}
    call = {"id": "c1", "type": "function", "function": function}
    tool_use = [
        *messages,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
    ]
    requests: list[tuple[RequestKind, dict[str, Any]]] = [
        (RequestKind.COMPLETIONS, {"prompt": TEXT}),
        (RequestKind.CHAT, {"messages": messages}),
        (RequestKind.CHAT, {"messages": tool_use}),
        (RequestKind.RESPONSES, {"input": TEXT}),
        (RequestKind.RESPONSES, {"instructions": "Be brief.", "input": turns}),
    ]
    for kind, fields in requests:
        body = json.dumps(_body(kind, fields)).encode()
        rendered, tokenized = await tokenizer.tokenize(kind, body), await local.tokenize(kind, body)
        assert rendered is not None
        assert tokenized is not None
        assert list(tokenized.token_ids) == list(rendered.token_ids)
    await local.close()
