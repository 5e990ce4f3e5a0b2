"""Pooled connections to engines: one request and its answer at a time on each.

    call = pool.send(address, method, request, receiver, connect_timeout=5.0)
    call.pause(); call.resume(); call.abort()

The receiver's methods are called from the event loop, `failed` or the last `body` ending the call;
after `abort` none is called. A kept connection that turns out to be closed, before a byte of the
answer came, is replaced once by a fresh one.
"""

import asyncio
from collections import defaultdict
from enum import StrEnum
from typing import Final, Protocol, cast

from tandem_contract.commandline import HostPort

from .framing import BadFraming, Framing
from .messages import BadHead, ResponseHead

MAX_HEAD: Final = 64 * 1024
"""Bytes of a response head."""
MAX_IDLE: Final = 256
"""Connections kept per engine; more concurrent requests connect anew."""
IDLE_SECONDS: Final = 4.0
"""Below uvicorn's keep-alive of 5 s, so that we seldom meet a connection about to be closed."""


class Failure(StrEnum):
    """Why a call brought no whole answer."""

    UNREACHABLE = "unreachable"
    """No connection was made; nothing was sent."""
    LOST = "lost"
    """The connection ended before the answer did."""
    MALFORMED = "malformed"
    """The answer is no HTTP/1.1."""


class Receiver(Protocol):
    """Who gets an answer."""

    payload_only: bool
    """Take the chunked coding off; else `body` gets the bytes as they were on the wire."""

    def head(self, head: ResponseHead) -> None:
        """The final head; interim ones (1xx) are skipped."""

    def body(self, data: bytes, last: bool) -> None:
        """Body bytes, in wire form unless `payload_only`; called at least once."""

    def failed(self, failure: Failure, detail: str) -> None:
        """Nothing more comes; `detail` names engine and cause."""


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
    ) -> None:
        self.address = address
        self.method = method
        self.request = request
        self.receiver = receiver
        self.connect_timeout = connect_timeout
        self.retried = False
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

    def open(self) -> None:
        """Connect anew and send."""
        self._connection = None
        self._opening = asyncio.get_running_loop().create_task(self._open())

    def use(self, connection: "Connection") -> None:
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
                connection = await self._pool.connect(self.address)
        except TimeoutError:
            self._unreachable(f"no connection within {self.connect_timeout:.3g}s")
        except OSError as err:
            self._unreachable(err.strerror or str(err))
        else:
            self._opening = None
            self.use(connection)

    def _unreachable(self, why: str) -> None:
        self._opening = None
        self.receiver.failed(Failure.UNREACHABLE, f"{self.address}: {why}")


class Pool:
    """Idle connections by address, the most recently used first."""

    def __init__(self) -> None:
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
    ) -> Call:
        """Send `request` to `address`; `connect_timeout` is in seconds."""
        call = Call(
            self, address, request, receiver, method=method, connect_timeout=connect_timeout
        )
        idle = self._idle.get(address)
        while idle:
            if (connection := idle.pop()).usable:
                call.use(connection)
                return call
        call.open()
        return call

    async def connect(self, address: HostPort) -> "Connection":
        """A fresh connection. Raises OSError."""
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: Connection(self, address), *address)
        return made

    def keep(self, connection: "Connection") -> None:
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

    def forget(self, connection: "Connection") -> None:
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


class Connection(asyncio.Protocol):
    """One connection: finds the answer's end and hands on what comes before it."""

    def __init__(self, pool: Pool, address: HostPort) -> None:
        self.address = address
        self.idle_since = 0.0
        self._pool = pool
        self._transport: asyncio.Transport
        self._call: Call | None = None
        self._head = b""
        self._framing: Framing | None = None
        self._reusable = False
        self._served = 0

    @property
    def usable(self) -> bool:
        """Whether the engine has not closed it meanwhile, as far as known."""
        return not self._transport.is_closing()

    def start(self, call: Call) -> None:
        """Send the call's request; the connection is idle."""
        self._call, self._framing, self._head = call, None, b""
        self._transport.write(call.request)

    def drop(self) -> None:
        """Close at once, telling nobody."""
        self._call = None
        self._transport.abort()

    def pause(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._call is None:
            self._pool.forget(self)
            self._transport.abort()
            return
        try:
            if self._framing is None:
                self._head += data
                if not self._read_head(self._call):
                    return
                data, self._head = self._head, b""
                if self._call is None:
                    return
            self._read_body(self._call, data)
        except (BadHead, BadFraming) as err:
            self._fail(Failure.MALFORMED, str(err))

    def connection_lost(self, exc: Exception | None) -> None:
        call = self._call
        if call is None:
            self._pool.forget(self)
            return
        if self._served and self._framing is None and not self._head and not call.retried:
            self._call = None
            call.retried = True
            call.open()
        elif self._framing is not None and exc is None and self._framing.complete_at_eof():
            self._call = None
            call.done()
            call.receiver.body(b"", True)
        else:
            self._fail(Failure.LOST, "the connection ended before the answer did")

    def _read_head(self, call: Call) -> bool:
        """Whether the final head is read; what follows it is left in `_head`."""
        while True:
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > MAX_HEAD:
                    raise BadHead(f"the response head is longer than {MAX_HEAD} bytes")
                return False
            head = ResponseHead(self._head[:end], call.method)
            self._head = self._head[end + 4 :]
            if head.status == 101:
                raise BadHead("it switched protocols unasked")
            if head.status >= 200:
                break
        self._framing, self._reusable = head.framing, head.reusable
        call.receiver.head(head)
        return True

    def _read_body(self, call: Call, data: bytes) -> None:
        framing = self._framing
        if framing is None:
            return
        payload: list[bytes] | None = [] if call.receiver.payload_only else None
        end = framing.feed(data, payload)
        if framing.done:
            self._finish(call, surplus=end < len(data))
            data = data[:end]
        if payload is not None:
            data = b"".join(payload)
        if data or framing.done:
            call.receiver.body(data, framing.done)

    def _finish(self, call: Call, *, surplus: bool) -> None:
        """Keep the connection, unless it is closing or out of step."""
        self._call = None
        self._served += 1
        call.done()
        unsent = self._transport.get_write_buffer_size() > 0
        if self._reusable and not surplus and not unsent:
            self.resume()
            self._pool.keep(self)
        else:
            self._transport.abort()

    def _fail(self, failure: Failure, why: str) -> None:
        call, self._call = self._call, None
        self._transport.abort()
        if call is not None:
            call.done()
            call.receiver.failed(failure, f"{self.address}: {why}")
