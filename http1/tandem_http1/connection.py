"""One connection to an engine: sends one request at a time and passes its answer to a receiver."""

import asyncio
import socket
import ssl
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol, cast

from tandem_contract.commandline import HostPort

from .framing import BadFraming, Framing
from .messages import BadHead, ResponseHead

if TYPE_CHECKING:
    from .upstream import Call, Pool

MAX_HEAD: Final = 64 * 1024
"""Largest response head, in bytes."""
MAX_INTERIM: Final = 32
"""Largest number of interim answers (1xx) before the final one."""
_FLUSH_SECONDS: Final = 30.0
"""Seconds for an engine to take the last bytes of a closed tunnel."""


class Failure(StrEnum):
    """Why a call got no complete answer."""

    UNREACHABLE = "unreachable"
    """No connection was made, so nothing was sent."""
    REFUSED = "refused"
    """The connection was refused: the host is up, and no process listens on the port."""
    STALE = "stale"
    """A pooled connection turned out to be closed, and the call may be sent only once."""
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
        """The call ended without a complete answer; `detail` names the engine and the cause."""


class EngineConnection:
    """One connection: finds the end of each answer and passes the bytes before it on.

    An `asyncio.Protocol` by its methods alone, because a compiled class cannot inherit from it.
    """

    def __init__(self, pool: "Pool", address: HostPort, context: ssl.SSLContext | None) -> None:
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

        The engine is told before this returns, so before a client that is answered next can act.
        """
        self._call = None
        raw = self._transport.get_extra_info("socket")
        # A transport closes its socket only in a later turn of the event loop.
        if raw is not None and not self._transport.is_closing():
            # OSError: the engine closed it meanwhile, or no file descriptor is left.
            with suppress(OSError), raw.dup() as own:
                own.shutdown(socket.SHUT_RDWR)
        self._transport.abort()

    def half_close(self) -> bool:
        """Close the sending side, so that the engine aborts the request, and go on receiving.

        Returns False if the connection cannot be half-closed: it uses TLS or is closing.
        """
        if not self.can_half_close or self._transport.is_closing():
            return False
        # The engine gets no further request on this connection; see `_read_head`.
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

    def pause_writing(self) -> None:
        if self._call is not None and self._call.engine_full is not None:
            self._call.engine_full(True)

    def resume_writing(self) -> None:
        if self._call is not None and self._call.engine_full is not None:
            self._call.engine_full(False)

    def eof_received(self) -> bool:
        self._ended = self._is_orderly_end()
        # Without an upgrade the end closes the connection; `connection_lost` judges the answer.
        if not self._switched or self._call is None:
            return False
        self._call.receiver.body(b"", True)
        return self.can_half_close

    def _is_orderly_end(self) -> bool:
        """Whether the engine itself ended the connection.

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
        # The engine closed a pooled connection before it sent a byte of this answer: it most likely
        # never read the request, which is then sent once more on a fresh connection.
        stale = self._served and self._framing is None and not self._head and not call.retried
        if stale and call.once:
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

    def _is_complete_at_eof(self) -> bool:
        complete = self._framing is not None and self._framing.complete_at_eof()
        return complete and not self._switched

    def _read_head(self, call: "Call") -> bool:
        """Read the final head; return whether it is complete. `_head` keeps the bytes after it."""
        while True:
            data = self._head
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD:
                    raise BadHead(f"the response head is longer than {MAX_HEAD} bytes")
                return False
            head = ResponseHead(data[:end], call.method)
            self._head = data[end + 4 :]
            if head.status >= 200:
                break
            if head.status == 101:
                if not call.switching:
                    raise BadHead("the engine switched protocols without an upgrade request")
                break
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise BadHead(f"the engine sent more than {MAX_INTERIM} interim answers")
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
        # An engine may answer before it read the whole request: the rest of the request would be
        # parsed as the next one.
        unsent = self._transport.get_write_buffer_size() > 0
        if self._reusable and not surplus and not unsent:
            # A connection that is not read would not notice that the engine closes it.
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


def describe_error(err: Exception) -> str:
    """Return why a connection failed, without Python's exception syntax."""
    if isinstance(err, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {err.verify_message.rstrip('.')}"
    if isinstance(err, ssl.SSLError) and err.reason:
        return f"TLS: {err.reason.replace('_', ' ').lower()}"
    return getattr(err, "strerror", None) or str(err) or type(err).__name__
