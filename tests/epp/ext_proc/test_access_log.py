"""Answers that broke off, as Envoy's access log tells them."""

import asyncio

import grpc.aio
import pytest

from tandem_contract.commandline import HostPort
from tandem_epp.ext_proc import access_log_pb2 as pb
from tandem_epp.ext_proc.access_log import SERVICE, BrokenAnswer, broken_answers
from tandem_epp.ext_proc.grpc_server import GrpcServer
from tandem_epp.ext_proc.http2_server import Http2Server

from ..test_picker import PickerSetup

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
