"""What the SDKs of OpenAI and Anthropic make of a failing decode engine.

`sidecar.cells` has every API and failure with scripted engines; here are those that depend on what
vLLM itself writes.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tandem_contract import headers, metrics, transfer_params
from tandem_contract.request_kinds import RequestKind

from ..sidecar.peers import Peer, Turn
from ..sidecar.processes import sidecar
from ..sidecar.sdks import SDK_ERRORS, SDKS, Server
from .pairs import Moved, Pair, in_phase

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 24


# First: the engine that it kills starts again with the policy of the next test.
async def test_a_decode_engine_killed_in_mid_stream(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    """Each SDK raises an error of its own; the next request gets a 502."""
    server = Server(pair.url(""), pair.split)
    streams = [
        asyncio.create_task(ask(server, f"{kind}: the ship sails on " * 20, 3000, True))
        for kind, ask in SDKS.items()
    ]
    await in_phase(pair, http, "answering", len(SDKS))
    pair.decode.process.signal(signal.SIGKILL)
    results = await asyncio.gather(*streams, return_exceptions=True)
    for kind, result in zip(SDKS, results, strict=True):
        assert isinstance(result, SDK_ERRORS), f"{kind}: {result!r}"
        assert "decode failed" in str(result), kind
    with pytest.raises(SDK_ERRORS, match="502"):
        await SDKS[RequestKind.COMPLETIONS](server, "Hello", 1, False)


@pytest.fixture
async def failing(
    nixl: Pair, http: aiohttp.ClientSession, request: pytest.FixtureRequest
) -> AsyncIterator[Pair]:
    """The pair with vLLM's default policy at its decode engine: a failed KV load fails the request.

    Later tests get the engine as it was.
    """
    arguments = nixl.decode.container_document["args"]
    at = arguments.index("--kv-transfer-config") + 1
    before = arguments[at]
    arguments[at] = json.dumps(json.loads(before) | {"kv_load_failure_policy": "fail"})
    nixl.decode.process.end()
    await nixl.restore(http, request.session.testsfailed)
    yield nixl
    arguments[at] = before
    nixl.decode.process.end()


async def test_a_kv_load_that_fails_costs_no_answer(
    failing: Pair, http: aiohttp.ClientSession
) -> None:
    """The producer's answers name a port where no engine is."""

    async def name_no_engine(turn: Turn) -> None:
        url = failing.prefill.url(turn.request.target)
        sent = {"content-type": "application/json"}
        async with http.post(url, data=turn.request.body, headers=sent) as response:
            answer = await response.json()
        answer[transfer_params.FIELD] |= {"remote_engine_id": "gone", "remote_port": 1}
        turn.answer(200, json.dumps(answer).encode())

    moved = await Moved(http, failing.decode.url("/metrics")).begin()
    flags = ("--engine", f"http://{failing.decode.address}", "--prefill-allow", "127.0.0.0/8")
    async with (
        Peer(name_no_engine) as producer,
        sidecar(*flags, "--pod-name", "decode-0", "--silence-timeout", "30s") as process,
    ):
        server = Server(process.url(""), {headers.PREFILLER_HOST_PORT: str(producer.address)})
        for kind, ask in SDKS.items():
            for stream in (True, False):
                prompt = f"{kind} {stream}: " + "the harbour freezes " * 10
                alone = await ask(Server(failing.decode.url("")), prompt, TOKENS, False)
                assert await ask(server, prompt, TOKENS, stream) == alone != "", (kind, stream)
    assert await moved.by(metrics.ENGINE_XFER_FAILED) == 2 * len(SDKS)
