"""Small OpenAI servers on real sockets, each of which answers in one way."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """The URL of a server that answers everything with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def chunk(text: str, token: int, finish: str | None = None) -> bytes:
    """One streamed completion chunk with one token."""
    return sse({"choices": [{"text": text, "token_ids": [token], "finish_reason": finish}]})


def sse(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
WHOLE: dict[str, Any] = {
    "choices": [{"index": 0, "text": "ab", "token_ids": [1, 2], "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}


def streaming(*parts: bytes, abort: bool = False, **headers: str) -> Handler:
    """Answers with `parts`; `abort` then drops the connection in the middle of the body."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **headers})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        if abort and request.transport:
            request.transport.abort()
        return response

    return handler


def answering(body: object, status: int = 200) -> Handler:
    """Answers with one JSON body."""

    async def handler(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(body, status=status)

    return handler


class Gate:
    """A server that holds every answer until `open` is set, and knows who is waiting."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = 0
        self.left = asyncio.Event()
        self._arrived = asyncio.Condition()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        async with self._arrived:
            self.waiting += 1
            self._arrived.notify_all()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        return web.json_response(WHOLE)

    async def holds(self, count: int) -> None:
        """Wait until `count` requests have come."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.waiting >= count)
