"""Rewritten models through Envoy: the engine gets another model, and clients see their own again
where the gateway sends response bodies."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tandem_contract import headers as wire
from tandem_operator.routing.envoy.clusters import Json
from tandem_operator.routing.envoy.http_filters import BodyMode

from ..real import DEADLINE, Backend, envoy, envoy_settings, epp, serving_app

pytestmark = pytest.mark.component

MODES = pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
LONG = "word " * 60_000
"""300 KB: several chunks, and Envoy buffers it."""


@dataclass
class Engine:
    """Answers with the model that it was asked for, at once or as events."""

    cuts_events: bool = True
    """Whether events are cut within the member that names the model."""
    received: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=Backend("a").page())

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.received.append(({k.lower(): v for k, v in request.headers.items()}, body))
        answer = {"id": "1", "model": body["model"], "text": f'"model":"{body["model"]}"'}
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(3):
            event = f"data: {json.dumps(answer)}\n\n".encode()
            cut = event.index(b"model") + 3 if self.cuts_events else len(event)
            await response.write(event[:cut])
            await asyncio.sleep(0)
            await response.write(event[cut:])
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def stack(
    directory: Path, mode: BodyMode, response: str = "NONE"
) -> AsyncIterator[tuple[str, Engine]]:
    """URL of Envoy and the engine behind it; `response`: the mode in which Envoy sends the bodies
    of responses."""

    def change(bootstrap: Json) -> None:
        (listener,) = bootstrap["static_resources"]["listeners"]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        (filter_,) = [each for each in manager["http_filters"] if "ext_proc" in each["name"]]
        filter_["typed_config"]["processing_mode"]["response_body_mode"] = response

    # In the mode STREAMED the EPP answers each chunk at once, and cannot hold a part of it back.
    engine = Engine(cuts_events=response != "STREAMED")
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", engine.serve)
    app.router.add_get("/metrics", engine.metrics)
    async with AsyncExitStack() as parts:
        url = await parts.enter_async_context(serving_app(app))
        config = directory / "router.yaml"
        config.write_text(json.dumps({"backends": [{"name": "a", "url": url, "models": ["m"]}]}))
        picker = await parts.enter_async_context(epp(config))
        settings = envoy_settings(picker.grpc, body_mode=mode)
        yield await parts.enter_async_context(envoy(directory, settings, change=change)), engine


async def ask(url: str, model: str | None, rewrite: str | None, **fields: Any) -> tuple[int, bytes]:
    headers = {} if rewrite is None else {wire.MODEL_REWRITE: rewrite}
    body = fields if model is None else {"model": model, **fields}
    timeout = aiohttp.ClientTimeout(DEADLINE)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v1/completions", json=body, headers=headers) as response,
    ):
        return response.status, await response.read()


@MODES
async def test_the_engine_gets_the_model_of_the_header(tmp_path: Path, mode: BodyMode) -> None:
    async with stack(tmp_path, mode) as (url, engine):
        for prompt in ("hi", LONG):
            for model in ("alias", "a-much-longer-alias" * 10, "m", None):
                status, answer = await ask(url, model, "m", prompt=prompt, seed=2**70)
                # In the mode BUFFERED the EPP asks for the body of the response.
                named = model if mode == "BUFFERED" and model else "m"
                assert (status, json.loads(answer)["model"]) == (200, named)
                headers, body = engine.received.pop()
                assert body == {"model": "m", "prompt": prompt, "seed": 2**70}
                assert wire.MODEL_REWRITE not in headers
        assert (await ask(url, "m", None, prompt="hi"))[0] == 200
        status, answer = await ask(url, "m", "unknown", prompt="hi")
        assert status == 404
        assert "`unknown` does not exist" in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    ("mode", "response"),
    [
        *(
            ("FULL_DUPLEX_STREAMED", mode)
            for mode in ("FULL_DUPLEX_STREAMED", "BUFFERED", "STREAMED")
        ),
        # As Tandem's Envoy is configured: the EPP asks for the bodies that it must change.
        ("BUFFERED", "NONE"),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_the_client_sees_its_own_name(
    tmp_path: Path, mode: BodyMode, response: str, is_stream: bool
) -> None:
    async with stack(tmp_path, mode, response) as (url, _):
        for model in ("x", "a-much-longer-alias" * 10):
            status, answer = await ask(url, model, "m", prompt="hi", stream=is_stream)
            assert status == 200
            events = answer.decode().removesuffix("data: [DONE]\n\n").split("data: ")
            answers = [json.loads(event) for event in events if event]
            expected = {"id": "1", "model": model, "text": '"model":"m"'}
            assert answers == [expected] * (3 if is_stream else 1)
