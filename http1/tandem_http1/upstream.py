"""Pooled connections to engines: one request and its answer at a time on each.

    call = pool.send(address, method, request, receiver, connect_timeout=5.0)
    call.pause(); call.resume(); call.abort()

A call that is `switching` may be answered with 101. Its connection then carries bytes both ways,
to the engine by `call.write` and from it by the receiver's `body`, until both sides ended.

The event loop calls the receiver's methods; `failed`, or `body` with `last`, ends the call, and
after `abort` none is called. If a pooled connection turns out to be closed before a byte of the
answer came, the request is sent once more on a fresh connection.
"""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Callable
from typing import Final, cast

from tandem_contract.commandline import HostPort

from .connection import EngineConnection, Failure, Receiver, describe_error

MAX_IDLE: Final = 256
"""Largest number of idle connections per engine; requests beyond it open new ones."""
IDLE_SECONDS: Final = 4.0
"""Seconds after which an idle connection is closed: below uvicorn's keep-alive of 5 s, so that the
engine seldom closes a connection just as a request is sent on it."""


class Call:
    """One request in flight."""

    def __init__(
        self,
        pool: "Pool",
        address: HostPort,
        request: bytes,
        receiver: Receiver,
        *,
        method: bytes,
        connect_timeout: float,
        plain: bool,
        switching: bool,
        once: bool,
    ) -> None:
        self.address = address
        self.method = method
        self.request = request
        self.receiver = receiver
        self.connect_timeout = connect_timeout
        self.plain = plain
        self.switching = switching
        self.once = once
        self.retried = False
        self.engine_full: Callable[[bool], None] | None = None
        """For an upgraded connection: called with True when the engine reads too slowly, and with
        False when it takes data again."""
        self._pool = pool
        self._paused = False
        # At most one of these two is set: the connection in use, or the task that opens one.
        self._connection: EngineConnection | None = None
        self._opening: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """Close the connection, so that the engine aborts the request; report nothing more."""
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if self._connection is not None:
            self._connection.drop()
            self._connection = None

    def pause(self) -> None:
        """Stop reading from the engine until `resume`: the receiver cannot take more."""
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._paused = False
        if self._connection is not None:
            self._connection.resume()

    def forbid_resend(self) -> bool:
        """Never send the request again, even if its connection turns out to be stale.

        Returns False if the request was not sent yet.
        """
        if self._connection is None:
            return False
        self.retried = True
        # An aborted prefill may wait for its answer for seconds; its body is not needed any more.
        self.request = b""
        return True

    def half_close(self) -> bool:
        """Close the sending side, so that the engine aborts the request, and go on receiving.

        An answer that the engine has already sent still arrives. Returns False if there is no
        connection, or TLS on it, which cannot be half-closed: use `abort` then.
        """
        return self._connection is not None and self._connection.half_close()

    # Used after the connection switched protocols.

    @property
    def can_half_close(self) -> bool:
        """Whether one direction can be closed alone."""
        return self._connection is not None and self._connection.can_half_close

    def write(self, data: bytes) -> None:
        """Send `data` to the engine."""
        if self._connection is not None:
            self._connection.write(data)

    def write_eof(self) -> None:
        """Close the sending side and go on receiving."""
        if self._connection is not None:
            self._connection.write_eof()

    def close(self) -> None:
        """Close once all written bytes are sent; report nothing more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # Used by the pool and the connection.

    def open(self) -> None:
        """Open a new connection and send the request on it."""
        self._connection = None
        self._opening = asyncio.get_running_loop().create_task(self._open())

    def use(self, connection: EngineConnection) -> None:
        """Send the request on `connection`."""
        self._connection = connection
        connection.start(self)
        if self._paused:
            # `pause` was called while the connection was being opened.
            connection.pause()

    def detach(self) -> None:
        """Drop the connection, which the pool owns again or which is gone."""
        self._connection = None

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(self.connect_timeout):
                connection = await self._pool.connect(self.address, plain=self.plain)
        except TimeoutError:
            # TimeoutError and ConnectionRefusedError are OSErrors, so they are caught before it.
            self._report_unreachable(f"no connection within {self.connect_timeout:.3g}s")
        except ConnectionRefusedError as err:
            self._report_unreachable(describe_error(err), Failure.REFUSED)
        except OSError as err:
            self._report_unreachable(describe_error(err))
        else:
            self._opening = None
            self.use(connection)

    def _report_unreachable(self, why: str, failure: Failure = Failure.UNREACHABLE) -> None:
        self._opening = None
        self.receiver.failed(failure, f"{self.address}: {why}")


class Pool:
    """Idle connections by address, the most recently used first."""

    def __init__(self, tls: Callable[[HostPort], ssl.SSLContext | None] | None = None) -> None:
        """`tls` returns the TLS context for an address, or None for plain TCP; no `tls`: never TLS.

        It is called for every request: once certificates change, connections made with the old
        ones are not used again.
        """
        self._tls = tls
        self._idle: defaultdict[HostPort, list[EngineConnection]] = defaultdict(list)
        self._sweeping: asyncio.TimerHandle | None = None

    def send(
        self,
        address: HostPort,
        method: bytes,
        request: bytes,
        receiver: Receiver,
        *,
        connect_timeout: float = 5.0,
        plain: bool = False,
        switching: bool = False,
        once: bool = False,
    ) -> Call:
        """Send `request` to `address`; `connect_timeout` is in seconds.

        `plain`: this port never uses TLS. `switching`: the request asks for another protocol.
        `once`: do not send the request again if a pooled connection turns out to be closed; report
        `Failure.STALE` instead.
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
        # The most recently used connection first: the engine is least likely to have closed it.
        while idle:
            connection = idle.pop()
            if connection.context is not context:  # made with certificates that changed since
                connection.drop()
            elif connection.usable:
                call.use(connection)
                return call
        call.open()
        return call

    async def connect(self, address: HostPort, *, plain: bool) -> EngineConnection:
        """Open a connection. Raises OSError."""
        loop = asyncio.get_running_loop()
        connection = EngineConnection(self, address, self._context(address, plain=plain))
        # A cast, as it only looks like an `asyncio.Protocol`.
        protocol = cast(asyncio.Protocol, connection)
        host, port = address
        await loop.create_connection(lambda: protocol, host, port, ssl=connection.context)
        return connection

    def _context(self, address: HostPort, *, plain: bool) -> ssl.SSLContext | None:
        return None if plain or self._tls is None else self._tls(address)

    def add_idle(self, connection: EngineConnection) -> None:
        """Pool a connection whose answer is complete."""
        idle = self._idle[connection.address]
        if len(idle) >= MAX_IDLE:
            connection.drop()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        idle.append(connection)
        if self._sweeping is None:
            self._sweeping = loop.call_later(IDLE_SECONDS, self._sweep)

    def discard(self, connection: EngineConnection) -> None:
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
        loop = asyncio.get_running_loop()
        oldest = loop.time() - IDLE_SECONDS
        for address, idle in list(self._idle.items()):
            for connection in [c for c in idle if c.idle_since <= oldest]:
                idle.remove(connection)
                connection.drop()
            if not idle:
                del self._idle[address]
        # The timer runs only while there are idle connections.
        if self._idle:
            self._sweeping = loop.call_later(IDLE_SECONDS, self._sweep)


__all__ = ["Call", "Failure", "Pool", "Receiver"]
