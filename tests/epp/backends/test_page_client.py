"""The client that requests pages of backends, against servers that answer byte by byte as told."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import pytest
from aiohttp import web

from tandem_epp.backends import page_client
from tandem_epp.backends.page_client import PageClient, PageUnavailable

from ..real import serving_app

SECONDS: Final = 20.0
OK: Final = b"HTTP/1.1 200 OK\r\n"
PAGE: Final = OK + b"Content-Length: 4\r\n\r\npage"


class Server:
    """Answers the n-th request with the n-th of `answers`; an empty one closes the connection."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.ended = asyncio.Event()
        """The client has closed a connection."""
        self.url = ""
        self.tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0)
                writer.write(answer)
                if not answer or b"Connection: close" in answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.set()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def running(*answers: bytes) -> AsyncIterator[tuple[Server, PageClient]]:
    """A server with these answers, and a client."""
    server, client = Server(*answers), PageClient()
    listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/metrics?a=b"
    try:
        yield server, client
    finally:
        await client.close()
        listening.close()
        await listening.wait_closed()
        await asyncio.gather(*server.tasks)


async def test_pages_come_on_one_connection() -> None:
    async with running(PAGE, PAGE) as (server, client):
        assert [await client.get(server.url, SECONDS) for _ in range(2)] == [b"page"] * 2
        assert server.connections == 1
        assert server.requests[0].startswith(b"GET /metrics?a=b HTTP/1.1\r\nHost: 127.0.0.1:")


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\npa\r\n2\r\nge\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nServer: Connection: close\r\n\r\npage",
        OK + b"Connection: close\r\nContent-Length: 4\r\n\r\npage",
        b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n" + PAGE,
        PAGE + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother",
    ],
    ids=["chunks", "until the connection ends", "closes", "interim", "a second answer"],
)
async def test_answers_of_other_forms(answer: bytes) -> None:
    async with running(answer, PAGE) as (server, client):
        assert await client.get(server.url, SECONDS) == b"page"
        assert await client.get(server.url, SECONDS) == b"page"


async def test_a_connection_that_the_backend_has_closed_is_replaced() -> None:
    async with running(PAGE, b"", PAGE) as (server, client):
        assert [await client.get(server.url, SECONDS) for _ in range(2)] == [b"page"] * 2
        assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "status 503"),
        (b"", "the connection ended before the answer did"),
        (OK + b"Connection: close\r\nContent-Length: 9\r\n\r\npage", "before the answer did"),
        (OK + b"Connection: close\r\n", "before the answer did"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not HTTP/1.1"),
        (OK + b"Content-Length: 11\r\n\r\nlarge pages", "exceeds 8 bytes"),
    ],
)
async def test_what_is_no_page_is_said(
    answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_client, "MAX_PAGE", 8)
    async with running(answer, PAGE) as (server, client):
        with pytest.raises(PageUnavailable, match=reason):
            await client.get(server.url, SECONDS)
        assert await client.get(server.url, SECONDS) == b"page", "the next one comes"


async def test_nothing_listens() -> None:
    async with running() as (server, client):
        pass
    client = PageClient()
    with pytest.raises(PageUnavailable, match=r"refused|Connect call failed"):
        await client.get(server.url, SECONDS)
    await client.close()


async def test_a_page_that_comes_too_late_has_its_connection_closed() -> None:
    async with running(OK) as (server, client):
        with pytest.raises(TimeoutError):
            await client.get(server.url, 0.05)
        async with asyncio.timeout(SECONDS):
            await server.ended.wait()


async def test_a_page_that_comes_while_the_loop_stands_still_is_not_late() -> None:
    async with running(PAGE) as (server, client):
        asyncio.get_running_loop().call_soon(time.sleep, 1.1)
        assert await client.get(server.url, 1.0) == b"page"


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_client, "IDLE_SECONDS", 0.02)
    async with running(PAGE) as (server, client):
        await client.get(server.url, SECONDS)
        async with asyncio.timeout(SECONDS):
            await server.ended.wait()


async def test_redirects_are_followed() -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="page")

    async def elsewhere(_: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/metrics/")

    app = web.Application()
    app.router.add_get("/metrics", elsewhere)
    app.router.add_get("/metrics/", page)
    await with_client(app, lambda client, url: has_page(client, f"{url}/metrics"))


async def test_a_page_that_the_library_requests_is_bounded_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="large pages")

    async def is_refused(client: PageClient, url: str) -> None:
        with pytest.raises(PageUnavailable, match="more than 8 bytes"):
            await client.get(f"{url}/säge", SECONDS)

    monkeypatch.setattr(page_client, "MAX_PAGE", 8)
    app = web.Application()
    app.router.add_get("/{path:.*}", page)
    await with_client(app, is_refused)


async def test_urls_that_need_encoding() -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="page" if request.path == "/säge blatt" else "")

    app = web.Application()
    app.router.add_get("/{path:.*}", page)
    await with_client(app, lambda client, url: has_page(client, f"{url}/säge blatt"))


async def with_client(
    app: web.Application, check: Callable[[PageClient, str], Coroutine[Any, Any, None]]
) -> None:
    """Run `check` with a client and the URL of `app`."""
    async with serving_app(app) as url:
        client = PageClient()
        await check(client, url)
        await client.close()


async def has_page(client: PageClient, url: str) -> None:
    assert await client.get(url, SECONDS) == b"page"
