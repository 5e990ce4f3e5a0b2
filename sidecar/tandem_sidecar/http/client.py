"""One client's connection: hands requests on one at a time, writes what it is told.

Pipelined requests are answered in their order. A client that closes its sending side counts as
gone, as in nginx and uvicorn: a closed connection looks the same, and an engine must not go on
computing for nobody. Only an exchange that says it survives is finished.
"""

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Final, Protocol, cast

from tandem_contract.openai_errors import error_body

from .messages import response_bytes
from .reader import Refusal, RequestReader

if TYPE_CHECKING:
    from .server import Server

_LINGER: Final = 2.0
"""Seconds a refused client's remaining bytes are discarded, so that it gets to read the answer."""
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER on, for no time: closing sends a reset."""


class Exchange(Protocol):
    """A request being served."""

    survives_half_close: bool
    """Cheap enough to finish for a client that may be gone."""

    def client_left(self) -> None:
        """The connection is gone: stop; write nothing more."""

    def client_full(self) -> None:
        """Write no more than what is under way until `client_ready`."""

    def client_ready(self) -> None: ...


class Switched(Exchange, Protocol):
    """An exchange that agreed with the client on another protocol: bytes from here."""

    def client_data(self, data: bytes) -> None:
        """What the client sent."""

    def client_eof(self) -> None:
        """It sends no more, but may go on reading."""


class Client(asyncio.Protocol):
    """One client connection."""

    def __init__(self, server: "Server") -> None:
        self.deadline = inf
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._reader = RequestReader(server.limits.head, server.limits.body)
        self._milestones = 0
        self._exchange: Exchange | None = None
        self._switched: Switched | None = None
        self._busy = False
        self._pumping = False
        self._closing = False
        self._at_eof = False
        self._reading = True
        self._full = False
        self._unsent = 0
        self._unsent_since = 0.0

    # What an exchange uses.

    write: Callable[[bytes], None]
    """Send these bytes: the transport's own, as each piece of a stream comes this way."""

    def finish(self, *, keep: bool) -> None:
        """The response is complete; `keep` the connection for another request."""
        self._busy, self._exchange = False, None
        if not keep or self._at_eof:
            self.close()
            return
        if self._reader.switching:
            self._reader.resume()
        self._pump()

    def abort(self) -> None:
        """Break the connection off by a reset, so that no length is needed to see the break."""
        self._busy, self._exchange, self._switched = False, None, None
        self._closing = True
        raw = self._transport.get_extra_info("socket")
        if raw is not None and not self._transport.is_closing():
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    def close(self) -> None:
        """Close once what was written is sent."""
        self._closing = True
        self.deadline = inf
        self._transport.close()
        self._watch_unsent()

    def switch(self, switched: Switched) -> None:
        """Hand the connection to the exchange being served, which agreed on another protocol."""
        self._exchange = self._switched = switched
        self.touch()
        self.read(True)
        if held := self._reader.take_held():
            switched.client_data(held)
        if self._at_eof:
            switched.client_eof()

    def touch(self) -> None:
        """The switched connection is not idle."""
        self.deadline = self._loop.time() + self._server.limits.idle_seconds

    def write_eof(self) -> None:
        """Send no more, but go on reading."""
        if not self._transport.is_closing():
            self._transport.write_eof()

    def read(self, on: bool) -> None:
        """Whether to take more from the client."""
        if on == self._reading or self._transport.is_closing():
            return
        self._reading = on
        if on:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # What the clock says.

    def expired(self) -> None:
        """The deadline passed: 408 within a request, silence between two."""
        if self._switched is not None:
            self._transport.abort()
        elif self._reader.started and not self._closing and self._reader.refusal is None:
            self._reader.refuse(408, "the request did not arrive in time")
            self._pump()
        else:
            self.close()

    def check_unsent(self, now: float) -> None:
        """Cut off a client that takes nothing of what waits for it."""
        unsent = self._untaken()
        if unsent < self._unsent:
            self._unsent_since = now
        self._unsent = unsent
        if now - self._unsent_since > self._server.limits.stall_seconds:
            self._transport.abort()

    def _watch_unsent(self) -> None:
        self._unsent = self._untaken()
        self._unsent_since = self._loop.time()
        self._server.unsent.add(self)

    def _untaken(self) -> int:
        """Bytes that wait for the client, here and in the kernel.

        The kernel asks for more when a third of what may be megabytes is gone: a slow reader would
        look like none for minutes.
        """
        ours = self._transport.get_write_buffer_size()
        raw = self._transport.get_extra_info("socket")
        if raw is None or raw.fileno() < 0:
            return ours
        held = fcntl.ioctl(raw.fileno(), termios.TIOCOUTQ, bytes(4))
        return ours + int.from_bytes(held, sys.byteorder)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.write = self._transport.write
        self._server.opened(self)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        if self._switched is not None:
            self.touch()
            self._switched.client_data(data)
            return
        reader = self._reader
        if self._closing or reader.refusal is not None:
            return
        reader.feed(data)
        if reader.milestones != self._milestones:
            self._milestones = reader.milestones
            self.deadline = self._loop.time() + self._server.limits.request_seconds
        self._pump()

    def eof_received(self) -> bool:
        self._at_eof = True
        if self._switched is not None:
            self._switched.client_eof()
            return True
        if self._exchange is not None and self._exchange.survives_half_close:
            return True
        self._leave()
        return False

    def connection_lost(self, _exc: Exception | None) -> None:
        self._server.lost(self)
        self._leave()

    def pause_writing(self) -> None:
        self._full = True
        self._watch_unsent()
        if self._exchange is not None:
            self._exchange.client_full()

    def resume_writing(self) -> None:
        self._full = False
        if not self._closing:
            self._server.unsent.discard(self)
        if self._exchange is not None:
            self._exchange.client_ready()

    # Request after request

    def _pump(self) -> None:
        """Serve what is queued; while one is served, read on only to see the client leave."""
        if self._pumping:
            return
        reader = self._reader
        if reader.requests:
            self._serve_queued()
        if self._closing:
            return
        on = not (self._busy and (reader.requests or reader.held))
        if on != self._reading:
            self.read(on)
        if self._busy:
            self.deadline = inf
        elif reader.refusal is not None:
            self._say(reader.refusal)
        elif not reader.started:
            self._await_request()
        else:
            self._await_rest()

    def _serve_queued(self) -> None:
        requests = self._reader.requests
        self._pumping = True
        while requests and not self._busy and not self._closing:
            self._busy = True
            exchange = self._server.handler.handle(requests.popleft(), self)
            if self._busy and exchange is not None:
                self._exchange = exchange
                if self._full:
                    exchange.client_full()
        self._pumping = False

    def _await_request(self) -> None:
        self.deadline = self._loop.time() + self._server.limits.idle_seconds

    def _await_rest(self) -> None:
        """Give a request that is partly read its time, and its client the word it waits for."""
        if self.deadline == inf:
            self.deadline = self._loop.time() + self._server.limits.request_seconds
        if self._reader.expects:
            self._reader.expects = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _say(self, refusal: Refusal) -> None:
        body = error_body(refusal.status, refusal.message)
        self._transport.write(response_bytes(refusal.status, b"", body, close=True))
        self._closing = True
        self.deadline = self._loop.time() + _LINGER
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _leave(self) -> None:
        exchange, self._exchange = self._exchange, None
        self._switched = None
        self._busy = False
        self._closing = True
        self._reader.requests.clear()
        if exchange is not None:
            exchange.client_left()
