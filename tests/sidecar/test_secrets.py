"""Prompts, keys and header values appear neither in the log nor on the admin port."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest

from .peers import FakeDecode, FakePrefill, Turn
from .processes import Sidecar, sidecar
from .wire import wire

pytestmark = pytest.mark.component
SECRET = "s3cr3t"
BODY = json.dumps({"prompt": SECRET, "messages": [{"role": "user", "content": SECRET}]})
MARKED = (
    f"authorization: Bearer {SECRET}",
    f"x-api-key: {SECRET}",
    f"cookie: {SECRET}",
    f"x-{SECRET}: 1",
    f"traceparent: 00-{SECRET}-{SECRET}-01",
    f"tracestate: k={SECRET}",
)
IN_PATH = "h1dd3n"
"""Part of a path. Only /requests/ID may show it: the path belongs to the request asked for."""
PATHS = ("/v1/completions", "/v1/chat/completions", f"/v1/{IN_PATH}", f"/{IN_PATH}/v1/completions")
ROUTES = (
    f"x-prefiller-host-port: {SECRET}",
    f"x-prefiller-host-port: {SECRET}:1",
    f"x-tandem-plan: {SECRET}",
    f"x-request-id: not an id {SECRET}",
)


def error(turn: Turn, status: int) -> None:
    turn.answer(status, json.dumps({"error": {"message": SECRET}}).encode(), f"x-{SECRET}: 1")


async def fine(turn: Turn) -> None:
    turn.answer(200, json.dumps({"text": SECRET, "kv_transfer_params": None}).encode())


async def refused(turn: Turn) -> None:
    error(turn, 400)


async def busy(turn: Turn) -> None:
    error(turn, 503)


async def broken(turn: Turn) -> None:
    error(turn, 500)


async def babble(turn: Turn) -> None:
    turn.send(f"HTTP/1.1 2{SECRET} what\r\n{SECRET}\r\n\r\n".encode())


async def bad_chunk(turn: Turn) -> None:
    turn.stream()
    turn.event(SECRET)
    turn.send(f"{SECRET}\r\n".encode())


async def dies(turn: Turn) -> None:
    turn.stream()
    turn.event(SECRET)
    turn.die()


async def error_event(turn: Turn) -> None:
    turn.stream()
    turn.event(json.dumps({"error": {"message": SECRET}}))
    turn.end()


async def odd_params(turn: Turn) -> None:
    params = {"remote_block_ids": SECRET, "remote_engine_id": [SECRET], "transfer_mode": SECRET}
    turn.answer(200, json.dumps({"kv_transfer_params": params}).encode())


SCRIPTS = (fine, refused, busy, broken, babble, bad_chunk, dies, error_event, odd_params)


@dataclass
class Scene:
    server: Sidecar
    decode: FakeDecode
    prefill: FakePrefill

    async def ask(self, path: str, *headers: str, body: str = BODY) -> None:
        """Send a request and read whatever is answered, if anything."""
        async with wire(self.server.listen) as client:
            client.post(body.encode(), "connection: close", *MARKED, *headers, path=path)
            await client.closed()


@asynccontextmanager
async def start_scene() -> AsyncIterator[Scene]:
    async with FakeDecode() as decode, FakePrefill() as prefill:
        flags = ("--log-format", "json", "--log-level", "debug", "--silence-timeout", "200ms")
        engine = ("--engine", f"http://{decode.address}", "--prefill-allow", str(prefill.address))
        async with sidecar(*flags, *engine) as server:
            yield Scene(server, decode, prefill)


async def pages(server: Sidecar) -> dict[str, str]:
    """The text of all admin pages."""
    texts = {}
    async with aiohttp.ClientSession() as http:
        for path in ("/metrics", "/state", "/readyz", "/requests/known"):
            async with http.get(server.admin_url(path)) as answer:
                texts[path] = await answer.text()
    return texts


async def test_no_secret_is_logged_or_shown() -> None:
    async with start_scene() as scene:
        split = f"x-prefiller-host-port: {scene.prefill.address}"
        for script in SCRIPTS:
            scene.decode.generate = script
            scene.prefill.script = FakePrefill().default
            for path in PATHS:
                await scene.ask(f"{path}?key={SECRET}", "x-request-id: known")
            await scene.ask("/v1/completions", split, "x-request-id: known")
            scene.decode.generate, scene.prefill.script = fine, script
            await scene.ask("/v1/completions", split, "x-request-id: known")
        for line in ROUTES:
            await scene.ask("/v1/completions", line)
        for body in (SECRET, f'{{"{SECRET}": {SECRET}}}', f'["{SECRET}"]', '{"model": 1}'):
            await scene.ask("/v1/completions", body=body)
        async with wire(scene.server.listen) as client:
            client.send(f"{SECRET} /{IN_PATH} HTTP/1.1\r\n{SECRET}\r\n\r\n".encode())
            await client.closed()
        await check_pages_during_request(scene)
        scene.server.process.terminate()
        log = await scene.server.read_log_to_end()
        assert around(log) == set()
        assert IN_PATH not in log
        lines = [json.loads(line) for line in log.splitlines()[1:]]
        assert [line["outcome"] for line in lines if line["message"] == "request ended"]
        assert "Traceback" not in log


def around(text: str) -> set[str]:
    """The places where the secret occurs in `text`."""
    return set(re.findall(rf".{{0,80}}(?:{SECRET}).{{0,20}}", text))


async def check_pages_during_request(scene: Scene) -> None:
    """Check the admin pages while a request runs, after many others."""
    go = asyncio.Event()

    async def stream_until_go(turn: Turn) -> None:
        turn.stream()
        turn.event(SECRET)
        await go.wait()
        turn.end()

    scene.decode.generate = stream_until_go
    async with wire(scene.server.listen) as client:
        client.post(BODY.encode(), *MARKED, path=f"/v1/completions?key={SECRET}")
        await client.reader.readuntil(SECRET.encode())
        page_texts = await pages(scene.server)
        assert around("".join(page_texts.values())) == set()
        assert IN_PATH not in page_texts["/metrics"] + page_texts["/state"]
        assert '"request_id"' in page_texts["/state"]
        assert '"completions"' in page_texts["/requests/known"]
        go.set()
        await client.reader.readuntil(b"0\r\n\r\n")
