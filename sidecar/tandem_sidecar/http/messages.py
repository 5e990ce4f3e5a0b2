"""Requests as the server read them, response heads as an engine wrote them, and both as bytes.

Errors: `BadHead`: a response head that HTTP/1.1 does not allow.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Final

import msgspec

from .framing import BadFraming, Chunked, Framing, Sized, UntilClose

Headers = list[tuple[bytes, bytes]]
"""Names in lower case; order and repetitions as sent."""

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"expect",
        b"content-length",
    }
)
"""Of a request: valid for one connection only, or written anew for the body that is sent."""

_RESPONSE_HOP: Final = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"upgrade"})
_BARE: Final = re.compile(rb"[\r\n\0]")
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: |$)")
_MAX_LENGTH: Final = 18
"""Digits of a content-length."""
_EVENT_STREAM: Final = b"text/event-stream"
_NONE: Final[frozenset[bytes]] = frozenset()
_REASONS: Final = {s.value: s.phrase.encode() for s in HTTPStatus}


class BadHead(ValueError):
    """A response head that cannot be read."""


class Request(msgspec.Struct, frozen=True):
    """A client's request, read whole."""

    method: bytes
    target: bytes
    """As on the request line: path and query, undecoded."""
    headers: Headers
    values: dict[bytes, bytes]
    """The headers by name, of a repeated one the last."""
    body: bytes
    http10: bool
    keep_alive: bool
    upgrade: bytes = b""
    """The protocols that the client would switch to, as its header names them."""

    def one(self, name: bytes) -> bytes | None:
        """The value of a header that may stand once, `name` in lower case; None when absent.

        Raises ValueError when it stands more than once: whose is it then?
        """
        value = self.values.get(name)
        if value is None:
            return None
        if len(self.values) < len(self.headers):
            times = sum(key == name for key, _ in self.headers)
            if times > 1:
                raise ValueError(f"{name.decode()} stands {times} times")
        return value


def listed_in_connection(headers: Headers) -> frozenset[bytes]:
    """Names that `Connection` declares hop-by-hop."""
    values = [value for key, value in headers if key == b"connection"]
    if not values:
        return _NONE
    return frozenset(name.strip() for name in b",".join(values).lower().split(b","))


def request_bytes(
    method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
) -> bytes:
    """A request on the wire; framing headers are added for `body`."""
    lines = [b"%b %b HTTP/1.1" % (method, target), *map(b": ".join, headers)]
    if body or method not in (b"GET", b"HEAD", b"OPTIONS", b"DELETE"):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def response_bytes(
    status: int, lines: bytes, body: bytes, *, close: bool, head: bool = False
) -> bytes:
    """A whole response of ours in JSON, with header `lines`; `head` leaves the body out."""
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b%b\r\n%b"
        % (
            status,
            _REASONS.get(status, b""),
            len(body),
            lines,
            b"connection: close\r\n" if close else b"",
            b"" if head else body,
        )
    )


class ResponseHead:
    """An engine's response head; the lines to pass on are kept as they were written."""

    __slots__ = (
        "_lines", "_listed", "_values", "event_stream", "framing", "headers", "reusable", "status",
        "status_line",
    )  # fmt: skip

    def __init__(self, block: bytes, method: bytes) -> None:
        """Read the lines up to the empty one. Raises BadHead."""
        first, *lines = block.split(b"\r\n")
        self.status, http10 = _status(first)
        self.status_line = b"HTTP/1.1" + first[8:] if http10 else first
        self._lines = lines
        self.headers: Headers = [_field(line) for line in lines]
        values = self._values = dict(self.headers)
        self.event_stream = values.get(b"content-type", b"").lower().startswith(_EVENT_STREAM)
        """Whether the body is server-sent events."""
        framing = self.framing = self._framing(method)
        listed = self._listed = (
            listed_in_connection(self.headers) if b"connection" in values else _NONE
        )
        if http10 and type(framing) is Chunked:
            raise BadHead("HTTP/1.0 has no transfer codings")
        ends = b"close" in listed or (http10 and b"keep-alive" not in listed)
        self.reusable = not ends and type(framing) is not UntilClose

    def value(self, name: bytes) -> bytes:
        """The last value of a header, empty when absent."""
        return self._values.get(name, b"")

    def encode(self, drop: frozenset[bytes], extra: bytes, *, close: bool, plain: bool) -> bytes:
        """The head for the client: our `extra` lines in, hop-by-hop and `drop` out.

        `plain` says that the chunked coding is taken off, for clients of HTTP/1.0.
        """
        dropped = _dropped(drop, type(self.framing) is Chunked, plain)
        if self._listed:
            dropped |= self._listed
        kept = [
            line
            for line, (name, _) in zip(self._lines, self.headers, strict=True)
            if name not in dropped
        ]
        if close:
            kept.append(b"connection: close")
        return b"\r\n".join([self.status_line, *kept]) + b"\r\n" + extra + b"\r\n"

    def _framing(self, method: bytes) -> Framing:
        values = self._values
        if self.status == 101:
            return UntilClose()
        if method == b"HEAD" or self.status in (204, 304):
            return Sized(0)
        if b"transfer-encoding" in values:
            if [value.lower() for value in self._all(b"transfer-encoding")] != [b"chunked"]:
                raise BadHead("a transfer coding other than chunked")
            return Chunked()
        length = values.get(b"content-length")
        if length is None:
            return UntilClose()
        twice = len(values) < len(self.headers) and len(self._all(b"content-length")) > 1
        if twice or not length.isdigit() or len(length) > _MAX_LENGTH:
            raise BadHead("content-length is no single number")
        return Sized(int(length))

    def _all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


# An engine says nearly the same each time: a line is looked at once.


@lru_cache(maxsize=64)
def _status(line: bytes) -> tuple[int, bool]:
    """The status, and whether it is of HTTP/1.0. Raises BadHead."""
    found = _STATUS.match(line)
    if found is None or _BARE.search(line):
        raise BadHead("the status line is no HTTP/1.1")
    return int(found[2]), found[1] == b"0"


@lru_cache(maxsize=256)
def _field(line: bytes) -> tuple[bytes, bytes]:
    """A header line's name in lower case, and its value. Raises BadHead."""
    if _BARE.search(line):
        raise BadHead("a line holds a bare CR, LF or NUL")
    name, colon, value = line.partition(b":")
    if not colon or not name or name != name.strip():
        raise BadHead("a header line is malformed")
    return name.lower(), value.strip()


@lru_cache(maxsize=64)
def _dropped(named: frozenset[bytes], chunked: bool, plain: bool) -> frozenset[bytes]:
    """Names that no client gets of an answer; `plain` and `chunked` as in `encode`."""
    dropped = _RESPONSE_HOP | named
    if plain:
        dropped |= {b"transfer-encoding", b"trailer"}
    return dropped | {b"content-length"} if chunked else dropped


__all__ = [
    "HOP_BY_HOP",
    "BadFraming",
    "BadHead",
    "Headers",
    "Request",
    "ResponseHead",
    "listed_in_connection",
    "request_bytes",
    "response_bytes",
]
