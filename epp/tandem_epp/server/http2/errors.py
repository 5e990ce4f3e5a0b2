"""What can go wrong on a connection, and how far the damage goes.

    ProtocolFault
    ├── ConnectionFault    the connection ends with GOAWAY; all its streams are lost
    ├── StreamFault        one stream ends with RST_STREAM; the others continue
    ├── MalformedFields    a header section breaks the rules: its stream ends
    └── CallFault          one gRPC call ends with a status other than OK

`connection` raises and catches the first three itself: `Connection.receive` raises none of them.
"""

from enum import IntEnum


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY (RFC 9113, 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Status(IntEnum):
    """Those status codes of gRPC that this server sends."""

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class ProtocolFault(Exception):
    """Base of this package's errors."""


class ConnectionFault(ProtocolFault):
    """The peer broke the protocol, or a limit, for the whole connection."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(f"{code.name}: {reason}")
        self.code, self.reason = code, reason


class StreamFault(ProtocolFault):
    """The peer broke the protocol, or a limit, on one stream."""

    def __init__(self, stream_id: int, code: ErrorCode, reason: str) -> None:
        super().__init__(f"stream {stream_id}: {code.name}: {reason}")
        self.stream_id, self.code, self.reason = stream_id, code, reason


class MalformedFields(ProtocolFault):
    """A header section breaks the rules of RFC 9113, 8.2 and 8.3."""


class CallFault(ProtocolFault):
    """A gRPC call cannot go on; the client gets `status` and `message`."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(f"{status.name}: {message}")
        self.status, self.message = status, message
