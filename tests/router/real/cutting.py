"""A proxy before an engine that breaks answers off after so many tokens, as a dying engine does.

    cuts["a"] = 7                   the next answer to a request with `"user": "a"` has 7 tokens
    async with cutting_proxy(CuttingProxy, engine.url, cuts) as proxy:

Half of the event after them still comes, and then the connection is reset. vLLM joins events that
are not fetched at once, so an answer may have fewer tokens.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
from aiohttp import web

from .conftest import Routed, routed
from .same_stream import Streamed, check_same, stream

TOGETHER: Final = 4
"""Requests at a time, each of which breaks off."""
BACKENDS: Final = 3 * TOGETHER
"""Names of the engine: the router avoids a backend for a while that has failed."""

_EVENT_END = b"\n\n"
_HOP = ("transfer-encoding", "content-length", "connection", "date", "server")


class CuttingProxy:
    """Give it to a router or a sidecar in place of its engine."""

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
            unread, sent = b"", 0
            async for payload in answer.content.iter_any():
                if cut is None:
                    await response.write(payload)
                    continue
                *events, unread = (unread + payload).split(_EVENT_END)
                for event in events:
                    if sent + (tokens := _tokens(event)) > cut:
                        await self.end(request, response, event, sent)
                        return response
                    sent += tokens
                    await response.write(event + _EVENT_END)
            await response.write_eof()
            return response

    async def end(
        self, request: web.Request, response: web.StreamResponse, event: bytes, sent: int
    ) -> None:
        """End an answer of which so many tokens were `sent` before this event, which has too many
        more."""
        await response.write(event[: len(event) // 2])
        assert request.transport is not None
        request.transport.abort()


class HoldingProxy(CuttingProxy):
    """Does not break the answers off, but sends nothing more of them, as a slow engine does."""

    def __init__(self, engine: str, cuts: dict[str, int], http: aiohttp.ClientSession) -> None:
        super().__init__(engine, cuts, http)
        self._held = asyncio.Queue[int]()

    async def end(
        self, request: web.Request, response: web.StreamResponse, event: bytes, sent: int
    ) -> None:
        """Wait until the request is aborted, which cancels this."""
        self._held.put_nowait(sent)
        await asyncio.Event().wait()

    async def holds(self, count: int) -> list[int]:
        """Wait until it holds so many answers more; returns how many tokens it sent of each."""
        return [await self._held.get() for _ in range(count)]


_Proxy = TypeVar("_Proxy", bound=CuttingProxy)


@asynccontextmanager
async def cutting_proxy(
    kind: type[_Proxy], engine: str, cuts: dict[str, int]
) -> AsyncIterator[_Proxy]:
    """A proxy before the engine with this URL. `cuts`: `user` of a request → tokens of its answer;
    an entry is used once, by whichever proxy has it."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as http:
        proxy = kind(engine, cuts, http)
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
    """How many tokens an event has; one that may have some, and names no ids, counts as one."""
    data = event.rpartition(b"data: ")[2]
    if data == b"[DONE]":
        return 0
    chunk = json.loads(data)
    return sum(map(_tokens_of_choice, chunk["choices"])) if "choices" in chunk else 1


def _tokens_of_choice(choice: dict[str, Any]) -> int:
    if (ids := choice.get("token_ids")) is not None:
        return len(ids)
    return int("role" not in choice.get("delta", {}))


class Cutter:
    """A router before many names of one engine, whose answers break off when a test says so."""

    def __init__(self, http: aiohttp.ClientSession, engine: str) -> None:
        """`engine`: its URL."""
        self.cuts: dict[str, int] = {}
        self._http, self._engine = http, engine
        self.router: Routed
        self._users = itertools.count()
        self._free = asyncio.Semaphore(TOGETHER)

    async def whole(self, body: dict[str, Any], path: str = "") -> Streamed:
        """The engine's own answer; `path`: see `stream`."""
        return await stream(self._http, self._engine, body, path)

    async def broken(self, body: dict[str, Any], after: int, path: str = "") -> Streamed:
        """The answer through the router, where the first backend's has so many tokens."""
        async with self._free:
            user = str(next(self._users))
            self.cuts[user] = after
            asked = {**body, "user": user}
            answer = await stream(self._http, self.router.url, asked, path)
            assert user not in self.cuts
            return answer


@asynccontextmanager
async def cutting_router(
    file: Path, engine: str, http: aiohttp.ClientSession
) -> AsyncIterator[Cutter]:
    """A router with the configuration `file` before the engine with this URL, which runs."""
    made = Cutter(http, engine)
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(cutting_proxy(CuttingProxy, engine, made.cuts))
            for _ in range(BACKENDS)
        ]
        backends = {f"decode-{n}": (proxy, "decode") for n, proxy in enumerate(proxies)}
        flags = ("--resume", "--silence-timeout", "30s")
        made.router = await stack.enter_async_context(routed(file, backends, *flags))
        yield made


async def check_stop_strings(cutter: Cutter, body: dict[str, Any], lengths: Iterable[int]) -> None:
    """Ask for `body` with stop strings of so many characters from its answer, and cut after each of
    the last tokens before them; fail if a stream differs from the unbroken one."""
    answer = (await cutter.whole(body)).text
    for length in lengths:
        end = len(answer) * 2 // 3 - length % 4
        stops = [answer[end - length : end], "\n" * (14 - length)]
        whole = await cutter.whole({**body, "stop": stops})
        assert whole.ends == [("stop", stops[0])]
        tokens = len(whole.joined("token_ids"))
        cuts = range(max(0, tokens - length), tokens)
        streams = (cutter.broken({**body, "stop": stops}, after) for after in cuts)
        for after, got in zip(cuts, await asyncio.gather(*streams), strict=True):
            check_same(got, whole, f"{stops}, after {after}")
