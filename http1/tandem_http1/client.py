"""One client's connection: passes requests to the handler one at a time and writes the answers.

Pipelined requests are answered in order. A client that closes its sending side counts as
disconnected, as in nginx and uvicorn: it looks the same as a client that closed the connection,
and an engine must not go on computing an answer that cannot be delivered. A request whose
`survives_half_close` is true is finished nevertheless.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol, cast

from tandem_contract.api_grammar import error_body
from tandem_contract.commandline import HostPort
from tandem_contract.connections import unsent_bytes
from tandem_contract.held_bytes import HeldBytes

from .messages import Request, response_bytes
from .reader import HeadCheck, Refusal, RequestReader

_LINGER: Final = 2.0
"""Seconds for which a refused client's remaining bytes are discarded. Closing a socket with unread
bytes sends a reset, which could reach the client before the error answer."""
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER on, with a timeout of 0 s: closing the socket sends a reset."""


class ActiveRequest(Protocol):
    """A request that is being served."""

    survives_half_close: bool
    """Whether the request is cheap enough to finish after the client closed its sending side."""

    def client_disconnected(self) -> None:
        """The connection is gone: stop, and write nothing more."""

    def pause_sending(self) -> None:
        """The client reads too slowly: write no further data until `resume_sending`."""

    def resume_sending(self) -> None:
        """The client takes data again."""


class UpgradedRequest(ActiveRequest, Protocol):
    """A request after which client and engine speak another protocol on the connection."""

    def client_data(self, data: bytes) -> None:
        """The client sent `data`."""

    def client_eof(self) -> None:
        """The client closed its sending side; it may go on reading."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on one client; sizes in bytes, times in seconds."""

    body: int = 32 * 1024 * 1024
    """Largest request body; a larger one gets a 413."""
    held: int | None = None
    """Bytes of request bodies that all clients together may have here, from the first byte of an
    upload to the end of the answer; a body beyond it gets a 503, and an eighth is kept for bodies
    of up to 256 KiB. None: a quarter of the container's memory, at most 512 MiB. Too low: bursts of
    long prompts are refused; too high: unfinished uploads end the process for want of memory."""
    head: int = 64 * 1024
    """Largest request line and headers together; longer ones get a 431."""
    request_seconds: float = 30.0
    """Time from a request's first byte to the end of its head, and for each 64 KiB of its body: a
    client must send at least 2 KiB/s."""
    connections: int = 8192
    """Clients connected at the same time. A further one gets the place of one that the server waits
    for (`tandem_contract.connections`); without one, it waits in the listening socket's backlog."""
    idle_seconds: float = 3660.0
    """Time between two requests. It is above Envoy's idle timeout of an hour, so that Envoy closes
    first and loses no request to a connection that the sidecar is closing."""
    stall_seconds: float = 300.0
    """Time in which a client must take some of its answer, or the request is aborted. Too low:
    clients that pause while reading are disconnected."""


class Handler(Protocol):
    """Serves requests."""

    def handle(self, request: Request, client: "ClientConnection") -> ActiveRequest | None:
        """Answer `request` by `client.write` and one `client.finish`; None: already answered."""

    def refuse(self, request: Request) -> bytes:
        """Count a request that is not served; returns the header lines of the error."""


class Clients:
    """The connections of one server, and what they share."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        held: HeldBytes,
        removed: Callable[[], None],
        check_head: HeadCheck | None = None,
    ) -> None:
        """`held` counts the request bodies; `removed` is called when a connection is gone."""
        self.handler = handler
        self.limits = limits
        self.held = held
        self.check_head = check_head
        self.unsent: set[ClientConnection] = set()
        """Connections with unsent bytes, and those that are closing."""
        self.all_closed = asyncio.Event()
        self.all_closed.set()
        self._removed = removed
        self._connected: set[ClientConnection] = set()

    def __len__(self) -> int:
        return len(self._connected)

    def __iter__(self) -> "Iterator[ClientConnection]":
        return iter(self._connected)

    def refuse(self, refusal: Refusal) -> bytes:
        """Tell the handler of a request that cannot be read; returns the error's header lines."""
        added = self.handler.refuse(refusal.head) if refusal.head is not None else b""
        return refusal.lines + added

    def add(self, client: "ClientConnection") -> None:
        self._connected.add(client)
        self.all_closed.clear()

    def remove(self, client: "ClientConnection") -> None:
        self._connected.discard(client)
        self.unsent.discard(client)
        self._removed()
        if not self._connected:
            self.all_closed.set()


class ClientConnection:
    """One client connection. While it has no deadline, `deadline` is infinite.

    An `asyncio.Protocol` by its methods alone, because a compiled class cannot inherit from it.
    """

    def __init__(self, clients: Clients, peer: str = "") -> None:
        """`peer`: the client's address, which counts when the server is full."""
        self.deadline = inf
        self.peer = peer
        self._clients = clients
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        limits = clients.limits
        self._reader = RequestReader(limits.head, limits.body, clients.held, clients.check_head)
        self._held_body = 0  # bytes of the body of the request that is being served
        self._milestones = 0
        self._active: ActiveRequest | None = None
        self._upgraded: UpgradedRequest | None = None
        # True from `handle` to `finish`. `_active` is set only if `handle` returned before the
        # answer.
        self._busy = False
        self._pumping = False
        # Set once and never reset: bytes that the client still sends are discarded.
        self._closing = False
        self._at_eof = False
        self._is_tls = False
        self._reading = True
        self._full = False
        # Unsent bytes at the last check, and since when their number has not fallen.
        self._unsent = 0
        self._unsent_since = 0.0

    # Called by the request being served.

    write: Callable[[bytes], None]
    """Send bytes to the client. It is the transport's own method, bound once, because every piece
    of every stream passes through it."""

    def continue_with(self, active: ActiveRequest) -> None:
        """Another object serves the request from now on. Only while it is being served."""
        self._active = active
        if self._full:
            active.pause_sending()

    def finish(self, *, keep: bool) -> None:
        """End the response; `keep` the connection open for the next request."""
        self._end_request()
        # After a half-close no further request can come.
        if not keep or self._at_eof:
            self.close()
            return
        # The engine did not switch protocols: bytes that waited for its answer are HTTP requests.
        if self._reader.switching:
            self._reader.resume()
        self._pump()

    def abort(self) -> None:
        """Reset the connection, so that the client sees a truncated body even without a length."""
        # Cleared first: `connection_lost` must not report a disconnect to the request that aborts.
        self._end_request()
        self._upgraded = None
        self._closing = True
        sock = self.sock
        if sock is not None and not self._transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    def close(self) -> None:
        """Close the connection once all written bytes are sent."""
        self._closing = True
        # From here on `stall_seconds` bounds the connection: its client may stop reading.
        self.deadline = inf
        self._transport.close()
        self._watch_unsent()

    def switch(self, upgraded: UpgradedRequest) -> None:
        """Pass all further bytes to `upgraded`, whose engine agreed to another protocol."""
        self._active = self._upgraded = upgraded
        self.touch()
        self.set_reading(True)
        # Bytes that the client sent before it had the 101 precede all others.
        if data := self._reader.take_after_upgrade():
            upgraded.client_data(data)
        if self._at_eof:
            upgraded.client_eof()

    def touch(self) -> None:
        """Extend the idle deadline of an upgraded connection."""
        self.deadline = self._loop.time() + self._clients.limits.idle_seconds

    def write_eof(self) -> None:
        """Close the sending side and go on reading; over TLS, which cannot, close both."""
        if self._is_tls:
            self.close()
        elif not self._transport.is_closing():
            self._transport.write_eof()

    @property
    def local_port(self) -> int:
        """The port that the client connected to."""
        port: int = self._transport.get_extra_info("sockname")[1]
        return port

    @property
    def local_address(self) -> str:
        """`host:port` (`[v6]:port`) that the client connected to."""
        return str(HostPort(*self._transport.get_extra_info("sockname")[:2]))

    def set_reading(self, on: bool) -> None:
        """Start or stop reading from the client."""
        if on == self._reading or self._transport.is_closing():
            return
        self._reading = on
        if on:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # Called by the server.

    @property
    def sock(self) -> socket.socket | None:
        """See `tandem_contract.connections`. Read only when needed, as uvloop makes it by a system
        call."""
        sock: socket.socket | None = self._transport.get_extra_info("socket")
        return sock

    def without_progress(self, now: float) -> tuple[bool, float] | None:
        """See `tandem_contract.connections`."""
        if self._busy or self._closing or self._upgraded is not None or self.deadline == inf:
            return None
        limits, started = self._clients.limits, self._reader.started
        allowed = limits.request_seconds if started else limits.idle_seconds
        return started, now - self.deadline + allowed

    def evict(self) -> None:
        """Close the connection, which has no request that is served."""
        self._clients.remove(self)
        self._transport.abort()

    def expire(self) -> None:
        """The deadline passed: answer 408 within a request, close the connection between two."""
        if self._upgraded is not None:
            self._transport.abort()
        elif self._reader.started and not self._closing and self._reader.refusal is None:
            self._reader.refuse(408, "the request did not arrive in time")
            self._pump()
        else:
            self.close()

    def check_unsent(self, now: float) -> None:
        """Disconnect a client that took none of the waiting bytes for `stall_seconds`."""
        unsent = unsent_bytes(self._transport)
        if unsent < self._unsent:
            self._unsent_since = now
        self._unsent = unsent
        if now - self._unsent_since > self._clients.limits.stall_seconds:
            self._transport.abort()

    def _watch_unsent(self) -> None:
        self._unsent = unsent_bytes(self._transport)
        self._unsent_since = self._loop.time()
        self._clients.unsent.add(self)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        self.write = self._transport.write
        self._clients.add(self)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        if self._upgraded is not None:
            self.touch()
            self._upgraded.client_data(data)
            return
        reader = self._reader
        if self._closing or reader.refusal is not None:
            return
        reader.feed(data)
        # Only progress extends the deadline, so a client cannot hold a connection by single bytes.
        if reader.milestones != self._milestones:
            self._milestones = reader.milestones
            self.deadline = self._loop.time() + self._clients.limits.request_seconds
        self._pump()

    def eof_received(self) -> bool:
        self._at_eof = True
        # asyncio closes the transport unless this method returns True; a TLS transport always.
        can_stay = not self._is_tls
        if self._upgraded is not None:
            self._upgraded.client_eof()
            return can_stay
        if can_stay and self._active is not None and self._active.survives_half_close:
            return True
        self._disconnect()
        return False

    def connection_lost(self, _exc: Exception | None) -> None:
        self._clients.remove(self)
        self._disconnect()

    def pause_writing(self) -> None:
        self._full = True
        self._watch_unsent()
        if self._active is not None:
            self._active.pause_sending()

    def resume_writing(self) -> None:
        self._full = False
        # A closing connection stays watched: its client may stop reading the last bytes.
        if not self._closing:
            self._clients.unsent.discard(self)
        if self._active is not None:
            self._active.resume_sending()

    # Request after request

    def _pump(self) -> None:
        """Serve the queued requests, then set reading and deadline to fit what comes next.

        It is not reentrant: a request that is answered within `handle` calls `finish`, which comes
        back here while the loop in `_serve_queued` is still running and takes the next one.
        """
        if self._pumping:
            return
        reader = self._reader
        if reader.requests:
            self._serve_queued()
        if self._closing:
            return
        # While a request is served, reading goes on only to notice that the client disconnects. It
        # stops with the first pipelined bytes, or a client could fill the memory with requests.
        on = not (self._busy and (reader.requests or reader.after_upgrade))
        if on != self._reading:
            self.set_reading(on)
        # The deadline bounds the client, never an engine: there is none while a request is served.
        # A refusal is written after the answers to the requests before it.
        if self._busy:
            self.deadline = inf
        elif reader.refusal is not None:
            self._write_refusal(reader.refusal)
        elif not reader.started:
            self._await_request()
        else:
            self._await_rest()

    def _serve_queued(self) -> None:
        requests = self._reader.requests
        self._pumping = True
        while requests and not self._busy and not self._closing:
            self._busy = True
            request = requests.popleft()
            self._held_body = len(request.body)
            active = self._clients.handler.handle(request, self)
            # `_busy` is false again if the request was answered, and ended, within `handle`.
            if self._busy and active is not None:
                self._active = active
                if self._full:
                    active.pause_sending()
        self._pumping = False

    def _await_request(self) -> None:
        self.deadline = self._loop.time() + self._clients.limits.idle_seconds

    def _await_rest(self) -> None:
        """Set the deadline for the rest of a request; send `100 Continue` if the client waits."""
        if self.deadline == inf:
            self.deadline = self._loop.time() + self._clients.limits.request_seconds
        if self._reader.expects:
            self._reader.expects = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _write_refusal(self, refusal: Refusal) -> None:
        body = error_body(refusal.target.decode("latin-1"), refusal.status, refusal.message)
        lines = self._clients.refuse(refusal)
        head = refusal.head is not None and refusal.head.method == b"HEAD"
        self._transport.write(response_bytes(refusal.status, lines, body, close=True, head=head))
        self._closing = True
        # `expire` closes the connection after the linger; see `_LINGER`.
        self.deadline = self._loop.time() + _LINGER
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _disconnect(self) -> None:
        active = self._active
        self._end_request()
        self._upgraded = None
        self._closing = True
        self._reader.close()
        if active is not None:
            active.client_disconnected()

    def _end_request(self) -> None:
        self._busy, self._active = False, None
        self._clients.held.give_back(self._held_body)
        self._held_body = 0
