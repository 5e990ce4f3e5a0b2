"""The sidecar's reader of clients' requests, compared with h11 on the same bytes.

First byte: the size of the pieces. The rest: what a client sends.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import h11

from tandem_http1.messages import HOP_BY_HOP, Headers, Request, request_bytes
from tandem_http1.reader import RequestReader

from .pieces import in_pieces

_HEAD = _BODY = 1 << 20
"""Limits beyond every input: a request near a limit may be measured differently in pieces."""


def check(data: bytes) -> None:
    size, wire = data[0] if data else 0, data[1:]
    whole, pieces = _read([wire]), _read(in_pieces(size, wire))
    assert list(whole.requests) == list(pieces.requests), "the requests depend on the pieces"
    assert (whole.refusal is None) == (pieces.refusal is None)
    assert whole.after_upgrade == pieces.after_upgrade
    for request in whole.requests:
        _check_request(request)
    _compare(list(whole.requests), _requests_of_h11(wire))


def _read(parts: Iterable[bytes]) -> RequestReader:
    reader = RequestReader(_HEAD, _BODY)
    for part in parts:
        reader.feed(part)
    return reader


def _check_request(request: Request) -> None:
    assert b"\r" not in request.target
    assert b"\n" not in request.target
    assert b" " not in request.target
    for name, value in request.headers:
        assert name == name.lower()
        assert not set(b"\r\n\0: ") & set(name), name
        assert not set(b"\r\n\0") & set(value), value
    hosts = [value for name, value in request.headers if name == b"host"]
    assert len(hosts) == 1 or (request.http10 and not hosts)
    if hosts and request.method != b"CONNECT":
        _check_forwarded(request)


def _check_forwarded(request: Request) -> None:
    """What the sidecar would send to an engine is this one request, to any reader."""
    kept = [pair for pair in request.headers if pair[0] not in HOP_BY_HOP]
    wire = request_bytes(request.method, request.target, kept, request.body)
    (again,) = _read([wire]).requests
    assert (again.method, again.target, again.body) == (
        request.method,
        request.target,
        request.body,
    )
    assert [pair for pair in again.headers if pair[0] != b"content-length"] == kept
    other = _requests_of_h11(wire)
    if not other.failed:
        (read,) = other.requests
        assert read.is_complete
        assert read.body == request.body


@dataclass
class _OtherRequest:
    """A request as h11 reads it."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes = b""
    is_complete: bool = False
    is_last: bool = False
    """Whether h11 reads no request after it on the connection."""


@dataclass
class _OtherReading:
    requests: list[_OtherRequest] = field(default_factory=list)
    failed: bool = False
    """Whether h11 refused the bytes behind these requests."""


def _requests_of_h11(wire: bytes) -> _OtherReading:
    connection, reading = (
        h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20),
        _OtherReading(),
    )
    connection.receive_data(wire)
    try:
        while _read_request(connection, reading):
            pass
    except h11.RemoteProtocolError:
        reading.failed = True
    return reading


def _read_request(connection: h11.Connection, reading: _OtherReading) -> bool:
    """Read the next request; whether another may follow."""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            reading.requests.append(_OtherRequest(event.method, event.target, list(event.headers)))
        elif isinstance(event, h11.Data):
            reading.requests[-1].body += event.data
        elif isinstance(event, h11.EndOfMessage):
            reading.requests[-1].is_complete = True
            break
        else:
            return False
    if reading.requests[-1].method == b"CONNECT":
        reading.requests[-1].is_last = True
        return False
    connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    if connection.their_state is not h11.DONE or connection.our_state is not h11.DONE:
        reading.requests[-1].is_last = True
        return False
    connection.start_next_cycle()
    return True


def _compare(ours: list[Request], theirs: _OtherReading) -> None:
    """Both readers find the same boundaries in bytes that both accept."""
    for mine, other in zip(ours, theirs.requests, strict=False):
        assert mine.method == other.method
        if other.target.startswith(b"/"):
            assert mine.target == other.target
        if mine.upgrade:
            return
        if not other.is_complete:
            assert theirs.failed, "h11 waits for more of a body that our reader ended"
            return
        assert mine.body == other.body
        assert _comparable(mine.headers) == _comparable(other.headers)
        if other.is_last or not mine.keep_alive:
            return
    if not theirs.failed:
        complete = [request for request in theirs.requests if request.is_complete]
        assert len(ours) <= len(complete), "our reader finds a request that h11 does not"


def _comparable(headers: Headers) -> Headers:
    """The headers without differences that change no meaning: our reader ignores an upgrade of a
    request with a body, and h11 writes the coding's name in lower case."""
    return [
        (name, value.lower() if name == b"transfer-encoding" else value)
        for name, value in headers
        if name != b"upgrade"
    ]
