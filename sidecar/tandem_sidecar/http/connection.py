"""One connection to an engine: a request at a time, its answer handed on up to where it ends."""

import asyncio
import ssl
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol, cast

from tandem_contract.commandline import HostPort

from .framing import BadFraming, Framing
from .messages import BadHead, ResponseHead

if TYPE_CHECKING:
    from .upstream import Call, Pool

MAX_HEAD: Final = 64 * 1024
"""Bytes of a response head."""
MAX_INTERIM: Final = 32
"""Interim answers (1xx) before the final one."""
_FLUSH_SECONDS: Final = 30.0
"""For an engine to take the last bytes of a closed tunnel."""


class Failure(StrEnum):
    """Why a call brought no whole answer."""

    UNREACHABLE = "unreachable"
    """No connection was made; nothing was sent."""
    REFUSED = "refused"
    """Likewise: somebody is there, and says no."""
    STALE = "stale"
    """A kept connection turned out to be closed, and the call may be sent once only."""
    LOST = "lost"
    """The connection ended before the answer did."""
    MALFORMED = "malformed"
    """The answer is no HTTP/1.1."""


class Receiver(Protocol):
    """Who gets an answer."""

    payload_only: bool
    """Take the chunked coding off; else `body` gets the bytes as they were on the wire."""

    def head(self, head: ResponseHead) -> None:
        """The final head; interim ones (1xx) are skipped, but for the 101 of a call to switch."""

    def body(self, data: bytes, last: bool) -> None:
        """Body bytes, in wire form unless `payload_only`; called at least once."""

    def failed(self, failure: Failure, detail: str) -> None:
        """Nothing more comes; `detail` names engine and cause."""


class Connection(asyncio.Protocol):
    """One connection: finds the answer's end and hands on what comes before it."""

    def __init__(self, pool: "Pool", address: HostPort, context: ssl.SSLContext | None) -> None:
        self.address = address
        self.context = context
        """What its TLS was made with; None: it has none."""
        self.idle_since = 0.0
        self._pool = pool
        self._transport: asyncio.Transport
        self._call: Call | None = None
        self._head = b""
        self._framing: Framing | None = None
        self._reusable = False
        self._served = 0
        self._interim = 0
        self._switched = False
        self._ended = False
        self._parted = False
        self._paused = False

    @property
    def usable(self) -> bool:
        """Whether the engine has not closed it meanwhile, as far as known."""
        return not self._transport.is_closing()

    def start(self, call: "Call") -> None:
        """Send the call's request; the connection is idle."""
        self._call, self._framing, self._head, self._interim = call, None, b"", 0
        self._transport.write(call.request)

    def drop(self) -> None:
        """Close at once, telling nobody."""
        self._call = None
        self._transport.abort()

    def part(self) -> bool:
        """Tell the engine that nobody waits, and go on receiving; false: that cannot be told."""
        if not self.half_closes or self._transport.is_closing():
            return False
        self._parted = True
        self._transport.write_eof()
        return True

    # Of a connection that switched protocols.

    @property
    def half_closes(self) -> bool:
        """Whether either side may end before the other; over TLS they end together."""
        return self._transport.can_write_eof()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def write_eof(self) -> None:
        if not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """Close once what was written is sent, telling nobody."""
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
        self._ended = self._end_announced()
        if not self._switched or self._call is None:
            return False
        self._call.receiver.body(b"", True)
        return self.half_closes

    def _end_announced(self) -> bool:
        """Whether the engine ended the connection: below TLS anybody on the way can."""
        tls = self._transport.get_extra_info("ssl_object")
        try:
            return tls is None or tls.read(1) == b""
        except ssl.SSLError:
            return False

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
        stale = self._served and self._framing is None and not self._head and not call.retried
        if stale and call.once:
            self._fail(Failure.STALE, "a kept connection turned out to be closed")
        elif stale:
            self._call = None
            call.retried = True
            call.open()
        elif exc is None and self._ended and self._whole_at_eof():
            self._call = None
            call.done()
            call.receiver.body(b"", True)
        else:
            cause = f" ({cause_of(exc)})" if exc is not None else ""
            self._fail(Failure.LOST, f"the connection ended before the answer did{cause}")

    def _whole_at_eof(self) -> bool:
        whole = self._framing is not None and self._framing.complete_at_eof()
        return whole and not self._switched

    def _read_head(self, call: "Call") -> bool:
        """Whether the final head is read; what follows it is left in `_head`."""
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
                    raise BadHead("it switched protocols unasked")
                break
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise BadHead(f"more than {MAX_INTERIM} interim answers")
        self._switched = head.status == 101
        self._framing, self._reusable = head.framing, head.reusable and not self._parted
        call.receiver.head(head)
        return True

    def _read_body(self, call: "Call", data: bytes) -> None:
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

    def _finish(self, call: "Call", *, surplus: bool) -> None:
        """Keep the connection, unless it is closing or out of step."""
        self._call = None
        self._served += 1
        call.done()
        unsent = self._transport.get_write_buffer_size() > 0
        if self._reusable and not surplus and not unsent:
            if self._paused:
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


def cause_of(err: Exception) -> str:
    """Why a connection failed, as a person would say it."""
    if isinstance(err, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {err.verify_message.rstrip('.')}"
    if isinstance(err, ssl.SSLError) and err.reason:
        return f"TLS: {err.reason.replace('_', ' ').lower()}"
    return getattr(err, "strerror", None) or str(err) or type(err).__name__
