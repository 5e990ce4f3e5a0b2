"""The I/O of the HTTP/2 server: sockets, TLS, back-pressure, deadlines and an orderly end.

One `asyncio.Protocol` per connection, which works on asyncio's loop and on uvloop. All output that
the bytes of a read event cause leaves in one `transport.write`. While the peer does not take it,
the connection is not read either, so that answers to control frames cannot pile up.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from ssl import SSLContext
from typing import Final, cast

from tandem_contract.connections import LATE_SECONDS, address_of, keep_alive, to_evict
from tandem_contract.held_bytes import HeldBytes

from .connection import Connection
from .errors import ConnectionFault, ErrorCode
from .headers import BlockCache
from .health import HTTP1_STARTS, HealthService
from .limits import Limits
from .session import Call, GrpcSession, Service
from .tls import EitherListener, bound_port

_CHECK_SECONDS: Final = 0.5
"""Seconds between two looks at deadlines of connections and at what health watchers know."""
_WRITE_BUFFER: Final = 1 << 20
"""Bytes that wait in a transport before its connection is no longer read."""
_LARGE_READ: Final = 64 * 1024
"""Bytes of a read event, after which the other connections have their turn. libuv reads up to 32
times in a row, and small messages take 50 ms of a core for each 256 KiB."""

log: Final = logging.getLogger(__name__)


class Server:
    """The listening socket and its connections."""

    def __init__(
        self,
        services: Mapping[str, Service],
        health: HealthService,
        limits: Limits,
        held: HeldBytes | None = None,
    ) -> None:
        """`services` maps `/package.Service/Method` to the method. `held` counts what peers make
        this process hold."""
        self.services = {**services, **health.methods}
        self.health, self.limits, self.held = health, limits, held or HeldBytes()
        self.cache = BlockCache()
        self.connections: set[ServerConnection] = set()
        self.is_draining = False
        self._listener: asyncio.Server | EitherListener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    async def listen(
        self, host: str, port: int, tls: SSLContext | None = None, *, allows_clear: bool = False
    ) -> int:
        """Accept connections, by TLS if there is `tls`, and then also in clear text if it
        `allows_clear`; returns the port. Raises OSError."""
        port = await self._accept(host, port, tls, allows_clear=allows_clear)
        self._timer = asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._check)
        return port

    async def _accept(
        self, host: str, port: int, tls: SSLContext | None, *, allows_clear: bool
    ) -> int:
        # A cast, as it only looks like an `asyncio.Protocol`.
        connection = cast(Callable[[], asyncio.Protocol], lambda: ServerConnection(self))
        if tls is not None and allows_clear:
            limits = self.limits
            self._listener = either = EitherListener(
                connection, tls, limit=limits.connections, seconds=limits.preface_seconds
            )
            return either.listen(host, port)
        # Without reuse_port: a second process on the same port would take part of the connections.
        loop = asyncio.get_running_loop()
        seconds = self.limits.preface_seconds if tls else None
        self._listener = server = await loop.create_server(
            connection, host, port, ssl=tls, backlog=1024, ssl_handshake_timeout=seconds
        )
        return bound_port(server)

    async def stop(self, grace: float) -> None:
        """Accept no connection and, once the peers know it, no stream; wait for the open ones, and
        abort them after `grace` seconds."""
        self.is_draining = True
        if self._listener is not None:
            self._listener.close()
        self.health.close()
        for connection in list(self.connections):
            connection.drain()
        try:
            async with asyncio.timeout(grace):
                await self._all_closed.wait()
        except TimeoutError:
            for connection in list(self.connections):
                connection.abort()
        await self._all_closed.wait()
        if self._timer is not None:
            self._timer.cancel()

    def add(self, connection: "ServerConnection") -> bool:
        """Count a connection; False: it is one too many, or too late."""
        has_place = len(self.connections) < self.limits.connections or self._evict()
        self.connections.add(connection)
        self._all_closed.clear()
        return has_place and not self.is_draining

    def _evict(self) -> bool:
        """Close connections for a newcomer; False: none of them can be."""
        found = to_evict(self.connections, asyncio.get_running_loop().time())
        for connection in found:
            connection.evict()
            self.remove(connection)
        return bool(found)

    def remove(self, connection: "ServerConnection") -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        if not self.connections:
            self._all_closed.set()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self.connections):
            connection.check(now)
        if self.health.is_watched:
            self.health.update()
        self._timer = loop.call_later(_CHECK_SECONDS, self._check)


class ServerConnection:
    """One connection: HTTP/2, or a probe by HTTP/1.1.

    An `asyncio.Protocol` by its methods alone, because a compiled class cannot inherit from it.
    """

    _transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.peer = ""
        self.sock: socket.socket | None = None
        self._began = self._loop.time()
        self._session: GrpcSession | None = None
        """None until the first bytes show that it is HTTP/2."""
        self._begin = b""
        """Bytes that came before that was clear."""
        self._is_established = False
        self._unsent = 0
        """Bytes of output that waited when the peer was last given time to take some."""
        self._buffered = 0
        """Bytes of a full transport, as far as they are counted."""
        self._released = (0, 0.0)
        """Bytes of answers that had left the queues when more last did, and when."""
        self.deadline = self._began + server.limits.preface_seconds
        """The loop's time at which the connection is cut."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: the transports of uvloop are no subclass.
        self._transport = transport = cast(asyncio.Transport, transport)
        self.peer = address_of(transport.get_extra_info("peername"))
        self.sock = transport.get_extra_info("socket")
        if not self._server.add(self):
            transport.abort()
            return
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        keep_alive(self.sock)

    def data_received(self, data: bytes) -> None:
        session = self._session
        if session is None:
            session = self._detect(data)
            if session is None:
                return
            data, self._begin = self._begin, b""
        if len(data) >= _LARGE_READ:
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)
        session.receive(data, self._loop.time())
        if not self._is_established and session.connection.is_established:
            self._is_established = True
            self.deadline = float("inf")
        self.flush()

    def _read_on(self) -> None:
        """The other connections have had their turn."""
        if not self._buffered and not self._transport.is_closing():
            self._transport.resume_reading()

    def flush(self) -> None:
        """Write what is to be written; close when nothing can follow."""
        if self._session is None:
            return
        connection = self._session.connection
        if connection.sender.has_output and not self._transport.is_closing():
            self._transport.write(connection.take())
        if connection.is_done and not self._transport.is_closing():
            if connection.fault is not None:
                log.info("closed a connection of %s: %s", self.peer, connection.fault)
            self._close()

    def eof_received(self) -> None:
        """The peer sends no more. Returning None closes the transport."""

    def pause_writing(self) -> None:
        self._transport.pause_reading()
        self._count_buffer(self._transport.get_write_buffer_size())
        self._await_progress()

    def without_progress(self, now: float) -> tuple[bool, float] | None:
        """See `tandem_contract.connections.Connection`."""
        if self._session is None or not self._is_established:
            return True, now - self._began
        connection = self._session.connection
        streams, seconds = connection.streams.values(), now - connection.now
        if streams and seconds < LATE_SECONDS:
            return None
        requests = [stream for stream in streams if not stream.is_lasting]
        # An answer begins once the EPP has the request, or as much of it as it needs.
        # Of one that is paused, the pick waits, not the peer.
        has_all = any(
            stream.has_answer or stream.is_paused or not stream.is_remote_open
            for stream in requests
        )
        return None if has_all else (bool(requests), seconds)

    def evict(self) -> None:
        """Close the connection, with an error for streams whose request has not come."""
        if (session := self._session) is not None:
            fault = ConnectionFault(ErrorCode.NO_ERROR, "idle")
            if not all(stream.is_lasting for stream in session.connection.streams.values()):
                fault = ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "requests came too slowly")
            # A stream that is under way is not served, which is safe to retry.
            session.connection.fail(fault)
            session.flush()
        if self._session is None or self._transport.get_write_buffer_size():
            self.abort()

    def check(self, now: float) -> None:
        """Cut the connection if its peer makes no progress; `now`: the loop's."""
        if self.deadline < now:
            if self._transport.get_write_buffer_size() < self._unsent:
                self._await_progress()
            else:
                self.abort()
        elif self._session is not None and self._session.connection.sender.is_waiting:
            self._check_windows(self._session.connection, now)
        elif self._is_established and (progress := self.without_progress(now)) is not None:
            in_request, seconds = progress
            limits = self._server.limits
            if seconds > (limits.request_seconds if in_request else limits.idle_seconds):
                self.evict()

    def _check_windows(self, connection: Connection, now: float) -> None:
        """End the connection if its peer has opened no window for long."""
        released, since = self._released
        if connection.sender.released != released or not since:
            self._released = connection.sender.released, now
        elif now - since > self._server.limits.stall_seconds:
            connection.fail(
                ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the peer does not read its answers")
            )
            if self._session is not None:
                self._session.flush()

    def resume_writing(self) -> None:
        self._count_buffer(0)
        if self._transport.is_closing():
            # The rest, too, must be taken in time.
            self._await_progress()
        else:
            self.deadline = float("inf")
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        # The deadline must not abort a transport that is gone.
        self.deadline = float("inf")
        self._server.remove(self)
        self._count_buffer(0)
        session, self._session = self._session, None
        if session is not None:
            self._server.held.connections -= 1
            session.lost()

    def drain(self) -> None:
        """Let the peer open no more streams; close when the open ones have ended."""
        if self._session is None:
            self._close()
            return
        self._session.connection.drain()
        self.flush()

    def abort(self) -> None:
        """Cut the connection."""
        self._transport.abort()

    def _detect(self, data: bytes) -> GrpcSession | None:
        """The session if the connection is HTTP/2; None: a probe, or not clear yet."""
        self._begin += data
        if self._begin.startswith(HTTP1_STARTS):
            if (answer := self._server.health.answer_http1(self._begin)) is not None:
                self._transport.write(answer)
                self._close()
            return None
        if any(start.startswith(self._begin) for start in HTTP1_STARTS):
            return None
        server = self._server
        server.held.connections += 1
        self._session = GrpcSession(
            Connection(server.limits, server.cache, server.held),
            server.services,
            server.health.page,
            on_error=_log_error,
            on_flush=self.flush,
            on_deadline=self._expire_later,
        )
        return self._session

    def _expire_later(self, call: Call, seconds: float) -> None:
        if (session := self._session) is not None:
            timer = self._loop.call_later(seconds, session.expire, call)
            call.on_over = timer.cancel

    def _close(self) -> None:
        """Close once all output is written; a peer that takes none of it is cut."""
        if not self._transport.is_closing():
            self._await_progress()
            self._transport.close()

    def _await_progress(self) -> None:
        """Give the peer time to take some of the output."""
        self._unsent = self._transport.get_write_buffer_size()
        self.deadline = self._loop.time() + self._server.limits.stall_seconds

    def _count_buffer(self, size: int) -> None:
        """Count what a full transport holds."""
        self._server.held.add(size - self._buffered)
        self._buffered = size


def _log_error(err: Exception) -> None:
    log.error("a call ended with an unexpected error", exc_info=err)
