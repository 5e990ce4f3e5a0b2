"""Answers that broke off, as Envoy's access log tells them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc.aio
import pytest
from aiohttp import web

from tandem_contract.commandline import HostPort
from tandem_contract.stalls import STALL_SECONDS
from tandem_epp.exchange import BrokenAnswer, Ending
from tandem_epp.server.ext_proc import access_log_pb2 as pb
from tandem_epp.server.ext_proc.access_log import SERVICE, broken_answers
from tandem_epp.server.ext_proc.grpc_server import GrpcServer
from tandem_epp.server.ext_proc.http2_server import Http2Server
from tandem_epp.server.http2.errors import ErrorCode
from tandem_epp.server.http2.frames import FrameType
from tandem_epp.server.http2.grpc import framed
from tandem_operator.routing.envoy.clusters import Json

from ...placement.test_picker import PickerSetup
from ...real import envoy, envoy_settings, serving_app
from ..http2.client import call_of, data, headers, ping
from ..http2.test_server import connected

AFTER = "upstream_reset_after_response_started{protocol_error}"


def logged(details: str, address: str = "10.0.0.1", port: int = 8000) -> pb.StreamAccessLogsMessage:
    message = pb.StreamAccessLogsMessage()
    entry = message.http_logs.log_entry.add()
    entry.request.request_id = "r1"
    entry.response.response_code_details = details
    entry.common_properties.start_time.seconds = 1000
    entry.common_properties.start_time.nanos = 500_000_000
    socket = entry.common_properties.upstream_remote_address.socket_address
    socket.address, socket.port_value = address, port
    return message


def test_a_broken_answer_names_the_backend_and_its_start() -> None:
    assert list(broken_answers(logged(AFTER))) == [BrokenAnswer("10.0.0.1:8000", 1000.5, "r1")]
    (broken,) = broken_answers(logged(AFTER, "fd00::1"))
    assert broken.backend == "[fd00::1]:8000"


@pytest.mark.parametrize(
    "message",
    [
        logged("upstream_reset_before_response_started{connection_termination}"),
        logged("via_upstream"),
        logged("downstream_remote_disconnect"),
        logged(AFTER, ""),
        pb.StreamAccessLogsMessage(),
    ],
)
def test_other_entries_are_left_out(message: pb.StreamAccessLogsMessage) -> None:
    assert list(broken_answers(message)) == []


def silent(
    flag: str, *, headers: float | None = 2.0, ended: float = 2.0 + STALL_SECONDS, body: int = 0
) -> pb.StreamAccessLogsMessage:
    """An entry with a response flag; seconds since the request, and bytes of the answer's body."""
    message = logged("some details")
    (entry,) = message.http_logs.log_entry
    common = entry.common_properties
    setattr(common.response_flags, flag, True)
    if headers is not None:
        common.time_to_first_upstream_rx_byte.FromMilliseconds(round(1000 * headers))
    common.duration.FromMilliseconds(round(1000 * ended))
    entry.response.response_body_bytes = body
    return message


LEAVES = pytest.mark.parametrize(
    "flag", ["downstream_connection_termination", "downstream_remote_reset"]
)


@LEAVES
def test_a_client_that_leaves_counts_if_nothing_followed_the_headers_for_long(flag: str) -> None:
    (answer,) = broken_answers(silent(flag))
    assert answer == BrokenAnswer("10.0.0.1:8000", 1000.5, "r1", Ending.LEFT)
    assert not list(broken_answers(silent(flag, ended=1.0 + STALL_SECONDS)))
    assert not list(broken_answers(silent(flag, body=1))), "when the last byte came is not known"
    assert not list(broken_answers(silent(flag, headers=None))), "ext_proc has shown it"


def test_envoys_idle_timeout_counts_after_the_headers() -> None:
    (answer,) = broken_answers(silent("stream_idle_timeout", body=9))
    assert answer.ending is Ending.IDLE
    assert not list(broken_answers(silent("stream_idle_timeout", headers=None)))


async def test_a_connection_with_an_access_log_alone_is_idle() -> None:
    """It is closed later than one whose request does not come, and without an error."""
    server = Http2Server(PickerSetup(d="decode").picker, HostPort("127.0.0.1", 0), 1 << 20)
    port = await server.start()
    log = call_of(f"/{SERVICE}/StreamAccessLogs")
    async with connected(port) as client:
        client.send(headers(1, log), data(1, framed(logged(AFTER).SerializeToString())), ping())
        await client.until(FrameType.PING)
        (connection,) = server.server.connections
        now, limits = asyncio.get_running_loop().time(), server.server.limits
        connection.check(now + 2 * limits.request_seconds)
        client.send(ping())
        await client.until(FrameType.PING)
        connection.check(now + 2 * limits.idle_seconds)
        assert (await client.until(FrameType.GOAWAY)).code is ErrorCode.NO_ERROR
        assert await client.ends()
    await server.stop(0)


@pytest.mark.parametrize("kind", [GrpcServer, Http2Server])
async def test_the_server_reports_them_and_its_stop_does_not_wait_for_envoy(
    kind: type[GrpcServer] | type[Http2Server],
) -> None:
    reported: asyncio.Queue[BrokenAnswer] = asyncio.Queue()
    listen = HostPort("127.0.0.1", 0)
    picker = PickerSetup(d="decode").picker
    server = kind(picker, listen, 1 << 20, lambda broken, _: reported.put_nowait(broken))
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = channel.stream_unary(
            f"/{SERVICE}/StreamAccessLogs",
            request_serializer=pb.StreamAccessLogsMessage.SerializeToString,
            response_deserializer=pb.StreamAccessLogsResponse.FromString,
        )
        call = method()
        for _ in range(2):
            await call.write(logged(AFTER))
            assert (await reported.get()).backend == "10.0.0.1:8000"
        # Far longer than the test may take: an open log must not delay the end.
        await server.stop(grace=1e4)
        assert await call.code() is grpc.StatusCode.OK


@asynccontextmanager
async def log_receiver(
    messages: asyncio.Queue[pb.StreamAccessLogsMessage],
) -> AsyncIterator[int]:
    """An access log service that passes on what it receives; yields its port."""

    async def receive(
        stream: AsyncIterator[pb.StreamAccessLogsMessage], _: object
    ) -> pb.StreamAccessLogsResponse:
        async for message in stream:
            messages.put_nowait(message)
        return pb.StreamAccessLogsResponse()

    method = grpc.stream_unary_rpc_method_handler(
        receive,
        request_deserializer=pb.StreamAccessLogsMessage.FromString,
        response_serializer=pb.StreamAccessLogsResponse.SerializeToString,
    )
    server = grpc.aio.server()
    handlers = grpc.method_handlers_generic_handler(SERVICE, {"StreamAccessLogs": method})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@pytest.mark.component
async def test_what_envoy_logs_of_clients_that_leave(tmp_path: Path) -> None:
    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if request.path.endswith("begun"):
            await response.write(b"first")
        await asyncio.Event().wait()
        return response

    def log_at_once(bootstrap: Json) -> None:
        listener = bootstrap["static_resources"]["listeners"][0]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        _, gave_up = manager["access_log"][0]["filter"]["or_filter"]["filters"]
        _, late = gave_up["and_filter"]["filters"]
        late["duration_filter"]["comparison"]["value"]["default_value"] = 0

    app = web.Application()
    app.router.add_get("/v1/responses/{name}", stall)
    messages: asyncio.Queue[pb.StreamAccessLogsMessage] = asyncio.Queue()
    async with log_receiver(messages) as port, serving_app(app) as backend:
        settings = envoy_settings(port, [backend.removeprefix("http://")])
        async with (
            envoy(tmp_path, settings, change=log_at_once) as url,
            aiohttp.ClientSession() as session,
        ):
            endings = {}
            for path, expected in (("nothing", b""), ("begun", b"first")):
                response = await session.get(f"{url}/v1/responses/{path}")
                assert await response.content.read(len(expected)) == expected
                response.close()
                message = await messages.get()
                assert not list(broken_answers(message)), "impatient"
                (entry,) = message.http_logs.log_entry
                # As if a minute had passed.
                entry.common_properties.duration.seconds += round(STALL_SECONDS)
                endings[path] = [answer.ending for answer in broken_answers(message)]
    assert endings == {"nothing": [Ending.LEFT], "begun": []}
