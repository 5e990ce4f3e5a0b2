"""The grpcio transport over a real socket, without Envoy."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from google.protobuf.struct_pb2 import Struct

from tandem_contract import headers as wire
from tandem_contract.commandline import HostPort
from tandem_epp.ext_proc import ext_proc_pb2 as pb
from tandem_epp.ext_proc.grpc_server import SERVICE, GrpcServer, ListenError, read_message
from tandem_epp.ext_proc.messages import BodyMode, RequestHeaders, ResponseHeaders

from ..real import until
from ..test_picker import PickerSetup


@asynccontextmanager
async def served(setup: PickerSetup) -> AsyncIterator[tuple[GrpcServer, Any]]:
    """A server and one open stream."""
    server = GrpcServer(setup.picker, HostPort("127.0.0.1", 0), 1 << 20)
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


async def test_a_request_is_placed_answered_and_counted_to_its_end() -> None:
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


async def test_a_cancelled_stream_is_no_longer_counted() -> None:
    setup = PickerSetup(d="decode")
    async with served(setup) as (_, call):
        await call.write(head("/", end=True))
        await call.read()
        assert setup["d"].in_flight == 1
        call.cancel()

        async def over() -> bool:
            return setup["d"].in_flight == 0

        await until(over)


async def test_an_invalid_body_gets_an_immediate_response() -> None:
    async with served(PickerSetup(d="decode")) as (_, call):
        await call.write(head("/v1/completions", end=False))
        await call.write(body(b"{", end=True))
        answer = (await call.read()).immediate_response
        assert answer.status.code == 400
        assert b"not JSON" in answer.body
        assert answer.headers.set_headers[0].header.raw_value == b"application/json"


async def test_a_body_nested_too_deeply_is_refused_and_breaks_no_stream() -> None:
    async with served(PickerSetup(d="decode")) as (_, call):
        await call.write(head("/v1/chat/completions", end=False))
        await call.write(body(b'{"messages": ' + b"[" * 100_000, end=True))
        answer = (await call.read()).immediate_response
        assert answer.status.code == 400
        assert b"nested too deeply" in answer.body


async def test_stop_ends_streams_of_placed_requests_with_ok() -> None:
    async with served(PickerSetup(d="decode")) as (server, call):
        await call.write(head("/", end=True))
        await call.read()
        await server.stop(5)
        assert await call.code() is grpc.StatusCode.OK


async def test_a_port_in_use_is_an_error() -> None:
    setup = PickerSetup(d="decode")
    first = GrpcServer(setup.picker, HostPort("127.0.0.1", 0), 1)
    port = await first.start()
    second = GrpcServer(setup.picker, HostPort("127.0.0.1", port), 1)
    with pytest.raises(ListenError, match=f"127.0.0.1:{port}"):
        await second.start()
    await first.stop(0)


@pytest.mark.parametrize(
    ("namespace", "key", "value"),
    [
        (wire.METADATA_NAMESPACE, wire.SUBSET_HINT, "10.0.0.1:80, 10.0.0.2:80"),
        (wire.SUBSET_NAMESPACE, wire.SUBSET_KEY, ["10.0.0.1:80", "10.0.0.2:80"]),
    ],
)
def test_a_subset_hint_is_read_from_both_namespaces(
    namespace: str, key: str, value: str | list[str]
) -> None:
    message = head("/", end=True)
    hint = Struct()
    hint.update({key: value})
    message.metadata_context.filter_metadata[namespace].CopyFrom(hint)
    read = read_message(message)
    assert isinstance(read, RequestHeaders)
    assert read.request.subset == frozenset({"10.0.0.1:80", "10.0.0.2:80"})


def test_without_body_modes_full_duplex_is_assumed() -> None:
    message = pb.ProcessingRequest()
    message.request_headers.SetInParent()
    read = read_message(message)
    assert isinstance(read, RequestHeaders)
    assert read.request_mode is BodyMode.FULL_DUPLEX_STREAMED
    assert read.request.subset is None
    with pytest.raises(ValueError, match="without content"):
        read_message(pb.ProcessingRequest())


def response_head(status: bytes = b"503") -> pb.ProcessingRequest:
    """Response headers with the attributes that Envoy sends for our configuration."""
    message = pb.ProcessingRequest()
    headers = {":status": status, wire.ROUTING_PATH: b"unified", wire.RETRY_AFTER: b"3"}
    for name, value in headers.items():
        message.response_headers.headers.headers.add(key=name, raw_value=value)
    message.attributes["envoy.filters.http.ext_proc"].update(
        {wire.UPSTREAM_ADDRESS: "10.0.0.2:8000", wire.CODE_DETAILS: "via_upstream"}
    )
    return message


def test_what_answered_is_read_from_envoys_attributes() -> None:
    read = read_message(response_head())
    assert read == ResponseHeaders(
        timing=None,
        status=503,
        path="unified",
        retry_after="3",
        served="10.0.0.2:8000",
        details="via_upstream",
    )


def test_the_gateways_metadata_beats_the_upstream_address() -> None:
    message = response_head()
    served = Struct()
    served.update({wire.SERVED_ENDPOINT: "10.0.0.3:8000"})
    message.metadata_context.filter_metadata[wire.METADATA_NAMESPACE].CopyFrom(served)
    read = read_message(message)
    assert isinstance(read, ResponseHeaders)
    assert read.served == "10.0.0.3:8000"


def test_a_gateway_that_tells_nothing_of_the_backend() -> None:
    message = pb.ProcessingRequest()
    message.response_headers.SetInParent()
    # The pick itself, which Envoy returns in the same namespace, is not what served.
    picked = Struct()
    picked.update({wire.DESTINATION_ENDPOINT: "10.0.0.1:8000"})
    message.metadata_context.filter_metadata[wire.METADATA_NAMESPACE].CopyFrom(picked)
    read = read_message(message)
    assert isinstance(read, ResponseHeaders)
    assert (read.served, read.details, read.path) == (None, None, None)
