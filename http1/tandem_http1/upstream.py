"""Pooled connections to servers: one request and its answer at a time on each.

    call = pool.send(address, method, request, receiver, connect_timeout=5.0)
    call.pause(); call.resume(); call.abort()

A call that is `switching` may be answered with 101. Its connection then carries bytes both ways,
to the server by `call.write` and from it by the receiver's `body`, until both sides ended.
"""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Callable
from typing import Final, cast

from tandem_contract.commandline import HostPort

from .connection import Call, Receiver, ServerConnection

MAX_IDLE: Final = 256
IDLE_SECONDS: Final = 4.0
"""Below uvicorn's keep-alive of 5 s, so that a server seldom closes a connection just as a request
is sent on it."""


class Pool:
    """Idle connections by address, the most recently used first."""

    def __init__(
        self,
        tls: Callable[[HostPort], ssl.SSLContext | None] | None = None,
        *,
        max_idle: int = MAX_IDLE,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """`tls` returns the TLS context for an address, or None for plain TCP; no `tls`: never TLS.

        It is called for every request: once certificates change, connections made with the old
        ones are not used again. `max_idle`: idle connections per server; requests beyond it open
        new ones. `idle_seconds`: after which an idle connection is not used again.
        """
        self._tls = tls
        self._max_idle = max_idle
        self._idle_seconds = idle_seconds
        self._idle: defaultdict[HostPort, list[ServerConnection]] = defaultdict(list)
        self._sweeping: asyncio.TimerHandle | None = None
        # Once: to ask for the running loop takes a system call.
        self._loop = asyncio.get_running_loop()

    def send(
        self,
        address: HostPort,
        method: bytes,
        request: bytes,
        receiver: Receiver,
        *,
        connect_timeout: float | None = 5.0,
        plain: bool = False,
        switching: bool = False,
        once: bool = False,
    ) -> Call:
        """Send `request` to `address`; `connect_timeout` is in seconds; None: the system's.

        `plain`: this port never uses TLS. `switching`: the request asks for another protocol.
        `once`: do not send the request again if a pooled connection turns out to be closed; report
        `Failure.STALE` instead, unless nothing of it was read.
        """
        call = Call(
            self,
            address,
            request,
            receiver,
            method=method,
            connect_timeout=connect_timeout,
            plain=plain,
            switching=switching,
            once=once,
        )
        context = self._context(address, plain=plain)
        idle = self._idle.get(address)
        oldest = self._loop.time() - self._idle_seconds
        # The most recently used connection first: the server is least likely to have closed it.
        while idle:
            connection = idle.pop()
            # The context differs after a change of certificates.
            if connection.context is not context or connection.idle_since < oldest:
                connection.drop()
            elif connection.usable:
                call.use(connection)
                return call
        call.open()
        return call

    async def connect(self, address: HostPort, *, plain: bool) -> ServerConnection:
        """Open a connection. Raises OSError."""
        connection = ServerConnection(self, address, self._context(address, plain=plain))
        # A cast, as it only looks like an `asyncio.Protocol`.
        protocol = cast(asyncio.Protocol, connection)
        host, port = address
        await self._loop.create_connection(lambda: protocol, host, port, ssl=connection.context)
        return connection

    def _context(self, address: HostPort, *, plain: bool) -> ssl.SSLContext | None:
        return None if plain or self._tls is None else self._tls(address)

    def add_idle(self, connection: ServerConnection) -> None:
        """Pool a connection whose answer is complete."""
        idle = self._idle[connection.address]
        if len(idle) >= self._max_idle:
            connection.drop()
            return
        connection.idle_since = self._loop.time()
        idle.append(connection)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(self._idle_seconds, self._sweep)

    def discard(self, connection: ServerConnection) -> None:
        """Remove a closed connection."""
        idle = self._idle.get(connection.address, [])
        if connection in idle:
            idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections; calls in flight belong to their callers."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for idle in self._idle.values():
            for connection in list(idle):
                connection.drop()
        self._idle.clear()

    def _sweep(self) -> None:
        self._sweeping = None
        oldest = self._loop.time() - self._idle_seconds
        for address, idle in list(self._idle.items()):
            for connection in [c for c in idle if c.idle_since <= oldest]:
                idle.remove(connection)
                connection.drop()
            if not idle:
                del self._idle[address]
        # The timer runs only while there are idle connections.
        if self._idle:
            self._sweeping = self._loop.call_later(self._idle_seconds, self._sweep)
