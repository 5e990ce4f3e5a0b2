"""Both transports over a real socket, with grpcio's client: the same answers from either."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from tandem_contract import headers as wire
from tandem_contract.commandline import HostPort
from tandem_epp.exchange import HttpRequest
from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.grpc_server import GrpcServer
from tandem_epp.server.ext_proc.http2_server import Http2Server
from tandem_epp.server.ext_proc.interface import SERVICE, ExtProcServer, ListenError
from tandem_epp.server.ext_proc.messages import BodyMode

from ...placement.test_picker import PickerSetup
from ...real import until

Kind = type[GrpcServer] | type[Http2Server]
Serving = Callable[[PickerSetup], AbstractAsyncContextManager[tuple[ExtProcServer, Any]]]


@pytest.fixture(params=[GrpcServer, Http2Server])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each of the servers."""
    server: Kind = request.param
    return server


@pytest.fixture
def served(kind: Kind) -> Serving:
    """Serves a picker, with one open stream."""
    return lambda setup: serving(kind, setup)


@asynccontextmanager
async def serving(kind: Kind, setup: PickerSetup) -> AsyncIterator[tuple[ExtProcServer, Any]]:
    server = kind(setup.picker, HostPort("127.0.0.1", 0), 1 << 20)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        yield server, method()
    await server.stop(0)


def head(
    path: str, *, end: bool, mode: int = BodyMode.FULL_DUPLEX_STREAMED
) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = mode
    message.request_headers.end_of_stream = end
    for name, value in ((":method", "POST"), (":path", path), (wire.REQUEST_ID, "r")):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return message


def body(data: bytes, *, end: bool) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=end))


async def test_a_request_is_placed_answered_and_counted_to_its_end(served: Serving) -> None:
    setup = PickerSetup(d="decode", p="prefill")
    async with served(setup) as (_, call):
        text = b'{"model": "m", "prompt": "hi"}'
        await call.write(head("/v1/completions", end=False))
        await call.write(body(text[:9], end=False))
        await call.write(body(text[9:], end=True))
        headers, chunk = await call.read(), await call.read()
        response = headers.request_headers.response
        options = response.header_mutation.set_headers
        assert {(o.header.key, o.append_action) for o in options} == {
            (wire.DESTINATION_ENDPOINT, 2),
            (wire.PLAN, 2),
        }
        assert response.clear_route_cache
        metadata = headers.dynamic_metadata[wire.METADATA_NAMESPACE]
        assert metadata[wire.DESTINATION_ENDPOINT] == "10.0.0.1:8000"
        streamed = chunk.request_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (text, True)
        assert setup["d"].in_flight == 1

        timing = pb.ProcessingRequest()
        timing.response_headers.headers.headers.add(key=wire.TIMING, raw_value=b"queue=0.5")
        await call.write(timing)
        answer = await call.read()
        removed = answer.response_headers.response.header_mutation.remove_headers
        assert list(removed) == [wire.TIMING]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert setup["d"].in_flight == 0


async def test_a_cancelled_stream_is_no_longer_counted(served: Serving) -> None:
    setup = PickerSetup(d="decode")
    async with served(setup) as (_, call):
        await call.write(head("/health", end=True))
        await call.read()
        assert setup["d"].in_flight == 1
        call.cancel()

        async def over() -> bool:
            return setup["d"].in_flight == 0

        await until(over)


async def test_an_invalid_body_gets_an_immediate_response(served: Serving) -> None:
    async with served(PickerSetup(d="decode")) as (_, call):
        await call.write(head("/v1/completions", end=False))
        await call.write(body(b"{", end=True))
        answer = (await call.read()).immediate_response
        assert answer.status.code == 400
        assert b"not JSON" in answer.body
        assert answer.headers.set_headers[0].header.raw_value == b"application/json"


async def test_a_body_nested_too_deeply_is_refused_and_breaks_no_stream(served: Serving) -> None:
    async with served(PickerSetup(d="decode")) as (_, call):
        await call.write(head("/v1/chat/completions", end=False))
        await call.write(body(b'{"messages": ' + b"[" * 100_000, end=True))
        answer = (await call.read()).immediate_response
        assert answer.status.code == 400
        assert b"nested too deeply" in answer.body


async def test_stop_ends_streams_of_placed_requests_with_ok(served: Serving) -> None:
    async with served(PickerSetup(d="decode")) as (server, call):
        await call.write(head("/health", end=True))
        await call.read()
        await server.stop(5)
        assert await call.code() is grpc.StatusCode.OK


async def test_a_port_in_use_is_an_error(kind: Kind) -> None:
    setup = PickerSetup(d="decode")
    first = kind(setup.picker, HostPort("127.0.0.1", 0), 1)
    port = await first.start()
    second = kind(setup.picker, HostPort("127.0.0.1", port), 1)
    with pytest.raises(ListenError, match=f"127.0.0.1:{port}"):
        await second.start()
    await first.stop(0)


async def test_a_connection_whose_pick_waits_is_not_slow() -> None:
    """In full duplex the gateway's side of a stream stays open while its request waits."""
    setup, entered, leave = PickerSetup(d="decode"), asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def prepare(_: HttpRequest, __: bytes) -> AsyncIterator[object]:
        entered.set()
        await leave.wait()
        yield None

    async with serving(Http2Server, setup) as (server, call):
        assert isinstance(server, Http2Server)
        server.prepare = prepare
        await call.write(head("/v1/completions", end=False))
        await call.write(body(b'{"model": "m", "prompt": "hi"}', end=True))
        await entered.wait()
        (connection,) = server.server.connections
        now, limits = asyncio.get_running_loop().time(), server.server.limits
        connection.check(now + 2 * max(limits.request_seconds, limits.idle_seconds))
        leave.set()
        assert (await call.read()).request_headers.response.header_mutation.set_headers
