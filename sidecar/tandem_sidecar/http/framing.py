"""Where a message body ends (RFC 9112 §6.3), found without copying what is passed on.

A framing is fed each piece once and says how many of its bytes belong to the message.

Errors: `BadFraming`: the peer broke the protocol, its connection is of no more use.
"""

from typing import Final, Protocol

import httptools

_CHUNKED_HEAD: Final = b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
"""What the parser is told, so that it expects chunks and then nothing more."""


class BadFraming(ValueError):
    """A body that HTTP/1.1 does not allow."""


class Framing(Protocol):
    """One body's progress."""

    done: bool

    def feed(self, data: bytes, payload: list[bytes] | None) -> int:
        """Bytes of `data` within the message; appends what they carry to `payload`."""

    def complete_at_eof(self) -> bool:
        """Whether the message is whole when the connection ends now."""


class Sized:
    """A body of known length, zero included."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def feed(self, data: bytes, payload: list[bytes] | None) -> int:
        size, left = len(data), self._left
        taken = size if size < left else left
        self._left = left - taken
        self.done = taken == left
        if payload is not None:
            payload.append(data[:taken])
        return taken

    def complete_at_eof(self) -> bool:
        return self.done


class UntilClose:
    """A body that ends with the connection; a lost end cannot be told from a real one."""

    def __init__(self) -> None:
        self.done = False

    def feed(self, data: bytes, payload: list[bytes] | None) -> int:
        if payload is not None:
            payload.append(data)
        return len(data)

    def complete_at_eof(self) -> bool:
        return True


class Chunked:
    """The chunked coding, trailers included; read by llhttp, without a step of ours for each chunk.

    Bytes after the message's end are refused like any other breach.
    """

    def __init__(self) -> None:
        self.done = False
        self._sink: _End | None = None
        self._parser: httptools.HttpResponseParser
        self._tail = b""

    def feed(self, data: bytes, payload: list[bytes] | None) -> int:
        if self._sink is None:
            self._sink = _End() if payload is None else _Payload()
            self._parser = httptools.HttpResponseParser(self._sink)
            self._parser.feed_data(_CHUNKED_HEAD)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as err:
            raise BadFraming(f"the chunked coding is broken: {err}") from err
        self._tail = data[-6:] if len(data) >= 6 else (self._tail + data)[-6:]
        if self._sink.reached:
            self._check_end()
            self.done = True
        if payload is not None and isinstance(self._sink, _Payload):
            payload += self._sink.parts
            self._sink.parts.clear()
        return len(data)

    def complete_at_eof(self) -> bool:
        return self.done

    def _check_end(self) -> None:
        """llhttp passes over line ends after a message, which would begin the next one."""
        if not self._tail.endswith(b"\r\n\r\n") or self._tail.endswith(b"\r\n\r\n\r\n"):
            raise BadFraming("line ends follow the end of the message")


class _End:
    """What the parser tells."""

    def __init__(self) -> None:
        self.reached = False

    def on_message_complete(self) -> None:
        self.reached = True


class _Payload(_End):
    """The same, and what the chunks carry."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)


def chunk(data: bytes) -> bytes:
    """`data` as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK: Final = b"0\r\n\r\n"
