"""Envoy's access log as a gRPC service: how answers ended that were not complete.

ext_proc does not show it: Envoy ends its stream alike for a complete answer, a broken one and a
client that left. So the operator has Envoy log the requests that may have ended in one of the
ways of `Ending`, and only these. Those that failed before the headers are left out here, because
ext_proc has shown them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from time import time
from typing import Final

import grpc
import grpc.aio

from tandem_contract.commandline import HostPort
from tandem_contract.stalls import STALL_SECONDS

from ...exchange import BrokenAnswer, Ending
from . import access_log_pb2 as pb

SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"
_AFTER_HEADERS: Final = "upstream_reset_after_response_started"
"""Beginning of the response code details of a broken answer."""


def broken_answers(message: pb.StreamAccessLogsMessage) -> Iterator[BrokenAnswer]:
    """The broken answers among a message's entries."""
    for entry in message.http_logs.log_entry:
        common = entry.common_properties
        socket = common.upstream_remote_address.socket_address
        ending = _ending(entry)
        if ending is not None and socket.address:
            start = common.start_time
            address = str(HostPort(socket.address, socket.port_value))
            started = start.seconds + start.nanos / 1e9
            yield BrokenAnswer(address, started, entry.request.request_id, ending)


def _ending(entry: pb.HTTPAccessLogEntry) -> Ending | None:
    """None: the answer is complete, had not begun, or was flowing when its client left."""
    if entry.response.response_code_details.startswith(_AFTER_HEADERS):
        return Ending.BROKEN
    common = entry.common_properties
    if not common.HasField("time_to_first_upstream_rx_byte"):
        return None
    flags = common.response_flags
    if flags.stream_idle_timeout:
        return Ending.IDLE
    has_left = flags.downstream_connection_termination or flags.downstream_remote_reset
    # The log does not tell when the last byte came: only that there was none.
    if not has_left or entry.response.response_body_bytes:
        return None
    headers_at = common.time_to_first_upstream_rx_byte.ToTimedelta()
    silent = (common.duration.ToTimedelta() - headers_at).total_seconds()
    return Ending.LEFT if silent >= STALL_SECONDS else None


class AccessLogService:
    """Receives the logs of all Envoys; calls `on_broken` with each broken answer and the time."""

    def __init__(self, on_broken: Callable[[BrokenAnswer, float], None]) -> None:
        self._on_broken = on_broken
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        """The service for a gRPC server."""
        method = grpc.stream_unary_rpc_method_handler(
            self._receive,
            request_deserializer=pb.StreamAccessLogsMessage.FromString,
            response_serializer=pb.StreamAccessLogsResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"StreamAccessLogs": method})

    def stop(self) -> None:
        """End all streams, which would last as long as Envoy; it opens them again elsewhere."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()

    async def _receive(
        self,
        messages: AsyncIterator[pb.StreamAccessLogsMessage],
        _context: grpc.aio.ServicerContext[pb.StreamAccessLogsMessage, pb.StreamAccessLogsResponse],
    ) -> pb.StreamAccessLogsResponse:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            async for message in messages:
                for broken in broken_answers(message):
                    self._on_broken(broken, time())
        except asyncio.CancelledError:
            # Cancelled by `stop`: return normally, because otherwise grpcio sends no status.
            if not self._is_stopping:
                raise
        return pb.StreamAccessLogsResponse()
