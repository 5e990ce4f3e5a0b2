"""An OpenAI server on a real socket for whole runs, which counts what it is asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tandem_contract.request_kinds import RequestKind
from tandem_loadtest.run.spec import RunSpec, Target
from tandem_loadtest.workload.settings import Arrivals, Prompts, Workload

from ..servers import serving

TOKENS_PER_WORD = 2
TOKENS_PER_MESSAGE = 5


class FakeOpenAI:
    """Answers completions and chats, streamed or not, with `text` for each."""

    def __init__(self, text: Callable[[dict[str, Any]], str] = lambda _: "a b") -> None:
        self._text = text
        self.bodies: list[dict[str, Any]] = []
        self.models = ["m"]
        self.health = 200
        self.status = 200
        """Of generating requests."""
        self.metrics = ""
        self.metrics_reads = 0
        self.authorization: str | None = None
        """What requests must send."""
        self.is_open = asyncio.Event()
        """Answers end when it is set."""
        self.is_open.set()
        self.arrived = asyncio.Condition()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """The URL."""
        async with serving(self._handle) as url:
            yield url

    async def holds(self, count: int) -> None:
        """Wait until so many generating requests have come."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.bodies) >= count)

    async def gives_metrics(self, count: int) -> None:
        """Wait until its metrics page was asked for so often."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: self.metrics_reads >= count)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.authorization and request.headers.get("authorization") != self.authorization:
            return web.Response(status=401)
        if request.method == "POST":
            return await self._generate(request)
        match request.path:
            case "/health":
                return web.Response(status=self.health)
            case "/v1/models":
                return web.json_response({"data": [{"id": name} for name in self.models]})
            case "/metrics":
                async with self.arrived:
                    self.metrics_reads += 1
                    self.arrived.notify_all()
                return web.Response(text=self.metrics)
        return web.Response(status=404)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        async with self.arrived:
            self.bodies.append(body)
            self.arrived.notify_all()
        await self.is_open.wait()
        if self.status != 200:
            return web.Response(status=self.status)
        text = self._text(body)
        usage = {"prompt_tokens": prompt_tokens(body), "completion_tokens": 2}
        choice = {"index": 0, "finish_reason": "length"}
        if not body.get("stream"):
            content = {"message": {"content": text}} if "messages" in body else {"text": text}
            return web.json_response({"choices": [choice | content], "usage": usage})
        content = {"delta": {"content": text}} if "messages" in body else {"text": text}
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in (
            {"choices": [content | {"index": 0}]},
            {"choices": [choice | {"delta": {}, "text": ""}]},
            {"choices": [], "usage": usage},
        ):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def prompt_tokens(body: dict[str, Any]) -> int:
    """Tokens of a prompt, by a simple rule."""
    if "messages" in body:
        words = [len(message["content"].split()) for message in body["messages"]]
        return TOKENS_PER_WORD * sum(words) + TOKENS_PER_MESSAGE * len(words)
    return len(body["prompt"])


def run_spec(url: str, **changes: Any) -> RunSpec:
    """40 completions, all within some 0.2 s."""
    values: dict[str, Any] = {
        "target": Target(url=url, model="m", endpoint=RequestKind.COMPLETIONS),
        "arrivals": Arrivals(process="constant", rate=200.0),
        "workload": Workload(preset="chat", prompt_tokens=20, output_tokens=2, turns=1),
        "prompts": Prompts(style="token-ids"),
        "limit": 40,
    }
    return RunSpec(**(values | changes))
