"""Sends requests to one server over kept connections, and says when and how each exchange ended.

    ending = await requester.send(request, receiver, timeout=300.0)

Of a response it understands only the framing; what the bytes mean is up to the `Receiver`.

A server may close an idle connection just as the next request is sent on it. That is no answer to
the request and no loss: the request is sent again. A server that reads a request and then closes
the connection has lost it (`tandem_http1.connection` tells them apart).
"""

import asyncio
import ssl
from collections.abc import Mapping
from time import monotonic
from typing import Final, Protocol

import msgspec

from tandem_contract.commandline import HostPort
from tandem_http1.connection import Call, Failure
from tandem_http1.messages import ResponseHead
from tandem_http1.upstream import Pool

_UNLIMITED: Final = 1 << 30
_UNSENT: Final = frozenset({Failure.UNREACHABLE, Failure.REFUSED})


class Ending(msgspec.Struct, frozen=True):
    """How an exchange ended; at most one of the reasons is set, none after a whole response."""

    at: float
    """`time.monotonic()` of the last read, or of the failure."""
    sent: float | None = None
    """When the request was first sent; None: there was no connection."""
    is_resent: bool = False
    """The server had closed a kept connection before the request came, so it was sent again."""
    refused: str | None = None
    """Why the receiver refused the response, or why it is not HTTP."""
    lost: str | None = None
    """Why the connection ended before the response."""
    timed_out: bool = False


class Receiver(Protocol):
    """What the one who sends a request does with the response."""

    def head(self, status: int, fields: Mapping[bytes, bytes]) -> None:
        """Take the response's head; the names of `fields` are in lower case."""

    def data(self, data: bytes, now: float) -> None:
        """Take a part of the body, read at `now`. Raises ValueError to refuse the response."""


class Requester:
    """Connections to one server, as many as there are requests at a time."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._address = HostPort(host, port)
        self._pool = Pool(lambda _: tls, max_idle=_UNLIMITED)
        self._exchanges: set[_Pending] = set()

    async def send(self, request: bytes, receiver: Receiver, timeout: float) -> Ending:
        """Send a request, pass its response to `receiver`; `timeout` in seconds for the whole.

        Cancelling closes the connection.
        """
        loop = asyncio.get_running_loop()
        exchange = _Pending(receiver, loop.create_future())
        exchange.call = self._pool.send(
            self._address, b"POST", request, exchange, connect_timeout=None, once=True
        )
        timer = loop.call_later(timeout, exchange.time_out)
        self._exchanges.add(exchange)
        try:
            return await exchange.done
        finally:
            timer.cancel()
            self._exchanges.discard(exchange)
            # Does nothing after the end.
            exchange.call.abort()

    async def close(self) -> None:
        """Close all connections; their exchanges fail."""
        for exchange in list(self._exchanges):
            exchange.failed(Failure.LOST, "this side closed the connection")
            exchange.call.abort()
        self._pool.close()
        # The transports close their sockets in the loop's next turn.
        await asyncio.sleep(0)


class _Pending:
    """Times the response to one request (`tandem_http1.connection.Receiver`)."""

    payload_only = True

    def __init__(self, receiver: Receiver, done: "asyncio.Future[Ending]") -> None:
        self.call: Call
        self.done = done
        self._receiver = receiver

    def head(self, head: ResponseHead) -> None:
        self._receiver.head(head.status, head.values)

    def body(self, data: bytes, last: bool) -> None:
        now = monotonic()
        if self.done.done():
            return
        try:
            if data:
                self._receiver.data(data, now)
        except ValueError as err:
            self._end(now, refused=str(err))
            self.call.abort()
            return
        if last:
            self._end(now)

    def failed(self, failure: Failure, detail: str) -> None:
        now = monotonic()
        if failure is Failure.MALFORMED:
            self._end(now, refused=f"not an HTTP response: {detail}")
        elif failure in _UNSENT:
            self._end(now, lost=f"no connection: {detail}")
        else:
            self._end(now, lost=detail)

    def time_out(self) -> None:
        """The time for the whole is over."""
        self._end(monotonic(), timed_out=True)
        self.call.abort()

    def _end(
        self,
        at: float,
        *,
        refused: str | None = None,
        lost: str | None = None,
        timed_out: bool = False,
    ) -> None:
        # Done already if the waiting task was cancelled in this turn of the loop.
        if not self.done.done():
            call = self.call
            self.done.set_result(Ending(at, call.sent, call.retried, refused, lost, timed_out))
