"""Both transports give the same answers to thousands of random streams.

grpcio's client sends each stream to both servers. Our own server also gets the streams as bytes cut
at random, many at a time on one connection, without a socket in between.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem_contract import headers as wire
from tandem_contract.commandline import HostPort
from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.grpc_server import GrpcServer
from tandem_epp.server.ext_proc.http2_server import Http2Server
from tandem_epp.server.ext_proc.interface import SERVICE, ExtProcServer
from tandem_epp.server.ext_proc.messages import BodyMode
from tandem_epp.server.http2 import frames
from tandem_epp.server.http2 import grpc as framing
from tandem_epp.server.http2.connection import Connection
from tandem_epp.server.http2.frames import END_STREAM, FrameType, Setting
from tandem_epp.server.http2.headers import EMPTY_TABLE, BlockCache, encode
from tandem_epp.server.http2.limits import Limits
from tandem_epp.server.http2.session import GrpcSession

from ..http2.client import data, headers, parse
from .test_stream import Placer

pytestmark = pytest.mark.component

METHOD = f"/{SERVICE}/Process"
LIMIT = 100_000
STREAMS = 2500
BLOCK = EMPTY_TABLE + encode(
    (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", METHOD.encode()),
        (b"content-type", b"application/grpc"),
    )
)

Script = list[bytes]
"""The messages of a stream, which then ends."""
Result = tuple[list[bytes], int]
"""The answers, and the status."""


class AnyPlacer(Placer):
    """Places by the body alone, whenever requests end."""

    def place(self, *arguments: Any) -> Any:
        placement = super().place(*arguments[:2], 1.0)
        self.placements.clear()
        placement.end = lambda now: None  # type: ignore[method-assign]
        return placement


def request_headers(random: Random) -> bytes:
    message = pb.ProcessingRequest()
    modes = list(BodyMode)
    message.protocol_config.request_body_mode = random.choice([*modes, 4, 4, 2, 2])
    message.protocol_config.response_body_mode = random.choice([0, 0, 4])
    message.request_headers.end_of_stream = random.random() < 0.2
    path = random.choice(["/v1/completions", "/v1/completions", "/v1/models", "/other"])
    for name, value in ((":method", "POST"), (":path", path), (wire.REQUEST_ID, "r")):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return message.SerializeToString()


def message(random: Random) -> bytes:
    """Any message that may follow the first one."""
    found = pb.ProcessingRequest()
    end = random.random() < 0.4
    content = random.choice([b"", b"bad", b"x", b"y" * 70_000, random.randbytes(500)])
    match random.randrange(6):
        case 0 | 1:
            found.request_body.body, found.request_body.end_of_stream = content, end
        case 2:
            found.response_body.body, found.response_body.end_of_stream = content, end
        case 3:
            found.request_trailers.SetInParent()
        case 4:
            found.response_trailers.SetInParent()
        case _:
            values = {":status": b"200", wire.TIMING: b"queue=1"}
            for name in random.sample(list(values), random.randrange(3)):
                found.response_headers.headers.headers.add(key=name, raw_value=values[name])
            found.response_headers.SetInParent()
    return found.SerializeToString()


def script(random: Random) -> Script:
    first = [] if random.random() < 0.05 else [request_headers(random)]
    rest = [message(random) for _ in range(random.randrange(6))]
    if random.random() < 0.05:
        # No protobuf, no content, or a second beginning.
        rest.append(random.choice([b"\xff\xff", b"", request_headers(random)]))
    return first + rest


@asynccontextmanager
async def running(server: ExtProcServer) -> AsyncIterator[grpc.aio.Channel]:
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def ask(channel: grpc.aio.Channel, sent: Script) -> Result:
    call = channel.stream_stream(METHOD)(iter(sent))
    answers = []
    try:
        async for answer in call:
            answers.append(answer)
    except grpc.aio.AioRpcError:
        pass
    return answers, (await call.code()).value[0]


def same(ours: Result, theirs: Result) -> bool:
    """Whether both are the same, message by message; encodings may differ."""
    return ours[1] == theirs[1] and (
        [pb.ProcessingResponse.FromString(answer) for answer in ours[0]]
        == [pb.ProcessingResponse.FromString(answer) for answer in theirs[0]]
    )


async def test_both_servers_answer_alike() -> None:
    random = Random(11)
    listen = HostPort("127.0.0.1", 0)
    scripts = [script(random) for _ in range(STREAMS)]
    async with (
        running(GrpcServer(AnyPlacer(), listen, LIMIT)) as oracle,
        running(Http2Server(AnyPlacer(), listen, LIMIT)) as ours,
    ):
        kinds: set[int] = set()
        for at in range(0, STREAMS, 25):
            batch = scripts[at : at + 25]
            expected = await asyncio.gather(*(ask(oracle, sent) for sent in batch))
            results = await asyncio.gather(*(ask(ours, sent) for sent in batch))
            cut = cut_at_random(random, batch)
            for sent, theirs, by_client, by_bytes in zip(
                batch, expected, results, cut, strict=True
            ):
                kinds.add(theirs[1])
                assert same(by_client, theirs), sent
                assert same(by_bytes, theirs), sent
    # Both streams that end well and streams that make the server raise an exception occurred.
    assert kinds == {0, 2}


def cut_at_random(random: Random, scripts: list[Script]) -> list[Result]:
    """The results of streams that are sent at the same time, in frames and reads of any size."""
    server = Http2Server(AnyPlacer(), HostPort("127.0.0.1", 0), LIMIT)
    limits = Limits(message=LIMIT + (1 << 16), stream_window=16 << 20, connection_window=1 << 30)
    session = GrpcSession(
        Connection(limits, BlockCache()),
        server.server.services,
        lambda _: None,
        on_error=lambda _: None,
    )
    sent = bytearray(frames.PREFACE + frames.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 30}))
    sent += frames.window_update(0, 1 << 30)
    streams = {1 + 2 * n: _frames(random, 1 + 2 * n, sent_) for n, sent_ in enumerate(scripts)}
    for parts in streams.values():
        sent += parts.pop(0)
    while waiting := [parts for parts in streams.values() if parts]:
        sent += random.choice(waiting).pop(0)
    received, at = b"", 0
    while at < len(sent):
        size = random.choice([1, 10, 300, 20_000, 300_000])
        session.receive(bytes(sent[at : at + size]), 0.0)
        received += session.connection.take()
        at += size
    assert session.connection.fault is None
    assert not session.calls
    return _results(received, list(streams))


def _frames(random: Random, stream: int, sent: Script) -> list[bytes]:
    """A stream's frames: its messages, cut anywhere."""
    content = b"".join(map(framing.framed, sent))
    parts, at = [headers(stream, BLOCK)], 0
    while at < len(content):
        size = random.choice([3, 700, 16_384])
        parts.append(data(stream, content[at : at + size]))
        at += size
    parts.append(data(stream, end=True))
    return parts


def _results(received: bytes, streams: list[int]) -> list[Result]:
    content = dict.fromkeys(streams, b"")
    status = dict.fromkeys(streams, -1)
    for frame in parse(received):
        if frame.kind is FrameType.DATA:
            content[frame.stream] += frame.payload
        elif frame.kind is FrameType.HEADERS and frame.flags & END_STREAM:
            name = b"grpc-status"
            at = frame.payload.index(name) + len(name)
            status[frame.stream] = int(frame.payload[at + 1 : at + 1 + frame.payload[at]])
    reader = {stream: framing.MessageReader(1 << 20) for stream in streams}
    return [(reader[stream].feed(content[stream]), status[stream]) for stream in streams]
