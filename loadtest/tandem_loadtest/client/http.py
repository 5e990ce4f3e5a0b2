"""An HTTP/1.1 client connection that times every read, and a pool of them.

    connection = pool.take(now) or await pool.connect()
    ending = await connection.exchange(request, receiver, timeout=300.0)

A connection sends one request at a time. Of a response it understands only the framing; what the
bytes mean is up to the `Receiver`.

A server may close an idle connection just as the next request is written to it. That is no answer
to the request and no loss. A server that reads a request and then closes the connection has lost
it. TCP tells them apart: a FIN acknowledges all that had arrived when the server closed. If the FIN
acknowledges nothing of the request, the server closed before the request came, whatever the
distance (`Ending.is_unread`). A reset acknowledges nothing even after the request was read, so that
it always counts as a loss.
"""

import asyncio
import ssl
from collections.abc import Mapping
from time import monotonic
from typing import Final, Protocol, cast

import httptools
import msgspec

from .tcp import unacknowledged

MAX_HEAD: Final = 64 * 1024
"""Largest response head in bytes, several times what proxies allow."""

MAX_IDLE: Final = 4.0
"""Seconds for which an idle connection is kept: less than the shortest usual keep-alive timeout of
servers (5 s), so that a server seldom closes a connection at the time it is used again."""


class Ending(msgspec.Struct, frozen=True):
    """How an exchange ended; at most one of the reasons is set, none after a whole response."""

    at: float
    """`time.monotonic()` of the last read, or of the failure."""
    refused: str | None = None
    """Why the receiver refused the response, or why it is not HTTP."""
    lost: str | None = None
    """Why the connection ended before the response."""
    timed_out: bool = False
    is_unread: bool = False
    """The connection had served requests before, and the server closed it before any byte of this
    request came: the request can be sent again."""


class Receiver(Protocol):
    """What the sender of a request does with the response."""

    def head(self, status: int, fields: Mapping[bytes, bytes]) -> None:
        """Take the response's head; the names of `fields` are in lower case."""

    def data(self, data: bytes, now: float) -> None:
        """Take a part of the body, read at `now`. Raises ValueError to refuse the response."""


class Connection(asyncio.Protocol):
    """A connection to the server, used by one request after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop, idle: dict["Connection", float]) -> None:
        """`idle`: the connection adds itself, with the time, when it can be used again, and leaves
        when closed.
        """
        self._loop = loop
        self._idle = idle
        self._transport: asyncio.Transport
        self.closed: asyncio.Future[None] = loop.create_future()
        # The parser calls the methods `on_…`; a list's own method is cheaper than one of ours.
        self._body: list[bytes] = []
        self.on_body = self._body.append
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[Ending]
        self._is_reused = False
        self._is_unread = False
        self._request_size = 0
        self._begin_response()

    def _begin_response(self) -> None:
        self._fields: dict[bytes, bytes] = {}
        self._received = 0
        self._status = 0
        self._is_complete = False
        self._parts = 0
        self._can_be_reused = False

    @property
    def is_usable(self) -> bool:
        """Whether a request can be sent, as far as this side knows."""
        return not self._transport.is_closing()

    async def exchange(self, request: bytes, receiver: Receiver, timeout: float) -> Ending:
        """Send a request, pass its response to `receiver`; `timeout` in seconds for the whole.

        Cancelling closes the connection.
        """
        self._begin_response()
        self._receiver = receiver
        self._done = self._loop.create_future()
        timer = self._loop.call_later(timeout, self._time_out)
        self._request_size = len(request)
        self._transport.write(request)
        try:
            return await self._done
        finally:
            timer.cancel()
            # Only after a cancellation; else it may have the receiver of the next request by now.
            if self._receiver is receiver:
                self._receiver = None
                self._transport.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _time_out(self) -> None:
        self._fail(Ending(monotonic(), timed_out=True))

    def _fail(self, ending: Ending) -> None:
        self._end(ending)
        self._transport.abort()

    def _end(self, ending: Ending) -> None:
        if self._receiver is not None:
            self._receiver = None
            # Done already if the waiting task was cancelled in this turn of the loop.
            if not self._done.done():
                self._done.set_result(ending)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        # First of all: the time that parsing takes is not the server's.
        now = monotonic()
        receiver = self._receiver
        if receiver is None:
            # Nothing was asked, so the next answer could be that of another request.
            self._idle.pop(self, None)
            self._transport.abort()
            return
        self._received += len(data)
        refused = self._parse(data)
        if self._is_complete:
            # Without the body of a second response, which has no request.
            del self._body[self._parts :]
        try:
            if self._body:
                body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body.clear()
                receiver.data(body, now)
        except ValueError as err:
            refused = refused or str(err)
        if refused is not None:
            self._fail(Ending(now, refused=refused))
        elif self._is_complete:
            self._complete(now)

    def eof_received(self) -> None:
        """Called by the event loop when the server has closed its side."""
        # Only now: the kernel forgets the acknowledgments when the connection is closed.
        if self._is_reused and self._receiver is not None and not self._received:
            self._is_unread = unacknowledged(self._transport) >= self._request_size
        # The rest of the request would have no answer.
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._idle.pop(self, None)
        if not self.closed.done():
            self.closed.set_result(None)
        now = monotonic()
        if exc is None and self._status and self._ends_with_connection():
            self._end(Ending(now))
            return
        what = f"{type(exc).__name__}: {exc}" if exc else "the server closed the connection"
        where = "before the end of" if self._received else "before"
        lost = f"{what}, {where} the response"
        self._end(Ending(now, lost=lost, is_unread=self._is_unread))

    def _parse(self, data: bytes) -> str | None:
        """Parse the framing. Returns why it is not HTTP, None if it is."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return "the server switched to another protocol"
        except httptools.HttpParserError as err:
            # After the end of the response, only the next request is at risk.
            self._can_be_reused = False
            return None if self._is_complete else f"not an HTTP response: {err}"
        if not self._status and self._received > MAX_HEAD:
            return f"the head of the response exceeds {MAX_HEAD >> 10} KiB"
        return None

    def _complete(self, now: float) -> None:
        self._end(Ending(now))
        # A server may answer before it has the whole request: the rest must not be sent.
        if self._can_be_reused and not self._transport.get_write_buffer_size():
            self._is_reused = True
            self._idle[self] = now
        else:
            self._transport.abort()

    def _ends_with_connection(self) -> bool:
        """Whether the response has no other end than that of the connection."""
        coding = self._fields.get(b"transfer-encoding", b"").lower()
        return b"content-length" not in self._fields and b"chunked" not in coding

    # Called by the parser.

    def on_message_begin(self) -> None:
        """A response begins."""
        # A second one to a single request.
        if self._is_complete:
            self._can_be_reused = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or of the trailers."""
        if not self._status:
            self._fields[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is complete."""
        status = self._parser.get_status_code()
        # Another head follows an interim response such as 100.
        if status >= 200 and self._receiver is not None and not self._is_complete:
            self._status = status
            self._receiver.head(status, self._fields)

    def on_message_complete(self) -> None:
        """The response is complete, or an interim one."""
        if not self._status:
            self._fields.clear()
        elif not self._is_complete:
            self._is_complete = True
            self._parts = len(self._body)
            self._can_be_reused = self._parser.should_keep_alive()


class Pool:
    """Connections to one server, as many as there are requests at a time."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._idle: dict[Connection, float] = {}
        """Connection → time since when it has been idle, in rising order."""
        self._all: set[Connection] = set()

    def take(self, now: float) -> Connection | None:
        """The idle connection that was used last; None if there is none.

        Closes those that have been idle for `MAX_IDLE` at `now` (`time.monotonic()`).
        """
        while self._idle:
            connection, since = self._idle.popitem()
            if now - since >= MAX_IDLE:
                connection.abort()
            elif connection.is_usable:
                return connection
        return None

    async def connect(self) -> Connection:
        """A new connection. Raises OSError, `ssl.SSLError` among them."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(loop, self._idle), self._host, self._port, ssl=self._tls
        )
        self._all.add(connection)
        connection.closed.add_done_callback(lambda _: self._all.discard(connection))
        return connection

    async def close(self) -> None:
        """Close all connections; their exchanges fail."""
        connections = list(self._all)
        for connection in connections:
            connection.abort()
        if connections:
            await asyncio.wait([connection.closed for connection in connections])
