"""Header messages read from their bytes, without protobuf's objects.

A message of headers has ten to twenty small fields, each of which is a Python object to protobuf;
here they are slices. What follows the headers is the same in many messages: which body modes hold,
which pods the gateway allows, which pod answered. So protobuf reads it once, and the result is kept
by its bytes. A message of any other form is left to protobuf's parser, so that this needs to know
only what gateways send.
"""

from functools import lru_cache
from typing import Final

from google.protobuf.message import DecodeError

from ...exchange import HttpRequest, ResponseHeaders
from . import ext_proc_pb2 as pb
from .codec import RESPONSE_HEADERS, read_request_headers, read_response_headers, response_headers
from .messages import RequestHeaders

_REQUEST: Final = 2 << 3 | 2
"""Tag of ProcessingRequest.request_headers."""
_RESPONSE: Final = 3 << 3 | 2
"""Tag of ProcessingRequest.response_headers."""
_FIRST: Final = 1 << 3 | 2
"""Tag of HttpHeaders.headers, of HeaderMap.headers, and of HeaderValue.key."""
_RAW_VALUE: Final = 3 << 3 | 2
"""Tag of HeaderValue.raw_value."""
_END: Final = b"\x18\x01"
"""HttpHeaders.end_of_stream = true."""
_CONTEXT: Final = frozenset(number << 3 | 2 for number in (8, 9, 11))
"""Tags of what may follow the headers: metadata_context, attributes and protocol_config."""
_WANTED: Final = {name.encode(): name for name in RESPONSE_HEADERS}

_KEPT_BYTES: Final = 512
"""Size up to which something is kept by its bytes. Larger: metadata that a gateway's filters make
anew for each request would take memory, and never recur."""
_KEPT: Final = 1024
"""Values that are kept of each kind. Lower: more of them are read again."""


def read_headers(wire: bytes) -> RequestHeaders | ResponseHeaders | None:
    """The headers in a ProcessingRequest; None: it is another message, or written another way."""
    try:
        kind = wire[0]
        if kind not in (_REQUEST, _RESPONSE):
            return None
        size, at = _length(wire, 1)
        stop = at + size
        context = wire[stop:]
        if context and context[0] not in _CONTEXT:
            return None
        if kind == _REQUEST:
            return _read_request(wire, at, stop, context)
        return _read_response(wire, at, stop, context)
    # Cut short, of another form, or not even protobuf: its own parser says what it is.
    except (IndexError, ValueError):
        return None


def _read_request(wire: bytes, at: int, stop: int, context: bytes) -> RequestHeaders:
    at, end = _header_map(wire, at, stop)
    headers: dict[str, str] = {}
    while at < end:
        # Here and below, lengths of one byte are read in place: a call for each takes as long as
        # the rest of the loop.
        size, start = wire[at + 1], at + 2
        if size >= 0x80:
            size, start = _length(wire, at + 1)
        if wire[at] != _FIRST:
            raise ValueError("no header")
        at = start + size
        entry = wire[start:at]
        # Most recur: those of the protocol, of the gateway, of a client.
        header = _HEADERS.get(entry) if size <= _KEPT_BYTES else None
        if header is None:
            header = _read_new_header(entry)
        headers[header[0]] = header[1]
    is_last = _is_last(wire, at, end, stop)
    rest = _request_context(context) if len(context) <= _KEPT_BYTES else _parse_request(context)
    method, path = headers.get(":method", ""), headers.get(":path", "")
    request = HttpRequest(method, path, headers, rest.request.subset)
    return RequestHeaders(request, is_last, rest.request_mode, rest.response_mode)


def _read_response(wire: bytes, at: int, stop: int, context: bytes) -> ResponseHeaders:
    at, end = _header_map(wire, at, stop)
    headers: dict[str, str] = {}
    while at < end:
        size, start = wire[at + 1], at + 2
        if size >= 0x80:
            size, start = _length(wire, at + 1)
        if wire[at] != _FIRST or wire[start] != _FIRST:
            raise ValueError("no header, or one without a name")
        at = start + size
        size, key = wire[start + 1], start + 2
        if size >= 0x80:
            size, key = _length(wire, start + 1)
        # Most are not read, and so not decoded.
        name = _WANTED.get(wire[key : key + size])
        if name is not None:
            headers[name] = _value(wire, key + size, at)
    is_known = len(context) <= _KEPT_BYTES
    _is_last(wire, at, end, stop)
    rest = _response_context(context) if is_known else _parse_response(context)
    return response_headers(headers, rest.served, rest.details)


def _header_map(wire: bytes, at: int, stop: int) -> tuple[int, int]:
    """Where the header map of an HttpHeaders from `at` to `stop` begins and ends. Raises ValueError
    for another form."""
    if at == stop or wire[at] != _FIRST:
        raise ValueError("no header map")
    size, at = _length(wire, at + 1)
    return at, at + size


def _is_last(wire: bytes, at: int, end: int, stop: int) -> bool:
    """Whether the message says that nothing follows the headers, which were read up to `at` and
    end at `end`. Raises ValueError for another form."""
    rest = wire[end:stop]
    # The first two: lengths that contradict each other, or reach beyond the message.
    if at != end or stop > len(wire) or (rest and rest != _END):
        raise ValueError("not the headers alone")
    return bool(rest)


def _read_header(entry: bytes) -> tuple[str, str]:
    """Name and value of a HeaderValue. Raises ValueError or IndexError for another form."""
    if entry[0] != _FIRST:
        raise ValueError("a header without a name")
    size, at = entry[1], 2
    if size >= 0x80:
        size, at = _length(entry, 1)
    return entry[at : at + size].decode("ascii"), _value(entry, at + size, len(entry))


_HEADERS: Final[dict[bytes, tuple[str, str]]] = {}
"""Headers that were read, by their bytes. Not an `lru_cache`, which takes longer for each header
than this takes for three."""


def _read_new_header(entry: bytes) -> tuple[str, str]:
    """As `_read_header`; the header is kept, unless it is large."""
    header = _read_header(entry)
    if len(entry) <= _KEPT_BYTES:
        # Each request brings a new id, so the table fills; those that recur are soon read again.
        if len(_HEADERS) >= _KEPT:
            _HEADERS.clear()
        _HEADERS[entry] = header
    return header


def _value(wire: bytes, at: int, stop: int) -> str:
    """The raw value between `at` and `stop`. Raises ValueError for another form."""
    if at == stop:
        return ""
    if at > stop or wire[at] != _RAW_VALUE:
        raise ValueError("no raw value")
    size, at = wire[at + 1], at + 2
    if size >= 0x80:
        size, at = _length(wire, at - 1)
    if at + size != stop or not size:
        raise ValueError("more than a value")
    # Header values are bytes to Envoy; latin-1 keeps every byte.
    return wire[at:stop].decode("latin-1")


def _length(wire: bytes, at: int) -> tuple[int, int]:
    """The length at `at`, and where it ends. Raises IndexError when it is cut short, ValueError for
    one beyond 28 bits."""
    byte = wire[at]
    if byte < 0x80:
        return byte, at + 1
    number, shift = byte & 0x7F, 7
    while shift < 28:
        at += 1
        byte = wire[at]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at + 1
        shift += 7
    raise ValueError("a length beyond 28 bits")


def _parse(kind: int, context: bytes) -> pb.ProcessingRequest:
    """A message of the kind without headers, and with `context`. Raises ValueError."""
    try:
        message = pb.ProcessingRequest.FromString(bytes((kind, 0)) + context)
    except DecodeError as err:
        raise ValueError("not protobuf") from err
    # Protobuf would join headers that come behind the context with those before it.
    is_other = message.WhichOneof("request") not in ("request_headers", "response_headers")
    if is_other or message.request_headers.ByteSize() or message.response_headers.ByteSize():
        raise ValueError("more than a context")
    return message


def _parse_request(context: bytes) -> RequestHeaders:
    """What protobuf reads of a request with `context`. Raises ValueError."""
    return read_request_headers(_parse(_REQUEST, context))


def _parse_response(context: bytes) -> ResponseHeaders:
    """The same for a response."""
    return read_response_headers(_parse(_RESPONSE, context))


_request_context: Final = lru_cache(_KEPT)(_parse_request)
_response_context: Final = lru_cache(_KEPT)(_parse_response)
