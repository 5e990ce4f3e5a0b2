"""Pooled connections to engines: one request and its answer at a time on each.

    call = pool.send(address, method, request, receiver, connect_timeout=5.0)
    call.pause(); call.resume(); call.abort()

A call that is `switching` may be answered with 101: its connection then carries bytes both ways,
what `call.write` is given and what the receiver's `body` gets, until each side ended.

The receiver's methods are called from the event loop, `failed` or the last `body` ending the call;
after `abort` none is called. A kept connection that turns out to be closed, before a byte of the
answer came, is replaced once by a fresh one.
"""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from tandem_contract.commandline import HostPort

from .connection import Connection, Failure, Receiver, cause_of

MAX_IDLE: Final = 256
"""Connections kept per engine; more concurrent requests connect anew."""
IDLE_SECONDS: Final = 4.0
"""Below uvicorn's keep-alive of 5 s, so that we seldom meet a connection about to be closed."""


class Call:
    """One request under way."""

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
        """Told, of a switched connection, when the engine takes no more and when it does again."""
        self._pool = pool
        self._paused = False
        self._connection: Connection | None = None
        self._opening: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """Close the connection, so that the engine stops; nothing is reported any more."""
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if self._connection is not None:
            self._connection.drop()
            self._connection = None

    def pause(self) -> None:
        """Read no more until `resume`: the receiver cannot take it."""
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._paused = False
        if self._connection is not None:
            self._connection.resume()

    def settle(self) -> bool:
        """Send it no more, whatever becomes of its connection. False: it was not sent yet."""
        if self._connection is None:
            return False
        self.retried = True
        self.request = b""
        return True

    def part(self) -> bool:
        """Tell the engine that nobody waits, and go on receiving what it may have sent already.

        False: that cannot be told, for there is no connection, or TLS on it; `abort` instead.
        """
        return self._connection is not None and self._connection.part()

    # Of a switched connection.

    @property
    def half_closes(self) -> bool:
        """Whether one side may end before the other."""
        return self._connection is not None and self._connection.half_closes

    def write(self, data: bytes) -> None:
        """Send `data` to the engine."""
        if self._connection is not None:
            self._connection.write(data)

    def write_eof(self) -> None:
        """Send no more, but go on receiving."""
        if self._connection is not None:
            self._connection.write_eof()

    def close(self) -> None:
        """End once what was written is sent; nothing is reported any more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # What pool and connection use.

    def open(self) -> None:
        """Connect anew and send."""
        self._connection = None
        self._opening = asyncio.get_running_loop().create_task(self._open())

    def use(self, connection: Connection) -> None:
        """Send on `connection`."""
        self._connection = connection
        connection.start(self)
        if self._paused:
            connection.pause()

    def done(self) -> None:
        self._connection = None

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(self.connect_timeout):
                connection = await self._pool.connect(self.address, plain=self.plain)
        except TimeoutError:
            self._unreachable(f"no connection within {self.connect_timeout:.3g}s")
        except ConnectionRefusedError as err:
            self._unreachable(cause_of(err), Failure.REFUSED)
        except OSError as err:
            self._unreachable(cause_of(err))
        else:
            self._opening = None
            self.use(connection)

    def _unreachable(self, why: str, failure: Failure = Failure.UNREACHABLE) -> None:
        self._opening = None
        self.receiver.failed(failure, f"{self.address}: {why}")


class Pool:
    """Idle connections by address, the most recently used first."""

    def __init__(self, tls: Callable[[HostPort], ssl.SSLContext | None] | None = None) -> None:
        """`tls` says with which certificates an address is spoken to; None: without TLS.

        It is asked for every call: a connection made with other certificates is not used again.
        """
        self._tls = tls
        self._idle: defaultdict[HostPort, list[Connection]] = defaultdict(list)
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

        `plain`: this port speaks no TLS, whatever is said of others; `switching`: the request
        asks for another protocol; `once`: it may not be sent again should a kept connection turn
        out to be closed, which is reported as STALE.
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
        while idle:
            connection = idle.pop()
            if connection.context is not context:
                connection.drop()
            elif connection.usable:
                call.use(connection)
                return call
        call.open()
        return call

    async def connect(self, address: HostPort, *, plain: bool) -> Connection:
        """A fresh connection. Raises OSError."""
        loop = asyncio.get_running_loop()
        context = self._context(address, plain=plain)
        _, made = await loop.create_connection(
            lambda: Connection(self, address, context), *address, ssl=context
        )
        return made

    def _context(self, address: HostPort, *, plain: bool) -> ssl.SSLContext | None:
        return None if plain or self._tls is None else self._tls(address)

    def keep(self, connection: Connection) -> None:
        """Take a connection whose answer is complete."""
        idle = self._idle[connection.address]
        if len(idle) >= MAX_IDLE:
            connection.drop()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        idle.append(connection)
        if self._sweeping is None:
            self._sweeping = loop.call_later(IDLE_SECONDS, self._sweep)

    def forget(self, connection: Connection) -> None:
        idle = self._idle.get(connection.address, [])
        if connection in idle:
            idle.remove(connection)

    def close(self) -> None:
        """Close what is idle; calls under way are their owners'."""
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
        if self._idle:
            self._sweeping = loop.call_later(IDLE_SECONDS, self._sweep)


__all__ = ["Call", "Failure", "Pool", "Receiver"]
