"""The real engine behind the real server: same tokens by every way, and nothing leaks."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tandem_contract import headers
from tandem_contract.timing import parse_timing
from tandem_contract.transfer_params import PREFILL_LEG
from tandem_engine.chat import ChatTemplate
from tandem_engine.config import EngineConfig, KvRole, KvTransferConfig
from tandem_engine.engine import Engine
from tandem_engine.metrics import EngineMetrics
from tandem_engine.process import run_engine
from tandem_engine.served_model import ServedModel
from tandem_engine.server import EngineServer
from tandem_engine.settings import Settings
from tandem_engine.text import Tokenizer
from tandem_engine.tiny import make_tiny_model

from .serving import listening

pytestmark = pytest.mark.component
PROMPT = "The decode pod takes these blocks over the network and writes the answer."
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
BLOCKS = 64


@dataclass
class RunningEngine:
    engine: Engine
    http: aiohttp.ClientSession
    port: int

    async def post(self, body: object, **options: Any) -> dict[str, Any]:
        async with self.http.post("/v1/completions", json=body, **options) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def blocks_free(self) -> None:
        """Wait until every block is free."""
        while self.engine.stats().free_blocks < BLOCKS:
            await asyncio.sleep(0)


Start = Callable[..., Awaitable[RunningEngine]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(directory, layers=2, hidden=64)
    return directory


@pytest.fixture
async def start(model: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def _start(role: KvRole | None = None) -> RunningEngine:
            transfer = None
            if role is not None:
                transfer = KvTransferConfig(role, engine_id=role.value, side_channel_port=0)
            metrics = EngineMetrics("tiny")
            config = EngineConfig(
                model, "tiny", dtype="float64", num_blocks=BLOCKS, kv_transfer=transfer
            )
            engine = Engine(config, metrics)
            await engine.start()
            stack.push_async_callback(engine.stop)
            limits = engine.limits
            served_model = ServedModel(
                ("tiny",), "tiny", limits.max_model_len, limits.vocab_size,
                Tokenizer(model), ChatTemplate(model),
            )  # fmt: skip
            connections = EngineServer(engine, served_model, metrics).connections()
            port = await stack.enter_async_context(listening(connections))
            http = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
            return RunningEngine(engine, await stack.enter_async_context(http), port)

        yield _start


def _text(answer: dict[str, Any]) -> str:
    text = answer["choices"][0]["text"]
    assert isinstance(text, str)
    return text


async def test_a_stream_has_the_text_of_the_answer_without_streaming(start: Start) -> None:
    server = await start()
    whole = await server.post(GREEDY)
    async with server.http.post("/v1/completions", json={**GREEDY, "stream": True}) as response:
        events = (await response.text()).split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == _text(whole)
    await server.blocks_free()


async def test_a_second_time_the_prompt_is_cached(start: Start) -> None:
    server = await start()
    first, second = [await server.post(GREEDY) for _ in range(2)]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert _text(first) == _text(second)


async def test_a_stop_string_ends_the_answer_before_it(start: Start) -> None:
    server = await start()
    text = _text(await server.post(GREEDY))
    stop = text[5:8]
    answer = await server.post({**GREEDY, "max_tokens": 900, "stop": stop})
    assert _text(answer) == text[: text.index(stop)]
    assert answer["choices"][0]["stop_reason"] == stop
    await server.blocks_free()


async def test_logprobs_of_the_greedy_choice_are_the_highest(start: Start) -> None:
    server = await start()
    answer = await server.post({**GREEDY, "logprobs": 3})
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 12
    for token_logprob, top in zip(
        logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert token_logprob == max(top.values())


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-300},
        {"temperature": 100, "top_k": 2**31 - 1, "top_p": 1e-300},
        {"temperature": 1, "seed": 2**63 - 1, "n": 3},
        {"stop_token_ids": [0, 511], "min_tokens": 12, "ignore_eos": False},
        {"logprobs": 20, "stop": ["\ufffd", "a" * 5000]},
    ],
)
async def test_no_parameter_a_client_may_send_stops_the_engine(
    start: Start, extreme: dict[str, Any]
) -> None:
    server = await start()
    answer = await server.post({**GREEDY, **extreme})
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    assert server.engine.healthy


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_frees_its_blocks(start: Start, stream: bool) -> None:
    server = await start()
    body = json.dumps({**GREEDY, "max_tokens": 900, "n": 2, "stream": stream}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    while server.engine.stats().running < 2:
        await asyncio.sleep(0)
    writer.close()
    await writer.wait_closed()
    await server.blocks_free()


async def test_a_hand_off_over_http(start: Start) -> None:
    alone, producer, consumer = [
        await start(role) for role in (None, KvRole.PRODUCER, KvRole.CONSUMER)
    ]
    leg = {**GREEDY, "max_tokens": 1, "kv_transfer_params": json.loads(PREFILL_LEG)}
    params = (await producer.post(leg))["kv_transfer_params"]
    assert producer.engine.stats().held_requests == 1
    async with consumer.http.post(
        "/v1/completions", json={**GREEDY, "kv_transfer_params": params}
    ) as response:
        answer = await response.json()
    timing = parse_timing(response.headers[headers.TIMING])
    assert timing.bytes
    # The last token is computed again.
    assert timing.computed == 1
    assert _text(answer) == _text(await alone.post(GREEDY))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    async with consumer.http.get("/metrics") as response:
        assert "vllm:nixl_xfer_time_seconds_count" in await response.text()
    await asyncio.gather(producer.blocks_free(), consumer.blocks_free())


async def test_a_decode_leg_refused_for_its_model_frees_the_producer(start: Start) -> None:
    producer, consumer = [await start(role) for role in (KvRole.PRODUCER, KvRole.CONSUMER)]
    leg = {**GREEDY, "max_tokens": 1, "kv_transfer_params": json.loads(PREFILL_LEG)}
    params = (await producer.post(leg))["kv_transfer_params"]
    body = {"model": "nobody", "prompt": "x", "max_tokens": 1, "kv_transfer_params": params}
    async with consumer.http.post("/v1/completions", json=body) as response:
        assert response.status == 404
    await producer.blocks_free()
    assert producer.engine.stats().held_requests == 0


async def _ready(http: aiohttp.ClientSession) -> None:
    while True:
        try:
            async with http.get("/health") as response:
                assert response.status == 200
                return
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.01)


async def test_past_the_shutdown_timeout_a_stream_ends_with_an_error(model: Path) -> None:
    config = EngineConfig(model, "tiny", dtype="float64", num_blocks=BLOCKS)
    settings = Settings(
        config, ("tiny",), "127.0.0.1", 0, events=None, shutdown_timeout=0, body_limit=1000
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = "http://127.0.0.1:{1}".format(*listener.getsockname())
        life = asyncio.create_task(
            run_engine(settings, Tokenizer(model), ChatTemplate(model), listener)
        )
        async with aiohttp.ClientSession(url) as http:
            await _ready(http)
            body = {**GREEDY, "max_tokens": 900, "stream": True}
            async with http.post("/v1/completions", json=body) as response:
                await response.content.readline()
                os.kill(os.getpid(), signal.SIGTERM)
                last = (await response.text()).split("data: ")[-1]
        assert json.loads(last)["error"]["code"] == 503
        await life
