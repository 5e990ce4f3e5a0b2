"""Finds where a message body ends (RFC 9112 §6.3) without copying the bytes that are relayed.

A framing gets each piece of the body once and returns how many of its bytes belong to the message.

Errors: `BadFraming`: the peer violated HTTP/1.1; its connection must be closed.
"""

from string import hexdigits
from typing import Final, Protocol

import httptools

_CRLF: Final = b"\r\n"
_CHUNKED_HEAD: Final = b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
"""Head fed to the parser so that it expects a chunked body and no second message."""


class BadFraming(ValueError):
    """A body that HTTP/1.1 does not allow."""


class Framing(Protocol):
    """Progress through one message body."""

    done: bool

    def feed(self, data: bytes, payload: list[bytes] | None) -> int:
        """Return how many bytes of `data` belong to the message; add their payload to `payload`."""

    def complete_at_eof(self) -> bool:
        """Whether the message is complete if the connection ends now."""


class Sized:
    """A body with a Content-Length, zero included."""

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
    """A body that ends with the connection: a truncated body looks like a complete one."""

    def __init__(self) -> None:
        self.done = False

    def feed(self, data: bytes, payload: list[bytes] | None) -> int:
        if payload is not None:
            payload.append(data)
        return len(data)

    def complete_at_eof(self) -> bool:
        return True


class Chunked:
    """A chunked body, trailers included, parsed by llhttp from the first read on that has a part of
    a chunk. Engines write a token's event in a chunk of its own, and mostly it is read alone: to
    see that takes a fraction of the time of a call of the parser.

    Bytes after the end of the message raise BadFraming.
    """

    def __init__(self) -> None:
        self.done = False
        self._sink: _EndOfMessage | None = None
        self._parser: httptools.HttpResponseParser
        self._tail = b""

    def feed(self, data: bytes, payload: list[bytes] | None) -> int:
        if self._sink is None:
            if _are_whole_chunks(data, payload):
                self._tail = _CRLF
                return len(data)
            self._sink = _EndOfMessage() if payload is None else _Payload()
            self._parser = httptools.HttpResponseParser(self._sink)
            self._parser.feed_data(_CHUNKED_HEAD)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as err:
            raise BadFraming(f"the chunked coding is broken: {err}") from err
        # The last bytes of the body, across reads, in which `_check_end` looks for extra line ends.
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

    def ends_between_chunks(self, unsent: bytes) -> bool:
        """Whether a chunk may follow the bytes fed so far, less the `unsent` ones at their end.

        Call it at most once, instead of further `feed` calls: it feeds the parser to learn its
        state, which llhttp does not expose. So the question costs nothing until it is asked.

        With unsent bytes the answer is always False: they begin with a size line or are payload of
        an open chunk, and no test tells one from the other for certain (`da` begins both a size
        line and `data:`). A wrong True would make the client take what follows for payload; a
        wrong False only costs the connection.
        """
        if unsent:
            return False
        if self._sink is None:
            return True
        # Within a chunk the parser takes the last chunk for payload, and the message does not end.
        return _accepts(self._parser, LAST_CHUNK) and self._sink.reached

    def _check_end(self) -> None:
        """Raise BadFraming for line ends after the message, which llhttp would skip silently."""
        if not self._tail.endswith(b"\r\n\r\n") or self._tail.endswith(b"\r\n\r\n\r\n"):
            raise BadFraming("line ends follow the end of the message")


def _are_whole_chunks(data: bytes, payload: list[bytes] | None) -> bool:
    """Whether `data` is made of chunks with a payload and without extensions; if it is, their
    payload is added to `payload`."""
    known = 0 if payload is None else len(payload)
    start, end = 0, len(data)
    while start < end:
        size, position = 0, start
        while position < end and position - start < _MAX_DIGITS:
            digit = _DIGITS[data[position]]
            if digit < 0:
                break
            size = 16 * size + digit
            position += 1
        line, start = position, position + 2 + size + 2
        # Longer ones come in several reads.
        is_whole = size > 0 and start <= end and data[line : line + 2] == _CRLF
        if not is_whole or data[start - 2 : start] != _CRLF:
            if payload is not None:
                del payload[known:]
            return False
        if payload is not None:
            payload.append(data[line + 2 : start - 2])
    return True


def _accepts(parser: httptools.HttpResponseParser, data: bytes) -> bool:
    try:
        parser.feed_data(data)
    except httptools.HttpParserError:
        return False
    return True


class _EndOfMessage:
    """Callback target of the parser: records that the message ended."""

    def __init__(self) -> None:
        self.reached = False

    def on_message_complete(self) -> None:
        self.reached = True


class _Payload(_EndOfMessage):
    """Records the end of the message and collects the chunks' payload."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)


def chunk(data: bytes) -> bytes:
    """Encode `data` as one chunk."""
    size = len(data)
    if size < len(_SIZE_LINES):
        return _SIZE_LINES[size] + data + _CRLF
    return b"%x\r\n%b\r\n" % (size, data)


LAST_CHUNK: Final = b"0\r\n\r\n"
_DIGITS: Final = [int(chr(n), 16) if chr(n) in hexdigits else -1 for n in range(256)]
"""The values of the characters of a hexadecimal number; -1: none."""
_MAX_DIGITS: Final = 8
"""Of a number that is read without the parser."""
_SIZE_LINES: Final = [b"%x\r\n" % size for size in range(1024)]
"""Of the short chunks that carry an event each."""
