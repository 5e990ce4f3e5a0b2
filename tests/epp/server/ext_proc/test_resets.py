"""A stream that ends at any moment leaves nothing: no request in flight, no byte held."""

import asyncio
from typing import Any

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract import headers as wire
from tandem_contract.commandline import HostPort
from tandem_contract.held_bytes import HeldBytes
from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.grpc_server import GrpcServer
from tandem_epp.server.ext_proc.http2_server import Http2Server
from tandem_epp.server.ext_proc.messages import BodyMode
from tandem_epp.server.http2 import frames
from tandem_epp.server.http2.connection import Connection
from tandem_epp.server.http2.frames import Setting
from tandem_epp.server.http2.grpc import framed
from tandem_epp.server.http2.headers import BlockCache
from tandem_epp.server.http2.limits import Limits
from tandem_epp.server.http2.session import GrpcSession

from ...placement.test_picker import PickerSetup
from ...real import until
from ..http2.client import data, headers
from .test_differential import BLOCK, METHOD
from .test_servers import body, head

pytestmark = pytest.mark.component

ANY_PORT, LIMIT = HostPort("127.0.0.1", 0), 100_000
TEXT = b'{"model": "m", "prompt": "' + b"word " * 500 + b'"}'


def response(status: bytes) -> pb.ProcessingRequest:
    found = pb.ProcessingRequest()
    for name, value in ((":status", status), (wire.TIMING, b"queue=0.5")):
        found.response_headers.headers.headers.add(key=name, raw_value=value)
    return found


FIRST = [
    head(path, end=end, mode=mode)
    for path in ("/v1/completions", "/other")
    for end in (False, True)
    for mode in BodyMode
]
LATER = [
    body(TEXT, end=True),
    body(TEXT[:900], end=False),
    body(TEXT[900:], end=True),
    body(b"", end=True),
    body(b"bad", end=True),
    body(b"x" * (LIMIT - 1), end=False),
    pb.ProcessingRequest(request_trailers=pb.HttpTrailers()),
    response(b"200"),
    response(b"500"),
    pb.ProcessingRequest(response_body=pb.HttpBody(body=b"token")),
    pb.ProcessingRequest(response_body=pb.HttpBody(body=b"token", end_of_stream=True)),
    pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
    pb.ProcessingRequest(),
    FIRST[0],
]
STREAMS = st.lists(
    st.tuples(st.sampled_from(FIRST), st.lists(st.sampled_from(LATER), max_size=6)).map(
        lambda parts: [message.SerializeToString() for message in (parts[0], *parts[1])]
    ),
    min_size=1,
    max_size=4,
)
"""The messages of streams that are open at the same time."""


def in_flight(setup: PickerSetup) -> int:
    return sum(pod.in_flight + pod.tokens_in_flight for pod in setup.fleet)


@settings(max_examples=300, deadline=None)
@given(
    streams=STREAMS,
    cuts=st.lists(st.integers(1, 120_000), max_size=5),
    last=st.integers(0, 400_000),
    end=st.sampled_from(["resets", "connection lost", "protocol error"]),
    window=st.sampled_from([0, 1000, 1 << 30]),
    limit=st.sampled_from([1 << 30, 60_000]),
)
def test_our_server(
    streams: list[list[bytes]], cuts: list[int], last: int, end: str, window: int, limit: int
) -> None:
    """The bytes of all streams, cut anywhere and ended anywhere, in the middle of messages too."""

    async def run() -> None:
        setup = PickerSetup(d="decode", p="prefill")
        server = Http2Server(setup.picker, ANY_PORT, LIMIT, held=HeldBytes(limit))
        session = GrpcSession(
            Connection(Limits(message=2 * LIMIT), BlockCache(), server.held),
            server.server.services,
            lambda _: None,
            on_error=lambda _: None,
        )
        start = frames.PREFACE + frames.settings({Setting.INITIAL_WINDOW_SIZE: window})
        sent = b"".join(_frames(1 + 2 * n, messages) for n, messages in enumerate(streams))
        session.receive(start, 0.0)
        at = 0
        for size in (*cuts, len(sent)):
            session.receive(sent[at : min(last, at + size)], 0.0)
            at = min(last, at + size)
        match end:
            case "resets":
                numbers = range(1, 2 * len(streams), 2)
                open_streams = [n for n in numbers if n in session.connection.streams]
                # Only between two frames can the client reset single streams.
                if session.connection._pieces:
                    session.lost()
                else:
                    session.receive(b"".join(frames.rst_stream(n, 8) for n in open_streams), 0.0)
            case "protocol error":
                session.receive(data(0) * 20_000, 0.0)
                session.lost()
            case _:
                session.lost()
        assert server.held.size == 0
        assert in_flight(setup) == 0
        assert not server.open
        assert len(server.deadlines) == 0
        server.deadlines.close()

    asyncio.run(run())


def _frames(stream: int, messages: list[bytes]) -> bytes:
    content = b"".join(map(framed, messages))
    parts = [data(stream, content[at : at + 16_000]) for at in range(0, len(content), 16_000)]
    return headers(stream, BLOCK) + b"".join(parts)


@settings(max_examples=40, deadline=None)
@given(
    streams=STREAMS,
    sent=st.integers(0, 7),
    kind=st.sampled_from([GrpcServer, Http2Server]),
    is_read=st.booleans(),
    limit=st.sampled_from([1 << 30, 60_000]),
)
def test_both_servers_with_grpcios_client(
    streams: list[list[bytes]], sent: int, kind: Any, is_read: bool, limit: int
) -> None:
    """Streams that are cancelled after any message."""

    async def cancel(channel: grpc.aio.Channel, messages: list[bytes]) -> None:
        call = channel.stream_stream(METHOD)()
        try:
            for message in messages[:sent]:
                await call.write(message)
            if is_read and sent:
                async with asyncio.timeout(0.01):
                    await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            # Some streams end with an error, others are not answered.
            pass
        call.cancel()

    async def run() -> None:
        setup = PickerSetup(d="decode", p="prefill")
        server = kind(setup.picker, ANY_PORT, LIMIT, held=HeldBytes(limit))
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.gather(*(cancel(channel, messages) for messages in streams))

        async def nothing_left() -> bool:
            return server.held.size == in_flight(setup) == len(server.deadlines) == 0

        await until(nothing_left)
        await server.stop(0)

    asyncio.run(run())
