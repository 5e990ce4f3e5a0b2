"""A proxy before an engine that breaks answers off after so many tokens, as a dying engine does.

    cuts["a"] = 7                   the next answer to a request with `"user": "a"` has 7 tokens
    async with cutting_proxy(engine.url, cuts) as proxy:

Half of the event after them still comes, and then the connection is reset. vLLM joins events that
are not fetched at once, so an answer may have fewer tokens.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

_EVENT_END = b"\n\n"
_HOP = ("transfer-encoding", "content-length", "connection", "date", "server")


class CuttingProxy:
    """Give it to a router in place of its engine."""

    def __init__(self, engine: str, cuts: dict[str, int], http: aiohttp.ClientSession) -> None:
        self.url = ""
        self._engine, self._cuts, self._http = engine, cuts, http

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Send the request to the engine, and its answer back."""
        data, cut = await request.read(), None
        if request.method == "POST":
            cut = self._cuts.pop(str(json.loads(data).get("user")), None)
        sent = {k: v for k, v in request.headers.items() if k.lower() not in (*_HOP, "host")}
        url = self._engine + request.path_qs
        async with self._http.request(request.method, url, data=data, headers=sent) as answer:
            head = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP}
            response = web.StreamResponse(status=answer.status, headers=head)
            await response.prepare(request)
            unread = b""
            async for payload in answer.content.iter_any():
                if cut is None:
                    await response.write(payload)
                    continue
                *events, unread = (unread + payload).split(_EVENT_END)
                for event in events:
                    cut -= _tokens(event)
                    if cut < 0:
                        await response.write(event[: len(event) // 2])
                        assert request.transport is not None
                        request.transport.abort()
                        return response
                    await response.write(event + _EVENT_END)
            await response.write_eof()
            return response


@asynccontextmanager
async def cutting_proxy(engine: str, cuts: dict[str, int]) -> AsyncIterator[CuttingProxy]:
    """A proxy before the engine with this URL. `cuts`: `user` of a request → tokens of its answer;
    an entry is used once, by whichever proxy has it."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as http:
        proxy = CuttingProxy(engine, cuts, http)
        application = web.Application(client_max_size=1 << 24)
        application.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(application, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            _, port = runner.addresses[0][:2]
            proxy.url = f"http://127.0.0.1:{port}"
            yield proxy
        finally:
            await runner.cleanup()


def _tokens(event: bytes) -> int:
    """How many tokens an event has."""
    if b"[DONE]" in event:
        return 0
    choices = json.loads(event.removeprefix(b"data: "))["choices"]
    return sum(len(choice["token_ids"]) for choice in choices)
