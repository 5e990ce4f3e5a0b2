"""Answers as gRPC messages of a ProcessingResponse, written without protobuf's objects.

Field numbers are those of ext_proc.proto. An answer without variable parts is written once. Where a
part varies, the fields around it, from the inside out, are a tag, a length and the field inside.
"""

from functools import lru_cache
from typing import Final

from tandem_contract import headers as wire

from ...exchange import HeaderChanges
from ..http2.grpc import framed, prefix
from . import ext_proc_pb2 as pb
from .codec import write_answer
from .messages import Answer, Continue, Part, StreamedChunk

_NUMBERS: Final = pb.ProcessingResponse.DESCRIPTOR.fields_by_name
_PART_TAGS: Final = {part: bytes((_NUMBERS[part.name.lower()].number << 3 | 2,)) for part in Part}
"""Field of ProcessingResponse for each part."""
_CONTINUE: Final = {part: framed(write_answer(Continue(part)).SerializeToString()) for part in Part}
_TRAILERS: Final = (Part.REQUEST_TRAILERS, Part.RESPONSE_TRAILERS)

_ONE_BYTE: Final = tuple(bytes((n,)) for n in range(128))
_END: Final = b"\x10\x01"
"""StreamedBodyResponse.end_of_stream = true."""
_CLEAR_ROUTE_CACHE: Final = b"\x28\x01"
"""CommonResponse.clear_route_cache = true."""
_OVERWRITE: Final = b"\x18\x02"
"""HeaderValueOption.append_action = OVERWRITE_IF_EXISTS_OR_ADD."""


def encode_answer(answer: Answer) -> bytes:
    """The serialized ProcessingResponse, with gRPC's prefix: what protobuf makes of `write_answer`,
    or an encoding that protobuf reads as the same message."""
    # By identity: `isinstance` takes long to say no for a struct of msgspec.
    if type(answer) is StreamedChunk:
        return _chunk(answer.part, answer.body, answer.end_of_stream)
    if type(answer) is Continue and answer.body is None and not answer.asks_for_body:
        if answer.mutation is None:
            return _CONTINUE[answer.part]
        if answer.part not in _TRAILERS:
            return framed(_mutated(answer.part, answer.mutation))
    return framed(write_answer(answer).SerializeToString())


def encode_head(answer: Continue, size: int) -> bytes:
    """What precedes the body, of `size` bytes, in the answer with gRPC's prefix; it ends with the
    body. So a large one is sent without copies of it."""
    before = metadata = b""
    if (mutation := answer.mutation) is not None:
        before = _header_changes(mutation)
        if mutation.destination is not None:
            before += _CLEAR_ROUTE_CACHE
            metadata = _metadata(mutation.destination)
    # From the inside out: body, body_mutation, response, and the part's own field.
    head = _open(b"\x0a", size)
    head = before + _open(b"\x1a", len(head) + size) + head
    for tag in (b"\x0a", _PART_TAGS[answer.part]):
        head = _open(tag, len(head) + size) + head
    return prefix(len(metadata) + len(head) + size) + metadata + head


def _open(tag: bytes, size: int) -> bytes:
    """The beginning of a field with `size` bytes."""
    return tag + _varint(size)


def _chunk(part: Part, body: bytes, end: bool) -> bytes:
    """CommonResponse.body_mutation.streamed_response with `body`."""
    size = len(body)
    key = part, size, end
    head = _CHUNK_HEADS.get(key)
    if head is None:
        head = _chunk_head(part, size, end)
        # Tokens have few sizes, and full chunks one: the table stays small.
        if len(_CHUNK_HEADS) < _MOST_HEADS:
            _CHUNK_HEADS[key] = head
    return head + body + _END if end else head + body


_CHUNK_HEADS: Final[dict[tuple[Part, int, bool], bytes]] = {}
"""The bytes before the body of a chunk, by part, size of the body, and whether it is the last; from
gRPC's prefix on."""
_MOST_HEADS: Final = 8192


def _chunk_head(part: Part, size: int, end: bool) -> bytes:
    head = b"\x0a" + _varint(size) if size else b""
    inside = len(head) + size + (len(_END) if end else 0)
    # From the inside out: streamed_response, body_mutation, response, and the part's own field.
    for tag in (b"\x1a", b"\x1a", b"\x0a", _PART_TAGS[part]):
        head = tag + _varint(inside) + head
        inside = len(head) + size + (len(_END) if end else 0)
    return prefix(inside) + head


def _mutated(part: Part, mutation: HeaderChanges) -> bytes:
    """CommonResponse.header_mutation, and with a destination the metadata that names it."""
    response = _header_changes(mutation)
    if mutation.destination is None:
        return _field(_PART_TAGS[part], _field(b"\x0a", response))
    answer = _field(_PART_TAGS[part], _field(b"\x0a", response + _CLEAR_ROUTE_CACHE))
    return answer + _metadata(mutation.destination)


def _header_changes(mutation: HeaderChanges) -> bytes:
    """CommonResponse.header_mutation."""
    changes = [
        _set_known_header(name, value) if name in _RECURRING else _set_header(name, value)
        for name, value in mutation.set
    ]
    changes.append(_removals(mutation.remove))
    return _field(b"\x12", b"".join(changes))


@lru_cache(256)
def _removals(names: tuple[str, ...]) -> bytes:
    """HeaderChanges.remove_headers. The same few lists of names recur in every answer."""
    return b"".join(_field(b"\x12", name.encode()) for name in names)


def _set_header(name: str, value: str) -> bytes:
    # HeaderValue: key = 1, raw_value = 3.
    raw = value.encode("latin-1")
    pair = _key(name)
    if raw:
        pair += b"\x1a" + _varint(len(raw)) + raw
    option = b"\x0a" + _varint(len(pair)) + pair + _OVERWRITE
    return b"\x0a" + _varint(len(option)) + option


_set_known_header: Final = lru_cache(4096)(_set_header)
_RECURRING: Final = frozenset(
    (wire.DESTINATION_ENDPOINT, wire.PREFILLER_HOST_PORT, wire.DATA_PARALLEL_RANK)
)
"""Headers whose values recur, because they name pods."""


@lru_cache(256)
def _key(name: str) -> bytes:
    """HeaderValue.key."""
    return _field(b"\x0a", name.encode())


@lru_cache(4096)
def _metadata(destination: str) -> bytes:
    """ProcessingResponse.dynamic_metadata: {namespace: {destination header: destination}}. There
    are as many as pods."""
    value = _field(b"\x1a", destination.encode())
    inner = _entry(wire.DESTINATION_ENDPOINT, value)
    return _field(b"\x42", _entry(wire.METADATA_NAMESPACE, _field(b"\x2a", inner)))


def _entry(key: str, value: bytes) -> bytes:
    """An entry of Struct.fields: key = 1, value = 2."""
    return _field(b"\x0a", _field(b"\x0a", key.encode()) + _field(b"\x12", value))


def _field(tag: bytes, content: bytes) -> bytes:
    size = len(content)
    if size < 128:
        return tag + _ONE_BYTE[size] + content
    return tag + _varint(size) + content


def _varint(number: int) -> bytes:
    if number < 128:
        return _ONE_BYTE[number]
    if number < 1 << 14:
        # Most others: the sizes of the fields around a plan.
        return bytes((number & 0x7F | 0x80, number >> 7))
    parts = bytearray()
    while number >= 128:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)
