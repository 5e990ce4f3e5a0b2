"""Requests pages of backends: their metrics, and the path of their health checks.

A busy EPP requests hundreds of pages per second from backends that it knows for hours. For pages in
clear text it therefore has a client of its own, which keeps connections, has llhttp parse the
answers, and takes two fifths of aiohttp's CPU time per page. aiohttp requests the rest: pages by
TLS, those to which a backend redirects, and URLs with what only a library should read.

Errors: `PageUnavailable`, an OSError whose message says why; TimeoutError.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from ssl import SSLContext
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

import aiohttp
import httptools

MAX_PAGE: Final = 16 << 20
"""Bytes of a page, several hundred times one of vLLM's: a backend cannot fill the memory."""
IDLE_SECONDS: Final = 15.0
"""Seconds for which a connection is kept without a request, as in aiohttp."""
_LINGER: Final = 2
"""Looks at idle connections within IDLE_SECONDS."""


class PageUnavailable(ConnectionError):
    """There is no page: no connection, a broken answer, or a status other than 2xx."""


class _Stale(Exception):
    """The backend closed a kept connection before it answered: as good as no connection."""


class _Address(NamedTuple):
    host: str
    port: int


class _Page(NamedTuple):
    status: int
    body: bytes


class PageClient:
    """Requests pages. At most one request runs on a connection."""

    def __init__(self) -> None:
        """To be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._idle: dict[_Address, list[_Connection]] = {}
        """Those without a request; the one used last comes last."""
        self._sweep: asyncio.TimerHandle | None = None
        # No limit of connections: `pace` limits the scrapes, and one that hangs must not hold up
        # the others.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector)

    async def get(
        self, url: str, seconds: float, tls: SSLContext | None = None, api_key: str = ""
    ) -> bytes:
        """The page at `url`, which must come within `seconds`. `tls`: for https; None: the system's
        authorities. `api_key`: what the backend asks for; empty: nothing. Raises PageUnavailable,
        TimeoutError."""
        async with asyncio.timeout(seconds):
            # aiohttp checks what a header may hold.
            target = _target(url) if not api_key else None
            if target is None:
                return await self._get_by_library(url, tls, api_key)
            page = await self._request(*target)
            if page.status // 100 == 3:
                return await self._get_by_library(url, tls)
        if page.status // 100 != 2:
            raise PageUnavailable(f"status {page.status}")
        return page.body

    async def close(self) -> None:
        """Close all connections."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()
        await self._session.close()
        # The transports close their sockets in the loop's next turn.
        await asyncio.sleep(0)

    async def _request(self, address: _Address, head: bytes) -> _Page:
        with _failures():
            while idle := self._idle.get(address):
                connection = idle.pop()
                try:
                    return await self._request_on(connection, address, head)
                except _Stale:
                    # It was closed before the answer began, so the request may be repeated.
                    continue
            _, connection = await self._loop.create_connection(_Connection, *address)
            return await self._request_on(connection, address, head)

    async def _request_on(self, connection: "_Connection", address: _Address, head: bytes) -> _Page:
        try:
            page = await connection.request(head)
        except BaseException:
            # Also when the scrape is cancelled or late: what comes now is of no use.
            connection.abort()
            raise
        if connection.is_reusable:
            connection.idle_since = self._loop.time()
            self._idle.setdefault(address, []).append(connection)
            if self._sweep is None:
                self._sweep_later()
        else:
            connection.abort()
        return page

    def _sweep_later(self) -> None:
        self._sweep = self._loop.call_later(IDLE_SECONDS / _LINGER, self._drop_idle)

    def _drop_idle(self) -> None:
        """Close the connections that were not used for long, such as those to removed backends."""
        oldest = self._loop.time() - IDLE_SECONDS
        for address, connections in list(self._idle.items()):
            kept = []
            for connection in connections:
                if connection.is_reusable and connection.idle_since > oldest:
                    kept.append(connection)
                else:
                    connection.abort()
            if kept:
                self._idle[address] = kept
            else:
                del self._idle[address]
        self._sweep = None
        if self._idle:
            self._sweep_later()

    async def _get_by_library(self, url: str, tls: SSLContext | None, api_key: str = "") -> bytes:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        with _failures():
            async with self._session.get(url, ssl=tls or True, headers=headers) as response:
                response.raise_for_status()
                body = bytearray()
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > MAX_PAGE:
                        raise _too_large()
                return bytes(body)


class _Connection(asyncio.Protocol):
    """A connection to a backend, and llhttp's callbacks for the answer that comes on it."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[_Page] | None = None
        """What the request under way waits for; None: there is none."""
        self._begin()

    def _begin(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._has_bytes = self._has_head = self._has_end = self._is_kept = False

    @property
    def is_reusable(self) -> bool:
        """Whether another request may follow."""
        return self._is_kept and not self._transport.is_closing()

    def request(self, head: bytes) -> "asyncio.Future[_Page]":
        """Send a request; the answer is set. It raises _Stale if the backend has closed the
        connection, PageUnavailable if the answer is broken."""
        self._answer = answer = asyncio.get_running_loop().create_future()
        self._begin()
        if self._transport.is_closing():
            answer.set_exception(_Stale())
        else:
            self._transport.write(head)
        return answer

    def abort(self) -> None:
        """Close without waiting for anything."""
        self._answer = None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: the transports of uvloop are no subclass.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._has_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as err:
            self._fail(PageUnavailable(f"not HTTP/1.1: {err}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._has_bytes:
            self._fail(_Stale())
        elif self._has_head and not self._has_end and exc is None:
            # Neither a length nor chunks: such a body ends with the connection.
            self.on_message_complete()
        else:
            self._fail(PageUnavailable("the connection ended within the answer"))

    def on_message_begin(self) -> None:
        """Called by the parser."""
        if self._answer is None:
            # Nothing was asked: what follows on this connection would answer the wrong request.
            self._transport.abort()

    def on_header(self, name: bytes, _: bytes) -> None:
        """Called by the parser."""
        self._has_end |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._has_head = True

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._size += len(data)
        if self._size > MAX_PAGE:
            self._fail(_too_large())
        elif self._answer is not None:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        if status // 100 == 1:
            # An interim answer, such as 103: the answer follows.
            self._begin()
            self._has_bytes = True
            return
        self._is_kept = self._parser.should_keep_alive()
        parts, self._parts = self._parts, []
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(_Page(status, parts[0] if len(parts) == 1 else b"".join(parts)))

    def _fail(self, err: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(err)


def _too_large() -> PageUnavailable:
    return PageUnavailable(f"a page of more than {MAX_PAGE} bytes")


@contextmanager
def _failures() -> Iterator[None]:
    """Raise what went wrong as PageUnavailable, but for timeouts."""
    try:
        yield
    except (TimeoutError, PageUnavailable):
        raise
    except _Stale:
        raise PageUnavailable("the backend closed the connection before it answered") from None
    except (aiohttp.ClientError, OSError) as err:
        raise PageUnavailable(str(err) or type(err).__name__) from err


@lru_cache(4096)
def _target(url: str) -> tuple[_Address, bytes] | None:
    """Where to connect for `url`, and the request; None: aiohttp reads this URL."""
    parts = urlsplit(url)
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    host = parts.hostname
    # Whatever needs encoding is left to the library, as are passwords.
    is_plain = (parts.netloc + path).isascii() and (parts.netloc + path).isprintable()
    if parts.scheme != "http" or not host or not is_plain or " " in url or "@" in parts.netloc:
        return None
    lines = (
        f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: text/plain;q=1, */*;q=0.5\r\n\r\n"
    )
    return _Address(host, parts.port or 80), lines.encode()
