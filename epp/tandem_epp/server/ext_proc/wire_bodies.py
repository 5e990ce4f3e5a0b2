"""Body messages read from their bytes, without protobuf's objects.

A message with a body is a few fields around bytes that may be large: protobuf copies them twice,
and each access of a field costs as much as reading it here. A message of any other form is left to
protobuf's parser, so that this needs to know only what Envoy sends: a body, whether it is the last,
and behind it perhaps metadata, which body messages are not read for.
"""

from typing import Final

from ..http2.pieces import Pieces
from .messages import RequestBody, ResponseBody

_REQUEST: Final = 4 << 3 | 2
"""Tag of ProcessingRequest.request_body."""
_RESPONSE: Final = 5 << 3 | 2
"""Tag of ProcessingRequest.response_body."""
_METADATA: Final = 8 << 3 | 2
"""Tag of ProcessingRequest.metadata_context."""
_BODY: Final = 1 << 3 | 2
"""Tag of HttpBody.body."""
_END: Final = b"\x10\x01"
"""HttpBody.end_of_stream = true."""


def read_body(wire: bytes) -> RequestBody | ResponseBody | None:
    """The body in a ProcessingRequest; None: it is another message, or written another way."""
    try:
        kind = wire[0]
        if kind not in (_REQUEST, _RESPONSE):
            return None
        size, at = _varint(wire, 1)
        stop = at + size
        if stop < len(wire) and not _is_metadata(wire, stop):
            return None
        body = b""
        if at < stop and wire[at] == _BODY:
            size, at = _varint(wire, at + 1)
            # A body beyond its message must not reach into what follows.
            body = wire[at : min(at + size, stop)]
            at += size
    except IndexError:
        # Cut short.
        return None
    is_last = at != stop
    if is_last and wire[at:stop] != _END:
        return None
    if stop > len(wire):
        return None
    return RequestBody(body, is_last) if kind == _REQUEST else ResponseBody(body, is_last)


def head_size(begin: bytes) -> int:
    """Bytes before the content of the body in a ProcessingRequest that begins with `begin`; 0: it
    is another message, or not enough of it."""
    try:
        if begin[0] not in (_REQUEST, _RESPONSE):
            return 0
        _, at = _varint(begin, 1)
        return _varint(begin, at + 1)[1] if begin[at] == _BODY else 0
    except IndexError:
        return 0


def read_large_body(head: bytes, rest: Pieces) -> RequestBody | ResponseBody | None:
    """As `read_body`, without a copy of the body: `head` has `head_size` bytes, and `rest` what
    follows them. Leaves all in `rest` if it is None."""
    inside, at = _varint(head, 1)
    size, _ = _varint(head, at + 1)
    # Offsets in `rest`.
    stop = at + inside - len(head)
    if not size <= stop <= rest.size:
        return None
    behind = rest.cut(size)
    end = behind[: stop - size]
    try:
        is_read = end in (b"", _END) and (behind == end or _is_metadata(behind, len(end)))
    except IndexError:
        is_read = False
    if not is_read:
        rest.add(behind)
        return None
    body = rest.take()
    return RequestBody(body, bool(end)) if head[0] == _REQUEST else ResponseBody(body, bool(end))


def _is_metadata(wire: bytes, at: int) -> bool:
    """Whether the rest from `at` on is metadata_context alone."""
    if wire[at] != _METADATA:
        return False
    size, at = _varint(wire, at + 1)
    return at + size == len(wire)


def _varint(wire: bytes, at: int) -> tuple[int, int]:
    """The length at `at`, and where it ends. Raises IndexError when it is cut short or too long."""
    byte = wire[at]
    at += 1
    if byte < 0x80:
        return byte, at
    number, shift = byte & 0x7F, 7
    while True:
        byte = wire[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 28:
            raise IndexError("a length beyond 32 bits")
