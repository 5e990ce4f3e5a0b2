"""A client's request, an engine's response head, and their encoding as bytes.

Errors: `BadHead`: an engine sent a response head that HTTP/1.1 does not allow.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Final

import msgspec

from .framing import BadFraming, Chunked, Framing, Sized, UntilClose

Headers = list[tuple[bytes, bytes]]
"""Pairs of name and value; names in lower case, order and repetitions as sent."""

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
"""Request headers that are not forwarded: valid for one connection only, or rewritten to fit the
body that is sent."""

_RESPONSE_HOP: Final = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"upgrade"})
_BARE: Final = re.compile(rb"[\r\n\0]")
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: |$)")
_MAX_LENGTH: Final = 18
"""Largest number of digits of a Content-Length."""
_EVENT_STREAM: Final = b"text/event-stream"
_NONE: Final[frozenset[bytes]] = frozenset()
_REASONS: Final = {s.value: s.phrase.encode() for s in HTTPStatus}


class BadHead(ValueError):
    """A response head that cannot be parsed."""


class Request(msgspec.Struct, frozen=True):
    """A client's complete request."""

    method: bytes
    target: bytes
    """Path and query as on the request line, not decoded."""
    headers: Headers
    values: dict[bytes, bytes]
    """Headers by name; the last value of a repeated one."""
    body: bytes
    http10: bool
    keep_alive: bool
    upgrade: bytes = b""
    """Protocols that the client offers to switch to, from its Upgrade header; empty: none."""

    def single(self, name: bytes) -> bytes | None:
        """Return the value of a header that may occur once, `name` in lower case; None if absent.

        Raises ValueError when it occurs more than once, because hops may pick different values.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if len(self.values) < len(self.headers):
            times = sum(key == name for key, _ in self.headers)
            if times > 1:
                raise ValueError(f"header {name.decode()} occurs {times} times: send it once")
        return value


def listed_in_connection(headers: Headers) -> frozenset[bytes]:
    """Header names that the Connection header declares hop-by-hop."""
    values = [value for key, value in headers if key == b"connection"]
    if not values:
        return _NONE
    return frozenset(name.strip() for name in b",".join(values).lower().split(b","))


def request_bytes(
    method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
) -> bytes:
    """Encode a request; a Content-Length is added for `body`."""
    lines = [b"%b %b HTTP/1.1" % (method, target), *map(b": ".join, headers)]
    # RFC 9110 §8.6: without a body only methods that anticipate one get a Content-Length.
    if body or method not in (b"GET", b"HEAD", b"OPTIONS", b"DELETE"):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def response_bytes(
    status: int, lines: bytes, body: bytes, *, close: bool, head: bool = False
) -> bytes:
    """Encode a JSON response of the sidecar with header `lines`; `head`: without the body."""
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
    """An engine's response head; the header lines that are relayed keep their original bytes."""

    __slots__ = (
        "_lines", "_listed", "event_stream", "framing", "headers", "reusable", "status",
        "status_line", "values",
    )  # fmt: skip

    def __init__(self, block: bytes, method: bytes) -> None:
        """Parse `block`, the answer's head up to its empty line, for `method`. Raises BadHead."""
        first, *lines = block.split(b"\r\n")
        self.status, http10 = _status(first)
        # The version is that of the connection to the client, not the engine's (RFC 9112 §2.3).
        self.status_line = b"HTTP/1.1" + first[8:] if http10 else first
        self._lines = lines
        self.headers: Headers = [_field(line) for line in lines]
        values = self.values = dict(self.headers)
        """Headers by name; the last value of a repeated one."""
        self.event_stream = values.get(b"content-type", b"").lower().startswith(_EVENT_STREAM)
        """Whether the body is a stream of server-sent events."""
        framing = self.framing = self._framing(method)
        listed = self._listed = (
            listed_in_connection(self.headers) if b"connection" in values else _NONE
        )
        # RFC 9112 §6.1: the framing of an HTTP/1.0 message with a transfer coding is faulty.
        if http10 and type(framing) is Chunked:
            raise BadHead("an HTTP/1.0 answer has a transfer coding")
        # RFC 9112 §9.3: HTTP/1.1 keeps a connection open by default, HTTP/1.0 closes it.
        ends = b"close" in listed or (http10 and b"keep-alive" not in listed)
        self.reusable = not ends and type(framing) is not UntilClose

    def value(self, name: bytes) -> bytes:
        """Return the last value of a header, empty if absent."""
        return self.values.get(name, b"")

    def encode(self, drop: frozenset[bytes], extra: bytes, *, close: bool, plain: bool) -> bytes:
        """Encode the head for a client without hop-by-hop headers and `drop`, with `extra` lines.

        `close`: announce that the connection closes after this answer. `plain`: the body is sent
        without the chunked coding, for clients of HTTP/1.0.
        """
        dropped = _dropped(drop, type(self.framing) is Chunked, plain)
        if self._listed:
            dropped |= self._listed
        lines = [
            line
            for line, (name, _) in zip(self._lines, self.headers, strict=True)
            if name not in dropped
        ]
        if close:
            lines.append(b"connection: close")
        return b"\r\n".join([self.status_line, *lines]) + b"\r\n" + extra + b"\r\n"

    def _framing(self, method: bytes) -> Framing:
        values = self.values
        # In the order of RFC 9112 §6.3: the first rule that applies decides.
        if self.status == 101:
            return UntilClose()
        if method == b"HEAD" or self.status in (204, 304):
            return Sized(0)
        if b"transfer-encoding" in values:
            if [value.lower() for value in self._all(b"transfer-encoding")] != [b"chunked"]:
                raise BadHead("the answer has a transfer coding other than chunked")
            return Chunked()
        length = values.get(b"content-length")
        if length is None:
            return UntilClose()
        # Two lengths could be understood differently by the next hop, even where they agree.
        repeated = len(values) < len(self.headers) and len(self._all(b"content-length")) > 1
        if repeated or not length.isdigit() or len(length) > _MAX_LENGTH:
            raise BadHead("the content-length is not a single number")
        return Sized(int(length))

    def _all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


# An engine sends nearly the same lines each time, so that each distinct line is parsed once.


@lru_cache(maxsize=64)
def _status(line: bytes) -> tuple[int, bool]:
    """Return the status and whether the line says HTTP/1.0. Raises BadHead."""
    match = _STATUS.match(line)
    if match is None or _BARE.search(line):
        raise BadHead("the status line is not HTTP/1.1")
    return int(match[2]), match[1] == b"0"


@lru_cache(maxsize=256)
def _field(line: bytes) -> tuple[bytes, bytes]:
    """Split a header line into its name, in lower case, and its value. Raises BadHead."""
    if _BARE.search(line):
        raise BadHead("a header line contains a bare CR, LF or NUL")
    name, colon, value = line.partition(b":")
    if not colon or not name or name != name.strip():
        raise BadHead("a header line is malformed")
    return name.lower(), value.strip()


@lru_cache(maxsize=64)
def _dropped(named: frozenset[bytes], chunked: bool, plain: bool) -> frozenset[bytes]:
    """Names of the headers that are not relayed to a client; `chunked` is the engine's coding."""
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
