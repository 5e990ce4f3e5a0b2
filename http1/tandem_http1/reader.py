"""Parses a client's bytes into requests with httptools; refuses ambiguous or oversized ones.

The length of a body must be unambiguous. Otherwise a proxy in front and the sidecar could disagree
about where the next request begins (request smuggling). Beyond llhttp's own checks, this module
refuses codings other than chunked, chunked bodies under HTTP/1.0 and a missing or repeated Host.
A body with a Content-Encoding is refused too: the sidecar checks bodies as they are.
"""

from collections import deque
from collections.abc import Callable
from io import BytesIO
from typing import Final, NamedTuple

import httptools
import msgspec

from tandem_contract import body_coding, headers
from tandem_contract.held_bytes import HeldBytes

from .messages import Headers, Request, listed_in_connection

MAX_HEADERS: Final = 128
"""Largest number of header lines of a request; Envoy's own limit is 100."""
MAX_PIPELINED: Final = 64
"""Largest number of requests waiting for an answer; one read could contain thousands."""
PROGRESS: Final = 64 * 1024
"""Bytes of a body after which the client's deadline is extended."""
_RETRY_SOON: Final = f"{headers.RETRY_AFTER}: 1\r\n".encode()
_CONTENT_ENCODING: Final = body_coding.CONTENT_ENCODING.encode()
_LOOKED_AT: Final = frozenset(
    {b"content-length", b"transfer-encoding", b"expect", _CONTENT_ENCODING}
)


HeadCheck = Callable[[Request], tuple[int, str] | None]
"""Says of a request without its body, before one is read, with which status and message it is
refused; None: it is served."""


class Refusal(NamedTuple):
    """Error answer to a request that is not served."""

    status: int
    message: str
    target: bytes
    """What is known of the request's target: the error has the form of its API."""
    lines: bytes = b""
    """Header lines of the answer."""
    head: Request | None = None
    """The request without its body; None: its head was not read completely."""


class RequestReader:
    """Turns the bytes of one client into complete requests, in order, in `requests`."""

    def __init__(
        self,
        max_head: int,
        max_body: int,
        held: HeldBytes | None = None,
        check_head: HeadCheck | None = None,
    ) -> None:
        """Limits in bytes; `max_head` covers the request line and the headers together. `held`
        counts the bodies: the caller who takes a request from `requests` gives its body back."""
        self.requests: deque[Request] = deque()
        self.refusal: Refusal | None = None
        """Set once, by the first request that cannot be served; later bytes are ignored."""
        self.switching = False
        """Whether an upgrade request was read and is not answered yet."""
        self.after_upgrade = b""
        """Bytes after an upgrade request: the answer decides which protocol they belong to."""
        self.expects = False
        """Whether the client waits for `100 Continue` before it sends the body."""
        self.milestones = 0
        """Grows when a request begins, when its head ends, and every `PROGRESS` bytes of body."""
        self._max_head = max_head
        self._max_body = max_body
        self._held = held or HeldBytes()
        self._check = check_head
        self._held_body = 0
        """Bytes of the current body that are counted in `held`."""
        self._parser = httptools.HttpRequestParser(self)
        self._upgrade_request: Request | None = None
        self._version = ""
        self._target = b""
        self._size = 0
        """Bytes of the current request in all reads so far, framing included."""
        self._read = self._began = 0
        """Size of the current read, and of the read in which the current request began."""
        self._length = self._body_size = 0
        """Bytes of the current body, by its Content-Length, and so far."""
        self._reset()

    @property
    def started(self) -> bool:
        """Whether a request is partly read."""
        return self._size > 0

    def feed(self, data: bytes) -> None:
        """Parse the next bytes from the client."""
        if self.switching:
            self.after_upgrade += data
            return
        # More than one round only for an upgrade request that has to be parsed again (`_upgrade`).
        while data and self.refusal is None:
            self._read = len(data)
            self._size += self._read
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as err:
                data = self._upgrade(data[err.args[0] :])
                continue
            except httptools.HttpParserError as err:
                self.refuse(400, f"the request is not valid HTTP/1.1: {err}")
            if self._in_head:
                self._check_head(self._size)
            # A body in tiny chunks costs more to parse than its size suggests.
            elif self._size - self._body_size > 2 * self._max_head + 8 * self._body_size:
                self.refuse(400, "the request body consists mostly of chunk framing")
            return

    def refuse(self, status: int, message: str, lines: bytes = b"") -> None:
        """Refuse the current request and ignore everything after it."""
        if self.refusal is None:
            head = None if self._in_head else self._request(b"")
            self.refusal = Refusal(status, message, self._target, lines, head)
            self._drop_body()

    def resume(self) -> None:
        """The engine did not switch protocols: parse the retained bytes as requests."""
        self.switching = False
        self.feed(self.take_after_upgrade())

    def close(self) -> None:
        """The client is gone: drop what was read, and the requests that wait."""
        self._drop_body()
        while self.requests:
            self._held.give_back(len(self.requests.popleft().body))

    def take_after_upgrade(self) -> bytes:
        """Remove and return the bytes that followed the upgrade request."""
        data, self.after_upgrade = self.after_upgrade, b""
        return data

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        self._headers: Headers = []
        self._target = b""
        self._length = 0
        # A pipelined request begins within a read whose size `_reset` has dropped; `started` must
        # still be true for it.
        self._size = max(self._size, 1)
        self._began = self._read
        self.milestones += 1

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are dropped: Envoy has not checked them as headers
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self.milestones += 1
        self._version = self._parser.get_http_version()
        headers, values = self._headers, dict(self._headers)
        self._values = values
        once = len(values) == len(headers)
        # The dict holds one value for each name, so repeated names are looked up in the list.
        for name in _LOOKED_AT.intersection(values):
            for value in (values[name],) if once else self._values_of(name):
                self._check_header(name, value)
        # The reads may hold more than this head, so it is measured only where it could be too long.
        if self._size + self._began > self._max_head:
            self._check_head(len(self._target) + sum(len(n) + len(v) for n, v in headers))
        if len(headers) > MAX_HEADERS:
            self.refuse(431, f"the request has more than {MAX_HEADERS} header lines")
        if self._version not in ("1.1", "1.0"):
            self.refuse(505, f"HTTP/{self._version} is not supported: use HTTP/1.1")
        hosts = int(b"host" in values) if once else len(self._values_of(b"host"))
        if hosts > 1 or (hosts == 0 and self._version == "1.1"):
            self.refuse(400, f"the request has {hosts} Host headers: send exactly one")
        if not self._target.startswith(b"/") or b"#" in self._target:
            self._normalise_target()
        if self._check is not None and self.refusal is None:
            refused = self._check(self._request(b""))
            if refused is not None:
                self.refuse(refused[0], refused[1])

    def on_body(self, data: bytes) -> None:
        self.expects = False
        size = self._body_size + len(data)
        self.milestones += size // PROGRESS - self._body_size // PROGRESS
        self._body_size = size
        if size > self._max_body:
            self._too_large()
        elif self.refusal is None:
            if self._held.take(len(data), of=max(size, self._length)):
                self._held_body = size
                self._keep(data)
            else:
                problem = "the requests of all clients take too much memory: try again"
                self.refuse(503, problem, _RETRY_SOON)

    def on_message_complete(self) -> None:
        # The buffer's own bytes, not a copy of them.
        request = self._request(self._first if self._buffer is None else self._buffer.getvalue())
        # httptools raises HttpParserUpgrade after this callback, and `_upgrade` decides.
        if self._parser.should_upgrade():
            self._upgrade_request = request
        else:
            self._enqueue(request)

    def _request(self, body: bytes) -> Request:
        return Request(
            method=self._parser.get_method(),
            target=self._target,
            headers=self._headers,
            values=self._values,
            body=body,
            http10=self._version == "1.0",
            keep_alive=self._parser.should_keep_alive(),
        )

    # Steps between two requests.

    def _enqueue(self, request: Request) -> None:
        if self.refusal is None and len(self.requests) >= MAX_PIPELINED:
            self.refuse(429, f"more than {MAX_PIPELINED} pipelined requests wait for an answer")
        if self.refusal is None:
            self.requests.append(request)
            # From here on the body is counted until the request is answered.
            self._held_body = 0
        self._reset()

    def _reset(self) -> None:
        self._in_head = True
        self._size = 0
        self.expects = False
        self._drop_body()
        self._body_size = 0

    def _drop_body(self) -> None:
        if self._held_body:
            self._held.give_back(self._held_body)
            self._held_body = 0
        self._first = b""
        self._buffer: BytesIO | None = None

    def _keep(self, data: bytes) -> None:
        """Add `data` to the body. A list of chunks would take 28 times the memory of a body whose
        chunks have one byte each; a body that comes in one piece is not copied."""
        if self._buffer is None:
            if not self._first:
                self._first = data
                return
            self._buffer = BytesIO()
            self._buffer.write(self._first)
            self._first = b""
        self._buffer.write(data)

    def _upgrade(self, rest: bytes) -> bytes:
        """Handle a request with an Upgrade header; return the bytes to parse next.

        llhttp skips the body of such a request, whatever its head says. So a request with a body
        is parsed again without the Upgrade header, which RFC 9110 §7.8 allows a server to ignore.
        """
        request, self._upgrade_request = self._upgrade_request, None
        if request is None or self.refusal is not None:
            return b""
        if request.method == b"CONNECT":
            self.refuse(501, "CONNECT is not supported")
            return b""
        protocols = _protocols(request.headers)
        if protocols and not request.http10 and not _has_body(request.headers):
            self._enqueue(msgspec.structs.replace(request, upgrade=protocols))
            self.switching, self.after_upgrade = True, rest
            return b""
        self._reset()
        # A new parser: llhttp reads no further request after an upgrade.
        self._parser = httptools.HttpRequestParser(self)
        lines = [b"%b %b HTTP/%b" % (request.method, request.target, self._version.encode())]
        lines += [b"%b: %b" % pair for pair in request.headers if pair[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n" + rest

    def _values_of(self, name: bytes) -> list[bytes]:
        return [value for key, value in self._headers if key == name]

    def _check_header(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            # llhttp has refused values that are not a number.
            self._length = int(value)
            if self._length > self._max_body:
                self._too_large()
        elif name == b"expect":
            self.expects = value.lower() == b"100-continue"
        elif name == b"transfer-encoding":
            if self._version == "1.0":
                self.refuse(400, "an HTTP/1.0 request has a transfer coding")
            elif value.lower() != b"chunked":
                self.refuse(501, "a transfer coding other than chunked is not supported")
        elif name == _CONTENT_ENCODING and body_coding.is_coded(value.decode("latin-1")):
            lines = "{}: {}\r\n".format(*body_coding.ACCEPTED).encode()
            self.refuse(body_coding.REFUSED_STATUS, body_coding.REFUSED_MESSAGE, lines)

    def _normalise_target(self) -> None:
        """Reduce an absolute URL to its path: the engine is the origin, whatever host is named."""
        method, target = self._parser.get_method(), self._target
        if method == b"CONNECT" or (target == b"*" and method == b"OPTIONS"):
            return
        scheme, _, rest = target.partition(b"://")
        if b"#" in target or scheme.lower() not in (b"http", b"https"):
            self.refuse(400, "the request target is neither a path nor an HTTP URL")
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
    """Protocols of the Upgrade header, without HTTP/2, which the engines do not support."""
    if b"upgrade" not in listed_in_connection(headers):
        return b""
    offered = b",".join(value for name, value in headers if name == b"upgrade").split(b",")
    return b", ".join(p.strip() for p in offered if p.strip().lower() not in (b"", b"h2c", b"h2"))
