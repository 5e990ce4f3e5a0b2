"""The client's side: reads requests whole, hands them on one at a time, writes what it is told.

Pipelined requests are answered in their order. A client that closes its sending side counts as
gone, as in nginx and uvicorn: a closed connection looks the same, and an engine must not go on
computing for nobody. Only an exchange that says it survives is finished.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol, cast

import httptools

from tandem_contract.openai_errors import error_body

from .messages import Headers, Request, response_bytes

_LINGER: Final = 2.0
"""Seconds a refused client's remaining bytes are discarded, so that it gets to read the answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a client; sizes in bytes, times in seconds."""

    body: int = 32 * 1024 * 1024
    head: int = 64 * 1024
    """Request line and headers."""
    request_seconds: float = 30.0
    """From a request's first byte to the end of its head, and between reads of its body."""
    connections: int = 8192
    """Clients connected at once; more wait in the backlog."""
    idle_seconds: float = 3660.0
    """Above Envoy's idle hour: the side that closes last loses no request to a race."""


class Exchange(Protocol):
    """A request being served."""

    survives_half_close: bool
    """Cheap enough to finish for a client that may be gone."""

    def client_left(self) -> None:
        """The connection is gone: stop; write nothing more."""

    def client_full(self) -> None:
        """Write no more than what is under way until `client_ready`."""

    def client_ready(self) -> None: ...


class Handler(Protocol):
    """Who serves requests."""

    def handle(self, request: Request, client: "Client") -> Exchange | None:
        """Serve `request` by `client.write` and one `client.finish`; None: it is done already."""


class Server:
    """Open connections, and the clock that ends the ones that dawdle."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self.handler = handler
        self.limits = limits
        self.clients: set[Client] = set()
        self._none = asyncio.Event()
        self._none.set()
        self._sweeping: asyncio.TimerHandle | None = None

    def client(self) -> "Client":
        """A protocol for a new connection."""
        if self._sweeping is None:
            self._sweep()
        return Client(self)

    def close(self) -> None:
        """Close every connection once what was written to it is sent."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for client in list(self.clients):
            client.close()

    async def closed(self) -> None:
        """Return when no connection is left."""
        await self._none.wait()

    def opened(self, client: "Client") -> None:
        self.clients.add(client)
        self._none.clear()

    def lost(self, client: "Client") -> None:
        self.clients.discard(client)
        if not self.clients:
            self._none.set()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for client in [c for c in self.clients if c.deadline < now]:
            client.expired()
        interval = min(1.0, self.limits.request_seconds / 4)
        self._sweeping = loop.call_later(interval, self._sweep)


class Client(asyncio.Protocol):
    """One client connection."""

    def __init__(self, server: Server) -> None:
        self.deadline = float("inf")
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Request] = deque()
        self._exchange: Exchange | None = None
        self._busy = False
        self._pumping = False
        self._closing = False
        self._refusal: tuple[int, str] | None = None
        self._at_eof = False
        self._reading = True
        self._full = False
        self._in_head = True
        self._head_size = 0
        self._expects = False
        self._body: list[bytes] = []
        self._body_size = 0

    # What an exchange uses.

    def write(self, data: bytes) -> None:
        """Send `data`."""
        self._transport.write(data)

    def finish(self, *, keep: bool) -> None:
        """The response is complete; `keep` the connection for another request."""
        self._busy, self._exchange = False, None
        if not keep or self._at_eof:
            self.close()
            return
        self._pump()

    def abort(self) -> None:
        """Break the connection off, visibly to the client."""
        self._busy, self._exchange = False, None
        self._closing = True
        self._transport.abort()

    def close(self) -> None:
        """Close once what was written is sent."""
        self._closing = True
        self._transport.close()

    def expired(self) -> None:
        """The deadline passed: 408 within a request, silence between two."""
        started = self._head_size > 0 and not self._closing and self._refusal is None
        if started:
            self._refuse(408, "the request did not arrive in time")
            self._pump()
        else:
            self.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.opened(self)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        if self._closing or self._refusal is not None:
            return
        if self._in_head:
            self._head_size += len(data)
        if not self._in_head or self._head_size == len(data):
            self.deadline = self._loop.time() + self._server.limits.request_seconds
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(501, "switching protocols is not supported")
        except httptools.HttpParserError as err:
            self._refuse(400, f"the request is no HTTP/1.1: {err}")
        if self._in_head:
            self._check_head(self._head_size)
        self._pump()

    def eof_received(self) -> bool:
        self._at_eof = True
        if self._exchange is not None and self._exchange.survives_half_close:
            return True
        self._leave()
        return False

    def connection_lost(self, _exc: Exception | None) -> None:
        self._server.lost(self)
        self._leave()

    def pause_writing(self) -> None:
        self._full = True
        if self._exchange is not None:
            self._exchange.client_full()

    def resume_writing(self) -> None:
        self._full = False
        if self._exchange is not None:
            self._exchange.client_ready()

    # httptools

    def on_message_begin(self) -> None:
        self._headers: Headers = []
        self._target = b""
        self._head_size = max(self._head_size, 1)

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is no header: Envoy has not looked at it
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._check_head(len(self._target) + sum(len(n) + len(v) for n, v in self._headers))
        for name, value in self._headers:
            if name == b"content-length" and int(value) > self._server.limits.body:
                self._too_large()
            elif name == b"expect" and value.lower() == b"100-continue":
                self._expects = True

    def on_body(self, data: bytes) -> None:
        self._expects = False
        self._body_size += len(data)
        if self._body_size > self._server.limits.body:
            self._body.clear()
            self._too_large()
        elif self._refusal is None:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._refusal is None and not self._parser.should_upgrade():
            self._queue.append(
                Request(
                    method=self._parser.get_method(),
                    target=self._target,
                    headers=self._headers,
                    body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
                    http10=self._parser.get_http_version() == "1.0",
                    keep_alive=self._parser.should_keep_alive(),
                )
            )
        self._reset()

    # Between the two

    def _reset(self) -> None:
        self._in_head = True
        self._head_size = 0
        self._expects = False
        self._body = []
        self._body_size = 0

    def _await_request(self) -> None:
        self.deadline = self._loop.time() + self._server.limits.idle_seconds

    def _continue(self) -> None:
        """Ask for the body of a client that waits to be asked, when its turn has come."""
        if self._expects and self._refusal is None and not self._busy and not self._queue:
            self._expects = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _too_large(self) -> None:
        self._refuse(413, f"the request body is larger than {self._server.limits.body} bytes")

    def _check_head(self, size: int) -> None:
        if size > self._server.limits.head:
            self._refuse(431, f"the request head is longer than {self._server.limits.head} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer the request being read with an error, after those before it, and close."""
        if self._refusal is None:
            self._refusal = (status, message)

    def _pump(self) -> None:
        """Serve what is queued; while one is served, read on only to see the client leave."""
        if self._pumping:
            return
        self._pumping = True
        while self._queue and not self._busy and not self._closing:
            self._busy = True
            request = self._queue.popleft()
            exchange = self._server.handler.handle(request, self)
            if self._busy and exchange is not None:
                self._exchange = exchange
                if self._full:
                    exchange.client_full()
        self._pumping = False
        if self._closing:
            return
        if self._busy:
            self.deadline = float("inf")
            self._read(not self._queue)
            return
        self._read(True)
        if self._refusal is not None:
            self._say_refusal(*self._refusal)
        elif self._head_size == 0:
            self._await_request()
        elif self.deadline == float("inf"):
            self.deadline = self._loop.time() + self._server.limits.request_seconds
        self._continue()

    def _read(self, on: bool) -> None:
        if on == self._reading or self._transport.is_closing():
            return
        self._reading = on
        if on:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _say_refusal(self, status: int, message: str) -> None:
        body = error_body(status, message)
        self._transport.write(response_bytes(status, b"", body, close=True))
        self._closing = True
        self.deadline = self._loop.time() + _LINGER
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _leave(self) -> None:
        exchange, self._exchange = self._exchange, None
        self._busy = False
        self._closing = True
        self._queue.clear()
        if exchange is not None:
            exchange.client_left()
