"""The wire format of frames (RFC 9113, 4 and 6): building them, and reading their payloads."""

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import Final

from .errors import ConnectionFault, ErrorCode

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of every client (3.4)."""
HEADER: Final = Struct(">HBBBL")
"""A frame's header: upper 16 bits and lower 8 bits of the length, type, flags, stream id."""
HEADER_SIZE: Final = HEADER.size

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY_FLAG: Final = 0x20

_U32: Final = Struct(">L")
_SETTING: Final = Struct(">HL")
_IDS: Final = 0x7FFFFFFF
"""Stream ids and increments have 31 bits; the highest bit is ignored."""


class FrameType(IntEnum):
    """Types of frames."""

    DATA = 0x0
    HEADERS = 0x1
    PRIORITY = 0x2
    RST_STREAM = 0x3
    SETTINGS = 0x4
    PUSH_PROMISE = 0x5
    PING = 0x6
    GOAWAY = 0x7
    WINDOW_UPDATE = 0x8
    CONTINUATION = 0x9


class Setting(IntEnum):
    """Parameters of SETTINGS."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    size = len(payload)
    return HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(values: dict[Setting, int]) -> bytes:
    """SETTINGS with `values`."""
    payload = b"".join(_SETTING.pack(key, value) for key, value in values.items())
    return frame(FrameType.SETTINGS, 0, 0, payload)


SETTINGS_ACK: Final = frame(FrameType.SETTINGS, ACK, 0)


def window_update(stream_id: int, increment: int) -> bytes:
    """WINDOW_UPDATE; stream 0 is the connection."""
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, _U32.pack(increment))


def rst_stream(stream_id: int, code: int) -> bytes:
    """RST_STREAM."""
    return frame(FrameType.RST_STREAM, 0, stream_id, _U32.pack(code))


def goaway(last_stream: int, code: int, reason: str = "") -> bytes:
    """GOAWAY; `reason` is for the peer's log."""
    payload = _U32.pack(last_stream) + _U32.pack(code) + reason.encode()
    return frame(FrameType.GOAWAY, 0, 0, payload)


def headers(stream_id: int, block: bytes, largest: int, *, end: bool) -> bytes:
    """HEADERS, and CONTINUATION where `block` exceeds frames of `largest` bytes."""
    flags = END_STREAM if end else 0
    if len(block) <= largest:
        return frame(FrameType.HEADERS, flags | END_HEADERS, stream_id, block)
    parts = [frame(FrameType.HEADERS, flags, stream_id, block[:largest])]
    for at in range(largest, len(block), largest):
        is_last = at + largest >= len(block)
        part = block[at : at + largest]
        parts.append(frame(FrameType.CONTINUATION, END_HEADERS if is_last else 0, stream_id, part))
    return b"".join(parts)


def read_id(payload: bytes, at: int = 0) -> int:
    """The stream id or increment at offset `at`."""
    value: int = _U32.unpack_from(payload, at)[0]
    return value & _IDS


def read_code(payload: bytes, at: int = 0) -> int:
    """The 32-bit number at offset `at`."""
    value: int = _U32.unpack_from(payload, at)[0]
    return value


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """The entries of SETTINGS, in order. Raises ConnectionFault."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS is no multiple of 6 bytes")
    return _SETTING.iter_unpack(payload)


def without_padding(payload: bytes) -> bytes:
    """The content of a padded payload (6.1). Raises ConnectionFault."""
    if not payload:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a padded frame has no length of padding")
    padding = payload[0]
    if padding >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding is as long as the frame")
    return payload[1 : len(payload) - padding]
