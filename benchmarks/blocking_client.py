"""An ext_proc client on a blocking socket, whose bytes do not share an event loop with others.

As a program it measures how long others wait for an EPP: it sends a response chunk each millisecond
and awaits its answer. For each line on stdin it prints the longest wait since the last one, in
seconds.

    python -m benchmarks.blocking_client PORT
"""

import select
import socket
import sys
from time import perf_counter
from typing import Final

import click

from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.interface import SERVICE
from tandem_epp.server.ext_proc.messages import BodyMode
from tandem_epp.server.http2 import frames
from tandem_epp.server.http2.frames import ACK, END_HEADERS, END_STREAM, HEADER, FrameType, Setting
from tandem_epp.server.http2.grpc import PREFIX, framed
from tandem_epp.server.http2.headers import EMPTY_TABLE, encode
from tandem_epp.server.http2.limits import DEFAULT_WINDOW, LARGEST_WINDOW

BLOCK: Final = EMPTY_TABLE + encode(
    (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"/{SERVICE}/Process".encode()),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)
_FRAME: Final = 16_384


def head_message(
    path: str,
    *,
    end: bool,
    mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED,
    content_type: str = "application/json",
) -> bytes:
    """The first message of a request, with gRPC's prefix."""
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = mode
    message.protocol_config.response_body_mode = BodyMode.FULL_DUPLEX_STREAMED
    message.request_headers.end_of_stream = end
    for name, value in (
        (":method", b"POST"),
        (":path", path.encode()),
        ("content-type", content_type.encode()),
    ):
        message.request_headers.headers.headers.add(key=name, raw_value=value)
    return framed(message.SerializeToString())


def body_message(content: bytes, *, end: bool) -> bytes:
    """A chunk of the request's body, with gRPC's prefix."""
    body = pb.HttpBody(body=content, end_of_stream=end)
    return framed(pb.ProcessingRequest(request_body=body).SerializeToString())


def chunk_message(content: bytes) -> bytes:
    """A chunk of the response's body, with gRPC's prefix."""
    body = pb.HttpBody(body=content)
    return framed(pb.ProcessingRequest(response_body=body).SerializeToString())


class Client:
    """One connection, which takes all that the server sends."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(
            frames.PREFACE
            + frames.settings({Setting.INITIAL_WINDOW_SIZE: LARGEST_WINDOW})
            + frames.window_update(0, LARGEST_WINDOW - DEFAULT_WINDOW)
        )
        self._received = bytearray()
        self._content: dict[int, bytearray] = {}
        """Stream → bytes of messages that are not taken."""
        self._windows = {0: DEFAULT_WINDOW}
        self._initial = DEFAULT_WINDOW
        self._next = 1
        while self._initial == DEFAULT_WINDOW:
            self._read()

    def open(self, message: bytes) -> int:
        """Open a stream and send its first message; returns its number."""
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial
        self._content[stream] = bytearray()
        self._socket.sendall(frames.frame(FrameType.HEADERS, END_HEADERS, stream, BLOCK))
        self.send(stream, message)
        return stream

    def send(self, stream: int, message: bytes) -> None:
        """Send a message, as the windows allow; stops when an answer comes meanwhile."""
        for at in range(0, len(message), _FRAME):
            part = message[at : at + _FRAME]
            while min(self._windows[0], self._windows[stream]) < len(part):
                self._read()
            self._windows[0] -= len(part)
            self._windows[stream] -= len(part)
            self._socket.sendall(frames.frame(FrameType.DATA, 0, stream, part))

    def end(self, stream: int) -> None:
        """End a stream, whose answers are no longer taken."""
        del self._content[stream], self._windows[stream]
        self._socket.sendall(frames.frame(FrameType.DATA, END_STREAM, stream, b""))

    def has_answer(self) -> bool:
        """Whether an answer has come."""
        while select.select([self._socket], [], [], 0)[0]:
            self._read()
        return any(self._content.values())

    def answer(self, stream: int) -> pb.ProcessingResponse:
        """The next answer; waits for it."""
        content = self._content[stream]
        while len(content) < PREFIX or len(content) < PREFIX + self._size(content):
            self._read()
        end = PREFIX + self._size(content)
        answer = pb.ProcessingResponse.FromString(bytes(content[PREFIX:end]))
        del content[:end]
        return answer

    def is_last(self, answer: pb.ProcessingResponse) -> bool:
        """Whether no answer to the request follows."""
        streamed = answer.request_body.response.body_mutation.streamed_response
        return answer.HasField("immediate_response") or streamed.end_of_stream

    def close(self) -> None:
        """Cut the connection."""
        self._socket.close()

    def _size(self, content: bytearray) -> int:
        return int.from_bytes(content[1:PREFIX], "big")

    def _read(self) -> None:
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the EPP closed the connection")
        self._received += data
        at = 0
        while len(self._received) - at >= HEADER.size:
            high, low, kind, flags, stream = HEADER.unpack_from(self._received, at)
            end = at + HEADER.size + (high << 8 | low)
            if end > len(self._received):
                break
            self._take(kind, flags, stream, bytes(self._received[at + HEADER.size : end]))
            at = end
        del self._received[:at]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == FrameType.DATA and stream in self._content:
            self._content[stream] += payload
        elif kind == FrameType.WINDOW_UPDATE and stream in self._windows:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind == FrameType.SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                if int.from_bytes(payload[at : at + 2], "big") == Setting.INITIAL_WINDOW_SIZE:
                    self._initial = int.from_bytes(payload[at + 2 : at + 6], "big")
            self._socket.sendall(frames.SETTINGS_ACK)


@click.command()
@click.argument("port", type=int)
def main(port: int) -> None:
    """Measure until stdin ends."""
    client, message = Client(port), chunk_message(b"x" * 250)
    stream = client.open(head_message("/v1/responses/x/cancel", end=True))
    client.answer(stream)
    longest = 0.0
    while True:
        if select.select([sys.stdin], [], [], 0.001)[0]:
            if not sys.stdin.readline():
                break
            print(longest, flush=True)
            longest = 0.0
        before = perf_counter()
        client.send(stream, message)
        client.answer(stream)
        longest = max(longest, perf_counter() - before)


if __name__ == "__main__":
    main()
