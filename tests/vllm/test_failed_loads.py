"""KV that vLLM cannot load under its own default policy, `fail`: every API falls back."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import headers
from tandem_contract.paths import RoutingPath

from .api_requests import KINDS, RequestKind
from .engines import make_pair
from .pairs import Pair, in_phase, stopped

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CASES = [(kind, stream) for kind in KINDS.values() for stream in (False, True)]


@pytest.fixture(scope="module")
def failing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("failing")
    prefill, decode = make_pair(model, directory)
    arguments = decode.container_document["args"]
    decode.container_document["args"] = [a.replace('"recompute"', '"fail"') for a in arguments]
    assert arguments != decode.container_document["args"]
    running = Pair(prefill, decode, directory)
    try:
        running.start()
        yield running
    finally:
        running.end()


async def test_each_api_falls_back_when_the_kv_cannot_be_loaded(
    failing: Pair, http: aiohttp.ClientSession
) -> None:
    """The producer dies before the decode engine reads: vLLM answers 500, or streams the role of a
    chat, `message_start` or `response.created` and then an error, or nothing more."""
    await failing.restore(http, 0)
    bodies = [
        kind.body(f"{number}: the harbour is empty. " * 10, stream=stream)
        for number, (kind, stream) in enumerate(CASES)
    ]
    expected = [
        kind.text(await failing.alone(http, kind, body))
        for (kind, _), body in zip(CASES, bodies, strict=True)
    ]

    async def ask(kind: RequestKind, body: dict[str, object]) -> tuple[str, str]:
        answer = await failing.handed_off(http, kind, body)
        return kind.text(answer), answer.headers[headers.ROUTING_PATH]

    async with stopped(failing.decode):
        clients = [
            asyncio.create_task(ask(kind, body))
            for (kind, _), body in zip(CASES, bodies, strict=True)
        ]
        await in_phase(failing, http, "decoding", len(CASES))
        failing.prefill.process.end()
    answers = await asyncio.gather(*clients)
    assert answers == [(text, RoutingPath.FALLBACK) for text in expected]
