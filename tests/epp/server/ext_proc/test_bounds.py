"""What all clients together can make an ext_proc server hold, and for how long; both servers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio
import pytest

from tandem_contract import headers as wire
from tandem_contract.commandline import HostPort
from tandem_contract.held_bytes import STREAM_BYTES, HeldBytes
from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.body_deadlines import BODY_SECONDS
from tandem_epp.server.ext_proc.grpc_server import GrpcServer
from tandem_epp.server.ext_proc.http2_server import Http2Server
from tandem_epp.server.ext_proc.interface import SERVICE, ExtProcServer
from tandem_epp.server.ext_proc.messages import BodyMode
from tandem_epp.server.http2.frames import FrameType
from tandem_epp.server.http2.grpc import PREFIX, framed

from ...placement.test_picker import PickerSetup
from ...real import until
from ..http2.client import data, headers
from ..http2.test_server import RawClient, connected
from .test_differential import BLOCK
from .test_servers import body, head

pytestmark = pytest.mark.component

LIMIT, BODY = 8 << 20, 1 << 20
CHUNK, FRAME = 60_000, 16_000
STALLED = 40
KINDS = pytest.mark.parametrize("kind", [GrpcServer, Http2Server])
PATH = "/v1/completions"


@asynccontextmanager
async def serving(
    kind: type[GrpcServer] | type[Http2Server], setup: PickerSetup, seconds: float = BODY_SECONDS
) -> AsyncIterator[tuple[ExtProcServer, int]]:
    """A server, and its port."""
    held = HeldBytes(LIMIT)
    listen = HostPort("127.0.0.1", 0)
    server = kind(setup.picker, listen, BODY, held=held, body_seconds=seconds)
    port = await server.start()
    try:
        yield server, port
    finally:
        await server.stop(0)


@asynccontextmanager
async def calling(port: int) -> AsyncIterator[Any]:
    """The method, which opens a stream at each call."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )


async def stall(call: Any) -> pb.ProcessingResponse:
    """Upload most of a body, or less if the server answers; returns the answer."""
    await call.write(head(PATH, end=False))
    answer = asyncio.ensure_future(call.read())
    # An answer may end the stream while a part is on its way: grpcio then says that it could not
    # write the part.
    with suppress(grpc.aio.AioRpcError):
        for _ in range(CHUNK, BODY, CHUNK):
            if not answer.done():
                await call.write(body(b"x" * CHUNK, end=False))
    return await answer


def error(answer: Any) -> tuple[int, dict[str, Any], dict[str, bytes]]:
    """Status, OpenAI's error object and headers of an immediate response."""
    response = answer.immediate_response
    headers = {o.header.key: o.header.raw_value for o in response.headers.set_headers}
    return response.status.code, json.loads(response.body)["error"], headers


@KINDS
async def test_stalled_uploads_are_bounded_over_all_streams(kind: Any) -> None:
    setup = PickerSetup(d="decode")
    async with serving(kind, setup) as (server, port), calling(port) as method:
        calls = [method() for _ in range(STALLED)]
        pending = [asyncio.ensure_future(stall(call)) for call in calls]

        async def refused() -> bool:
            # The others hold what may be held.
            return sum(task.done() for task in pending) >= STALLED - LIMIT // (BODY - CHUNK)

        await until(refused)
        answers = [task.result() for task in pending if task.done()]
        for status, details, headers in map(error, answers):
            assert (status, details["code"]) == (503, 503)
            assert headers["retry-after"] == b"1"
            assert headers[wire.REQUEST_DROPPED_REASON] == b"rejected-saturated"
        assert server.held.size <= LIMIT
        # Small bodies are served all the same.
        small = method()
        await small.write(head(PATH, end=False))
        await small.write(body(b'{"model": "m", ', end=False))
        await small.write(body(b'"prompt": "hi"}', end=True))
        assert (await small.read()).request_headers.response.header_mutation.set_headers
        for call in (*calls, small):
            call.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

        async def free() -> bool:
            return server.held.size == 0 and setup["d"].in_flight == 0

        await until(free)


@KINDS
async def test_a_refused_upload_frees_its_memory_while_its_stream_is_open(kind: Any) -> None:
    async with serving(kind, PickerSetup(d="decode")) as (server, port), calling(port) as method:
        server.held.add(LIMIT - 2 * CHUNK)
        call = method()
        answer = await stall(call)
        assert error(answer)[0] == 503
        assert server.held.size <= LIMIT - 2 * CHUNK + STREAM_BYTES
        server.held.give_back(LIMIT - 2 * CHUNK)


@KINDS
@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
async def test_a_body_that_does_not_come_in_time_gets_408(kind: Any, mode: BodyMode) -> None:
    setup = PickerSetup(d="decode")
    async with serving(kind, setup, 0.1) as (server, port), calling(port) as method:
        call = method()
        await call.write(head(PATH, end=False, mode=mode))
        if mode is BodyMode.BUFFERED:
            assert (await call.read()).HasField("request_headers")
        status, details, _ = error(await call.read())
        assert (status, details["type"]) == (408, "RequestTimeoutError")
        assert await call.code() is grpc.StatusCode.OK
        assert server.held.size == 0


@KINDS
async def test_a_body_in_time_is_not_refused_later(kind: Any) -> None:
    setup = PickerSetup(d="decode")
    async with serving(kind, setup, 0.1) as (_, port), calling(port) as method:
        placed = method()
        await placed.write(head(PATH, end=False))
        await placed.write(body(b'{"model": "m", "prompt": "hi"}', end=True))
        assert (await placed.read()).HasField("request_headers")
        assert (await placed.read()).HasField("request_body")
        # Ends after the time of the first stream.
        late = method()
        await late.write(head(PATH, end=False))
        assert error(await late.read())[0] == 408
        await placed.write(pb.ProcessingRequest(response_headers=pb.HttpHeaders()))
        assert (await placed.read()).HasField("response_headers")
        placed.cancel()


async def test_a_message_that_has_begun_counts_and_is_refused_with_503() -> None:
    """A BUFFERED body is one message, which only the transport can count."""
    setup = PickerSetup(d="decode")
    async with serving(Http2Server, setup) as (server, port), connected(port) as client:
        first = head(PATH, end=False, mode=BodyMode.BUFFERED).SerializeToString()
        begun = BODY.to_bytes(5, "big") + bytes(FRAME)
        client.send(headers(1, BLOCK), data(1, framed(first)), data(1, begun))
        assert (await answer_of(client)).HasField("request_headers")

        async def counted() -> bool:
            return server.held.size == STREAM_BYTES + FRAME

        await until(counted)
        server.held.add(LIMIT)
        client.send(data(1, bytes(FRAME)))
        assert error(await answer_of(client))[0] == 503
        await client.until(FrameType.HEADERS)
        assert server.held.size == LIMIT


async def answer_of(client: RawClient) -> pb.ProcessingResponse:
    """The next answer, in one frame."""
    frame = await client.until(FrameType.DATA)
    return pb.ProcessingResponse.FromString(frame.payload[PREFIX:])
