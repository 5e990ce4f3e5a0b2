"""A client that sends response chunks to an EPP as a gateway does in FULL_DUPLEX_STREAMED mode.

Each of 32 streams is placed first, and then sends a chunk whenever its last one came back. Chunks
that are ready are written together once there are `batch` of them.
"""

import asyncio
from typing import Final, cast

from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.interface import SERVICE
from tandem_epp.server.ext_proc.messages import BodyMode
from tandem_epp.server.http2 import frames
from tandem_epp.server.http2.frames import ACK, END_HEADERS, HEADER, FrameType, Setting
from tandem_epp.server.http2.grpc import framed
from tandem_epp.server.http2.headers import EMPTY_TABLE, encode
from tandem_epp.server.http2.limits import DEFAULT_WINDOW, LARGEST_WINDOW

STREAMS: Final = 32
CHUNKS: Final = 20_000
SIZE: Final = 250
"""Bytes of a chunk: an event with one token."""

_BLOCK: Final = EMPTY_TABLE + encode(
    (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"/{SERVICE}/Process".encode()),
        (b":authority", b"epp"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)
_START: Final = (
    frames.PREFACE
    + frames.settings({Setting.INITIAL_WINDOW_SIZE: LARGEST_WINDOW})
    + frames.window_update(0, LARGEST_WINDOW - DEFAULT_WINDOW)
)
_CHUNK: Final = framed(
    pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x" * SIZE)).SerializeToString()
)


def _request() -> bytes:
    """The first message: a request without a body, whose response bodies follow."""
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = BodyMode.FULL_DUPLEX_STREAMED
    message.protocol_config.response_body_mode = BodyMode.FULL_DUPLEX_STREAMED
    message.request_headers.end_of_stream = True
    for name, value in ((":method", b"GET"), (":path", b"/v1/models")):
        message.request_headers.headers.headers.add(key=name, raw_value=value)
    return framed(message.SerializeToString())


class _Client(asyncio.Protocol):
    """One connection. Each stream waits for its answer, so that all windows stay open."""

    def __init__(self, batch: int) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._batch = batch
        self._rest = b""
        self._waiting: list[int] = []
        """Streams whose chunk has come back."""
        self._left = CHUNKS
        """Chunks to send."""
        self._expected = STREAMS + CHUNKS
        """Answers to come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        opened = [
            frames.frame(FrameType.HEADERS, END_HEADERS, stream, _BLOCK)
            + frames.frame(FrameType.DATA, 0, stream, _request())
            for stream in range(1, 2 * STREAMS, 2)
        ]
        self._transport.write(_START + b"".join(opened))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the EPP closed the connection"))

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while len(data) - at >= HEADER.size:
            high, low, kind, flags, stream = HEADER.unpack_from(data, at)
            end = at + HEADER.size + (high << 8 | low)
            if end > len(data):
                break
            if kind == FrameType.DATA:
                self._expected -= 1
                self._waiting.append(stream)
            elif kind == FrameType.SETTINGS and not flags & ACK:
                self._transport.write(frames.SETTINGS_ACK)
            elif kind == FrameType.PING and not flags & ACK:
                payload = data[at + HEADER.size : end]
                self._transport.write(frames.frame(FrameType.PING, ACK, 0, payload))
            at = end
        self._rest = data[at:]
        self._send()
        if self._expected == 0 and not self.done.done():
            self.done.set_result(None)

    def _send(self) -> None:
        while self._left and len(self._waiting) >= self._batch:
            streams, self._waiting = self._waiting[: self._batch], self._waiting[self._batch :]
            streams = streams[: self._left]
            self._left -= len(streams)
            chunks = (frames.frame(FrameType.DATA, 0, stream, _CHUNK) for stream in streams)
            self._transport.write(b"".join(chunks))


async def send_chunks(port: int, batch: int) -> int:
    """Send chunks, `batch` in a write, and wait for them to come back; returns their number.

    Raises ConnectionError, TimeoutError.
    """
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(lambda: _Client(batch), "127.0.0.1", port)
    try:
        async with asyncio.timeout(120):
            await client.done
    finally:
        transport.abort()
    return CHUNKS
