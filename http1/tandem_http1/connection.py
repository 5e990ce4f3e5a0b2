"""A connection to a server, which sends one request at a time, and a request on its way: `Call`.

The event loop calls the receiver's methods; `failed`, or `body` with `last`, ends the call, and
after `abort` none is called.

A server may close an idle connection just as the next request is sent on it: the connection was
*stale*, and the request is sent once more on a fresh one. A server that read the request and then
ended is another case, which looks alike. TCP tells them apart: a FIN acknowledges all that had
arrived when the server closed. If it acknowledges nothing of the request, the request was not read,
whatever the distance. A call that may be sent `once` only is sent again in this case alone.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from time import monotonic
from typing import Final, Protocol, cast

from tandem_contract.commandline import HostPort
from tandem_contract.connections import keep_alive, unsent_bytes

from .deadline import Deadline
from .framing import BadFraming, Framing
from .messages import BadHead, ResponseHead

MAX_HEAD: Final = 64 * 1024
"""Largest response head, in bytes."""
_VERSION: Final = b"HTTP/1."
MAX_INTERIM: Final = 32
"""Largest number of interim answers (1xx) before the final one."""
_FLUSH_SECONDS: Final = 30.0
"""Seconds for a server to take the last bytes of a closed tunnel."""


class Failure(StrEnum):
    """Why a call got no complete answer."""

    UNREACHABLE = "unreachable"
    """No connection was made, so nothing was sent."""
    REFUSED = "refused"
    """The connection was refused: the host is up, and no process listens on the port."""
    STALE = "stale"
    """A pooled connection turned out to be closed, and the call, which may be sent only once, may
    have been read."""
    LOST = "lost"
    """The connection ended before the answer did."""
    MALFORMED = "malformed"
    """The answer is not valid HTTP/1.1."""


class Receiver(Protocol):
    """Takes the answer to one call."""

    payload_only: bool
    """Whether `body` gets the payload only; otherwise bytes in wire form, with chunk framing."""

    def head(self, head: ResponseHead) -> None:
        """The final head. Interim ones (1xx) are skipped, except 101 for a call that may switch."""

    def body(self, data: bytes, last: bool) -> None:
        """The next body bytes; `last` ends the answer. Called at least once."""

    def failed(self, failure: Failure, detail: str) -> None:
        """The call ended without a complete answer; `detail` names the server and the cause."""


class Owner(Protocol):
    """Opens connections and keeps those that are idle: the pool."""

    async def connect(self, address: HostPort, *, plain: bool) -> "ServerConnection":
        """Open a connection. Raises OSError."""

    def add_idle(self, connection: "ServerConnection") -> None:
        """Keep a connection whose answer is complete."""

    def discard(self, connection: "ServerConnection") -> None:
        """Forget a closed connection."""


class ServerConnection:
    """One connection: finds the end of each answer and passes the bytes before it on.

    An `asyncio.Protocol` by its methods alone, because a compiled class cannot inherit from it.
    """

    def __init__(self, pool: Owner, address: HostPort, context: ssl.SSLContext | None) -> None:
        self.address = address
        self.context = context
        """TLS context of the connection; None: no TLS."""
        self.idle_since = 0.0
        self._pool = pool
        self._transport: asyncio.Transport
        self._call: Call | None = None
        self._head = b""
        self._framing: Framing | None = None
        self._reusable = False
        # Answers completed so far. Above 0, the connection came from the pool and may be stale.
        self._served = 0
        self._interim = 0
        self._switched = False
        self._ended = False
        self._half_closed = False
        self._paused = False

    @property
    def usable(self) -> bool:
        """Whether the connection is open, as far as the event loop knows."""
        return not self._transport.is_closing()

    def start(self, call: "Call") -> None:
        """Send the request of `call` on this idle connection."""
        self._call, self._framing, self._head, self._interim = call, None, b"", 0
        self._transport.write(call.request)

    def drop(self) -> None:
        """Close at once without reporting to the call.

        The server is told before this returns, so before a client that is answered next can act.
        """
        self._call = None
        raw = self._transport.get_extra_info("socket")
        # A transport closes its socket only in a later turn of the event loop.
        if raw is not None and not self._transport.is_closing():
            # OSError: the server closed it meanwhile, or no file descriptor is left.
            with suppress(OSError), raw.dup() as own:
                own.shutdown(socket.SHUT_RDWR)
        self._transport.abort()

    def half_close(self) -> bool:
        """Close the sending side, so that the server aborts the request, and go on receiving.

        Returns False if the connection cannot be half-closed: it uses TLS or is closing.
        """
        if not self.can_half_close or self._transport.is_closing():
            return False
        # The server gets no further request on this connection; see `_read_head`.
        self._half_closed = True
        self._transport.write_eof()
        return True

    # Used after the connection switched protocols.

    @property
    def can_half_close(self) -> bool:
        """Whether one direction can be closed alone; over TLS both close together."""
        return self._transport.can_write_eof()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def write_eof(self) -> None:
        if not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """Close once all written bytes are sent, without reporting to the call."""
        self._call = None
        self._transport.close()
        asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._transport.abort)

    def pause(self) -> None:
        self._paused = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        self._paused = False
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # A lost host sends no end. One that is back answers with a reset, but only if it is asked.
        keep_alive(transport.get_extra_info("socket"))

    def pause_writing(self) -> None:
        if self._call is not None and self._call.server_full is not None:
            self._call.server_full(True)

    def resume_writing(self) -> None:
        if self._call is not None and self._call.server_full is not None:
            self._call.server_full(False)

    def eof_received(self) -> bool:
        self._ended = self._is_orderly_end()
        call = self._call
        if call is not None and call.once and self._may_be_stale():
            # Only now: the kernel forgets the acknowledgments when the connection is closed.
            call.unread = unsent_bytes(self._transport) >= len(call.request)
        # Without an upgrade the end closes the connection; `connection_lost` judges the answer.
        if not self._switched or self._call is None:
            # At once: what of the request is unsent has no answer any more.
            self._transport.abort()
            return False
        self._call.receiver.body(b"", True)
        return self.can_half_close

    def _is_orderly_end(self) -> bool:
        """Whether the server itself ended the connection.

        Over TLS only a close_notify proves it: without one, a host on the path may have sent the
        FIN to truncate the answer.
        """
        tls = self._transport.get_extra_info("ssl_object")
        try:
            return tls is None or tls.read(1) == b""
        except ssl.SSLError:
            return False

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            # Bytes that answer no request: the connection is out of step.
            self._pool.discard(self)
            self._transport.abort()
            return
        try:
            if self._framing is None:
                self._head += data
                if not self._read_head(call):
                    return
                data, self._head = self._head, b""
                # The receiver may have aborted the call when it got the head.
                if self._call is not call:
                    return
            self._read_body(call, data)
        except (BadHead, BadFraming) as err:
            self._fail(Failure.MALFORMED, str(err))

    def connection_lost(self, exc: Exception | None) -> None:
        call = self._call
        if call is None:
            self._pool.discard(self)
            return
        # The server closed a pooled connection before it sent a byte of this answer: it most likely
        # never read the request, which is then sent once more on a fresh connection.
        stale = self._may_be_stale() and not call.retried
        if stale and call.once and not call.unread:
            self._fail(Failure.STALE, "a pooled connection turned out to be closed")
        elif stale:
            self._call = None
            call.retried = True
            call.open()
        elif exc is None and self._ended and self._is_complete_at_eof():
            self._call = None
            call.detach()
            call.receiver.body(b"", True)
        else:
            cause = f" ({describe_error(exc)})" if exc is not None else ""
            self._fail(Failure.LOST, f"the connection ended before the answer did{cause}")

    def _may_be_stale(self) -> bool:
        """Whether the connection came from the pool and has nothing of this call's answer."""
        return self._served > 0 and self._framing is None and not self._head

    def _is_complete_at_eof(self) -> bool:
        complete = self._framing is not None and self._framing.complete_at_eof()
        return complete and not self._switched

    def _read_head(self, call: "Call") -> bool:
        """Read the final head; return whether it is complete. `_head` keeps the bytes after it."""
        while True:
            data = self._head
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if data[: len(_VERSION)] != _VERSION[: len(data)]:
                    raise BadHead("the status line is not HTTP/1.1")
                if len(data) > MAX_HEAD:
                    raise BadHead(f"the response head is longer than {MAX_HEAD} bytes")
                return False
            head = ResponseHead(data[:end], call.method)
            self._head = data[end + 4 :]
            if head.status >= 200:
                break
            if head.status == 101:
                if not call.switching:
                    raise BadHead("the server switched protocols without an upgrade request")
                break
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise BadHead(f"the server sent more than {MAX_INTERIM} interim answers")
        self._switched = head.status == 101
        # Set before the receiver gets the head, because it may abort this call within `head`.
        self._framing, self._reusable = head.framing, head.reusable and not self._half_closed
        call.receiver.head(head)
        return True

    def _read_body(self, call: "Call", data: bytes) -> None:
        framing = self._framing
        if framing is None:
            return
        payload: list[bytes] | None = [] if call.receiver.payload_only else None
        end = framing.feed(data, payload)
        # The connection goes back to the pool before the receiver gets the last bytes: the receiver
        # may send its next request at once and can then use this connection.
        if framing.done:
            self._finish(call, surplus=end < len(data))
            data = data[:end]
        if payload is not None:
            data = b"".join(payload)
        if data or framing.done:
            call.receiver.body(data, framing.done)

    def _finish(self, call: "Call", *, surplus: bool) -> None:
        """Return the connection to the pool, unless it is closing or out of step."""
        self._call = None
        self._served += 1
        call.detach()
        # A server may answer before it read the whole request: the rest of the request would be
        # parsed as the next one.
        unsent = self._transport.get_write_buffer_size() > 0
        if self._reusable and not surplus and not unsent:
            # A connection that is not read would not notice that the server closes it.
            if self._paused:
                self.resume()
            self._pool.add_idle(self)
        else:
            self._transport.abort()

    def _fail(self, failure: Failure, why: str) -> None:
        # Cleared before `abort`, so that `connection_lost` does not report the failure again.
        call, self._call = self._call, None
        self._transport.abort()
        if call is not None:
            call.detach()
            call.receiver.failed(failure, f"{self.address}: {why}")


class Call:
    """One request in flight."""

    def __init__(
        self,
        pool: Owner,
        address: HostPort,
        request: bytes,
        receiver: Receiver,
        *,
        method: bytes,
        connect_timeout: float | None,
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
        """Whether it was sent a second time, or must not be."""
        self.unread = False
        """Whether the server closed a pooled connection before any byte of the request came."""
        self.sent: float | None = None
        """When it was first sent, by `time.monotonic()`."""
        self.server_full: Callable[[bool], None] | None = None
        """For an upgraded connection: called with True when the server reads too slowly, and with
        False when it takes data again."""
        self._pool = pool
        self._paused = False
        # At most one of these two is set: the connection in use, or the task that opens one.
        self._connection: ServerConnection | None = None
        self._opening: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """Close the connection, so that the server aborts the request; report nothing more."""
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if self._connection is not None:
            self._connection.drop()
            self._connection = None

    def pause(self) -> None:
        """Stop reading from the server until `resume`: the receiver cannot take more."""
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
        """Close the sending side, so that the server aborts the request, and go on receiving.

        An answer that the server has already sent still arrives. Returns False if there is no
        connection, or TLS on it, which cannot be half-closed: use `abort` then.
        """
        return self._connection is not None and self._connection.half_close()

    # Used after the connection switched protocols.

    @property
    def can_half_close(self) -> bool:
        """Whether one direction can be closed alone."""
        return self._connection is not None and self._connection.can_half_close

    def write(self, data: bytes) -> None:
        """Send `data` to the server."""
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

    def use(self, connection: ServerConnection) -> None:
        """Send the request on `connection`."""
        self._connection = connection
        if self.sent is None:
            self.sent = monotonic()
        connection.start(self)
        if self._paused:
            # `pause` was called while the connection was being opened.
            connection.pause()

    def detach(self) -> None:
        """Drop the connection, which the pool owns again or which is gone."""
        self._connection = None

    async def _open(self) -> None:
        try:
            async with Deadline(self.connect_timeout):
                connection = await self._pool.connect(self.address, plain=self.plain)
        except TimeoutError as err:
            # TimeoutError and ConnectionRefusedError are OSErrors, so they are caught before it.
            limit = self.connect_timeout
            # Without a limit it is the system's.
            why = describe_error(err) if limit is None else f"no connection within {limit:.3g}s"
            self._report_unreachable(why)
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


def describe_error(err: Exception) -> str:
    """Return why a connection failed, without Python's exception syntax."""
    if isinstance(err, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {err.verify_message.rstrip('.')}"
    if isinstance(err, ssl.SSLError) and err.reason:
        return f"TLS: {err.reason.replace('_', ' ').lower()}"
    if isinstance(err, OSError) and err.errno is not None and err.errno > 0:
        # asyncio puts its own words and the address into `strerror`.
        return os.strerror(err.errno)
    return str(err) or type(err).__name__
