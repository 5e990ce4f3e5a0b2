"""A client made of single frames, for tests of the server's state machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpack import Decoder, Encoder

from tandem_epp.server.http2 import frames, grpc
from tandem_epp.server.http2.connection import Connection
from tandem_epp.server.http2.errors import ErrorCode
from tandem_epp.server.http2.frames import END_HEADERS, END_STREAM, HEADER, FrameType, Setting
from tandem_epp.server.http2.headers import BlockCache, encode
from tandem_epp.server.http2.limits import Limits
from tandem_epp.server.http2.stream import Event

START = frames.PREFACE + frames.settings({})
PATH = "/test.Service/Method"


def call_of(path: str) -> bytes:
    """The header block of a call."""
    return encode(
        (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"server"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )


BLOCK = call_of(PATH)
GET = encode(((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/healthz")))


@dataclass(frozen=True)
class Frame:
    """A frame of the server."""

    kind: FrameType
    flags: int
    stream: int
    payload: bytes

    @property
    def is_end(self) -> bool:
        return self.kind in (FrameType.DATA, FrameType.HEADERS) and bool(self.flags & END_STREAM)

    @property
    def code(self) -> ErrorCode:
        """The error code of RST_STREAM or GOAWAY."""
        at = 4 if self.kind is FrameType.GOAWAY else 0
        return ErrorCode(frames.read_code(self.payload, at))


def parse(data: bytes) -> list[Frame]:
    """The frames in `data`, which must be whole."""
    found, at = [], 0
    while at < len(data):
        high, low, kind, flags, stream = HEADER.unpack_from(data, at)
        end = at + HEADER.size + (high << 8 | low)
        assert end <= len(data)
        found.append(Frame(FrameType(kind), flags, stream, data[at + HEADER.size : end]))
        at = end
    return found


def headers(
    stream: int, block: bytes = BLOCK, *, end: bool = False, flags: int = END_HEADERS
) -> bytes:
    return frames.frame(FrameType.HEADERS, flags | (END_STREAM if end else 0), stream, block)


def data(stream: int, payload: bytes = b"", *, end: bool = False) -> bytes:
    return frames.frame(FrameType.DATA, END_STREAM if end else 0, stream, payload)


def message(stream: int, text: bytes, *, end: bool = False) -> bytes:
    return data(stream, grpc.framed(text), end=end)


def ping(payload: bytes = b"01234567", *, ack: bool = False) -> bytes:
    return frames.frame(FrameType.PING, 1 if ack else 0, 0, payload)


def block(fields: Mapping[str, str]) -> bytes:
    return encode([(k.encode("latin-1"), v.encode("latin-1")) for k, v in fields.items()])


@dataclass
class Peer:
    """A connection, with the client's view of what it sent."""

    limits: Limits = field(default_factory=Limits)
    cache: BlockCache = field(default_factory=BlockCache)
    connection: Connection = field(init=False)
    now: float = 0.0
    decoder: Decoder = field(default_factory=Decoder)

    def __post_init__(self) -> None:
        self.connection = Connection(self.limits, self.cache)

    def start(self, settings: Mapping[Setting, int] | None = None) -> "Peer":
        """Exchange the prefaces."""
        self.send(frames.PREFACE + frames.settings(dict(settings or {})))
        self.received()
        return self

    def send(self, *parts: bytes) -> list[Event]:
        return self.connection.receive(b"".join(parts), self.now)

    def received(self) -> list[Frame]:
        """What the server has sent since the last call."""
        return parse(self.connection.take())

    def answers(self, *parts: bytes) -> list[Frame]:
        """What the server sends when `parts` come."""
        self.send(*parts)
        return self.received()

    def goaway(self, *parts: bytes) -> ErrorCode:
        """The error that ends the connection when `parts` come."""
        self.send(*parts)
        assert self.connection.fault is not None, "the connection goes on"
        assert self.connection.is_done
        last = self.received()[-1]
        assert last.kind is FrameType.GOAWAY
        assert last.code is self.connection.fault.code
        return last.code

    def reset(self, *parts: bytes) -> tuple[int, ErrorCode]:
        """The stream that is reset when `parts` come, and why; the connection goes on."""
        self.send(*parts)
        assert self.connection.fault is None
        (found,) = [f for f in self.received() if f.kind is FrameType.RST_STREAM]
        assert self.answers(ping())[-1].kind is FrameType.PING
        return found.stream, found.code

    def fields(self, frame: Frame) -> dict[str, str]:
        """The header fields of HEADERS."""
        return {str(name): str(value) for name, value in self.decoder.decode(frame.payload)}


def hpack_encoder(table: int = 4096) -> Encoder:
    """An encoder with a header table, as clients use before they know this server's settings."""
    encoder = Encoder()
    encoder.header_table_size = table
    return encoder
