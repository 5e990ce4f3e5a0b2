"""Requests found in a client's bytes by httptools, what is ambiguous or too much refused.

A body's length must be beyond doubt, or a proxy before us and we may disagree about where the next
request begins: of what llhttp lets pass, codings other than chunked, chunks under HTTP/1.0 and a
missing or doubled Host are refused here.
"""

from collections import deque
from typing import Final, NamedTuple

import httptools
import msgspec

from .messages import Headers, Request, listed_in_connection

MAX_HEADERS: Final = 128
"""Header lines of a request; Envoy's own bound is 100."""
MAX_PIPELINED: Final = 64
"""Requests of a client that waits for no answer; a read of small ones could hold thousands."""
PROGRESS: Final = 64 * 1024
"""Bytes of a body that earn it time for as many more."""
_LOOKED_AT: Final = frozenset({b"content-length", b"transfer-encoding", b"expect"})


class Refusal(NamedTuple):
    """Why a request is not served."""

    status: int
    message: str


class RequestReader:
    """Fed a client's bytes; whole requests come out in `requests`, in order."""

    def __init__(self, max_head: int, max_body: int) -> None:
        """Bounds in bytes, `max_head` for request line and headers together."""
        self.requests: deque[Request] = deque()
        self.refusal: Refusal | None = None
        """Set once, by the first request that cannot be served: nothing is read after it."""
        self.switching = False
        """A request to switch protocols was read, and not yet answered."""
        self.held = b""
        """What follows a request to switch protocols: whose language it is, the answer says."""
        self.expects = False
        """The client waits to be asked for its body."""
        self.milestones = 0
        """Grows when a request begins, its head ends, and with each `PROGRESS` of its body."""
        self._max_head = max_head
        self._max_body = max_body
        self._parser = httptools.HttpRequestParser(self)
        self._asked: Request | None = None
        self._version = ""
        self._size = 0
        """Bytes of the request being read, framing included, without those before it in a read."""
        self._read = self._began = 0
        """Bytes of the read that the parser is at, and of that in which the request began."""
        self._body_size = 0
        self._reset()

    @property
    def started(self) -> bool:
        """Whether part of a request is read and the rest is not."""
        return self._size > 0

    def feed(self, data: bytes) -> None:
        """Read on."""
        if self.switching:
            self.held += data
            return
        while data and self.refusal is None:
            self._read = len(data)
            self._size += self._read
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as err:
                data = self._upgrade(data[err.args[0] :])
                continue
            except httptools.HttpParserError as err:
                self.refuse(400, f"the request is no HTTP/1.1: {err}")
            if self._in_head:
                self._check_head(self._size)
            elif self._size - self._body_size > 2 * self._max_head + 8 * self._body_size:
                self.refuse(400, "the request body is mostly framing")
            return

    def refuse(self, status: int, message: str) -> None:
        """Serve neither the request being read nor any after it."""
        if self.refusal is None:
            self.refusal = Refusal(status, message)
            self._body.clear()

    def resume(self) -> None:
        """The protocol was not switched: what was held is requests."""
        self.switching = False
        self.feed(self.take_held())

    def take_held(self) -> bytes:
        """What was held, as it is to go on in the new protocol."""
        held, self.held = self.held, b""
        return held

    # httptools

    def on_message_begin(self) -> None:
        self._headers: Headers = []
        self._target = b""
        self._size = max(self._size, 1)
        self._began = self._read
        self.milestones += 1

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is no header: Envoy has not looked at it
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self.milestones += 1
        self._version = self._parser.get_http_version()
        headers, values = self._headers, dict(self._headers)
        self._values = values
        once = len(values) == len(headers)
        for name in _LOOKED_AT.intersection(values):
            for value in (values[name],) if once else self._all(name):
                self._check_header(name, value)
        if self._size + self._began > self._max_head:  # of which the head may be a part only
            self._check_head(len(self._target) + sum(len(n) + len(v) for n, v in headers))
        if len(headers) > MAX_HEADERS:
            self.refuse(431, f"the request has more than {MAX_HEADERS} header lines")
        if self._version not in ("1.1", "1.0"):
            self.refuse(505, f"HTTP/{self._version} is not spoken here: use HTTP/1.1")
        hosts = int(b"host" in values) if once else len(self._all(b"host"))
        if hosts > 1 or (hosts == 0 and self._version == "1.1"):
            self.refuse(400, f"the request has {hosts} Host headers, not one")
        if not self._target.startswith(b"/") or b"#" in self._target:
            self._normalise_target()

    def on_body(self, data: bytes) -> None:
        self.expects = False
        size = self._body_size + len(data)
        self.milestones += size // PROGRESS - self._body_size // PROGRESS
        self._body_size = size
        if size > self._max_body:
            self._too_large()
        elif self.refusal is None:
            self._body.append(data)

    def on_message_complete(self) -> None:
        request = Request(
            method=self._parser.get_method(),
            target=self._target,
            headers=self._headers,
            values=self._values,
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
            http10=self._version == "1.0",
            keep_alive=self._parser.should_keep_alive(),
        )
        if self._parser.should_upgrade():
            self._asked = request
        else:
            self._take(request)

    # Between the two

    def _take(self, request: Request) -> None:
        if self.refusal is None and len(self.requests) >= MAX_PIPELINED:
            self.refuse(429, f"more than {MAX_PIPELINED} requests were sent ahead of an answer")
        if self.refusal is None:
            self.requests.append(request)
        self._reset()

    def _reset(self) -> None:
        self._in_head = True
        self._size = 0
        self.expects = False
        self._body: list[bytes] = []
        self._body_size = 0

    def _upgrade(self, rest: bytes) -> bytes:
        """Take a request that asks for another protocol; returns what is to be read next.

        llhttp passes over its body, whatever the head says, so one that has a body is read again
        as the plain request that RFC 9110 §7.8 allows to make of it.
        """
        request, self._asked = self._asked, None
        if request is None or self.refusal is not None:
            return b""
        if request.method == b"CONNECT":
            self.refuse(501, "CONNECT is not supported")
            return b""
        protocols = _protocols(request.headers)
        if protocols and not request.http10 and not _has_body(request.headers):
            self._take(msgspec.structs.replace(request, upgrade=protocols))
            self.switching, self.held = True, rest
            return b""
        self._reset()
        self._parser = httptools.HttpRequestParser(self)
        lines = [b"%b %b HTTP/%b" % (request.method, request.target, self._version.encode())]
        lines += [b"%b: %b" % pair for pair in request.headers if pair[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n" + rest

    def _all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self._headers if key == name]

    def _check_header(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            if int(value) > self._max_body:
                self._too_large()
        elif name == b"expect":
            self.expects = value.lower() == b"100-continue"
        elif name == b"transfer-encoding":
            if self._version == "1.0":
                self.refuse(400, "HTTP/1.0 has no transfer codings")
            elif value.lower() != b"chunked":
                self.refuse(501, "a transfer coding other than chunked is not supported")

    def _normalise_target(self) -> None:
        """Make an absolute target a path: the engine is the origin, whatever it is called."""
        method, target = self._parser.get_method(), self._target
        if method == b"CONNECT" or (target == b"*" and method == b"OPTIONS"):
            return
        scheme, _, rest = target.partition(b"://")
        if b"#" in target or scheme.lower() not in (b"http", b"https"):
            self.refuse(400, "the request target is neither a path nor a URL")
            return
        authority = rest.split(b"/", 1)[0].split(b"?", 1)[0]
        path = rest[len(authority) :]
        if not path and method == b"OPTIONS":
            self._target = b"*"
        else:
            self._target = path if path.startswith(b"/") else b"/" + path

    def _check_head(self, size: int) -> None:
        if size > self._max_head:
            self.refuse(431, f"the request head is longer than {self._max_head} bytes")

    def _too_large(self) -> None:
        self.refuse(413, f"the request body is larger than {self._max_body} bytes")


def _has_body(headers: Headers) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and int(value) > 0)
        for name, value in headers
    )


def _protocols(headers: Headers) -> bytes:
    """What the client would switch to, without HTTP/2, which the engines do not speak."""
    if b"upgrade" not in listed_in_connection(headers):
        return b""
    asked = b",".join(value for name, value in headers if name == b"upgrade").split(b",")
    return b", ".join(p.strip() for p in asked if p.strip().lower() not in (b"", b"h2c", b"h2"))
