"""The proxy of aiohttp that the sidecar is compared with: it passes on both kinds of answers."""

import asyncio
import json

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer, unused_port
from benchmarks import fake_engine
from benchmarks.aiohttp_proxy import application

pytestmark = pytest.mark.component


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_passes_through_as_it_is(stream: bool) -> None:
    port = unused_port()
    engine = asyncio.create_task(fake_engine.serve(["127.0.0.1"], port, chunks=8, interval=0.0))
    body = json.dumps({"model": "bench", "stream": stream}, separators=(",", ":"))
    url = f"http://127.0.0.1:{port}"
    try:
        async with ClientSession(url) as direct, TestClient(TestServer(application(url))) as proxy:
            asked = {"data": body, "headers": {"content-type": "application/json"}}
            async with proxy.post("/v1/chat/completions", **asked) as passed:
                answer = await passed.read()
            async with direct.post("/v1/chat/completions", **asked) as itself:
                assert (passed.status, passed.content_type) == (200, itself.content_type)
                assert answer == await itself.read()
            async with direct.get("/counts") as counts:
                assert (await counts.json())["requests"] == 2
    finally:
        engine.cancel()
