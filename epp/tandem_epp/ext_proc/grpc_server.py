"""The gRPC transport, on grpcio: ext_proc messages in and out of the stream's state machine.

Errors: `ListenError` when the server cannot listen at its address.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from time import time
from typing import Final

import grpc
import grpc.aio
from google.protobuf.struct_pb2 import Struct

from tandem_contract import headers as wire
from tandem_contract.commandline import HostPort

from . import ext_proc_pb2 as pb
from . import messages
from .access_log import AccessLogService, BrokenAnswer
from .stream import ExtProcStream, RequestPicker

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_ENVELOPE: Final = 1 << 16
"""Bytes that a message may hold besides the body: headers and framing."""
_OVERWRITE: Final = 2
"""`HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD`."""


Preparer = Callable[[messages.HttpRequest, bytes], AbstractAsyncContextManager[object]]
"""Entered before the pick and left after it; must begin by itself, soon. Its value is what the pick
needs to know about the body and cannot wait for."""


class ListenError(OSError):
    """The port is in use, or the address is not one of this machine's."""


@dataclass(eq=False, slots=True)
class _OpenStream:
    """A gRPC stream and the task that serves it."""

    task: asyncio.Task[None] | None
    stream: ExtProcStream
    is_reading: bool = True
    """Whether the task waits for a message. Only then may it be cancelled: grpcio cannot send a
    status beside an unfinished write."""


class GrpcServer:
    """Serves ext_proc on one address."""

    def __init__(
        self,
        picker: RequestPicker,
        listen: HostPort,
        body_limit: int,
        on_broken: Callable[[BrokenAnswer, float], None] = lambda *_: None,
    ) -> None:
        """`body_limit` is in bytes. `on_broken` is called with each answer that broke off, and the
        time."""
        self._picker, self._listen, self._body_limit = picker, listen, body_limit
        self.prepare: Preparer | None = None
        """Called with each request that has a body; None: picks wait for nothing."""
        self._open: set[_OpenStream] = set()
        self._is_stopping = False
        self._server = grpc.aio.server(
            options=(
                # A BUFFERED body comes in one message.
                ("grpc.max_receive_message_length", body_limit + _ENVELOPE),
                # Otherwise a second EPP on the same port would take part of the requests unnoticed.
                ("grpc.so_reuseport", 0),
            )
        )
        method = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Process": method})
        self._access_log = AccessLogService(on_broken)
        self._server.add_generic_rpc_handlers((handler, self._access_log.handler))

    async def start(self) -> int:
        """Listen and serve; returns the port. Raises ListenError."""
        try:
            port = self._server.add_insecure_port(str(self._listen))
        except RuntimeError as err:
            raise ListenError(
                f"cannot listen on {self._listen}: is the port in use? See --listen"
            ) from err
        await self._server.start()
        return port

    async def stop(self, grace: float) -> None:
        """Accept no new stream, end streams of placed requests now, all others after `grace` s.

        Streams of placed requests end with status OK, which tells Envoy to go on without ext_proc.
        Any other status is an error: Envoy would reset a request that it sent in
        FULL_DUPLEX_STREAMED mode.
        """
        self._is_stopping = True
        self._access_log.stop()
        # Started first, so that no new stream is accepted while the placed ones are ended.
        stopped = asyncio.create_task(self._server.stop(grace))
        # A stream that is writing sees `_is_stopping` itself once it has written.
        for open_stream in self._open:
            if open_stream.task and open_stream.is_reading and open_stream.stream.is_placed:
                open_stream.task.cancel()
        await stopped

    async def _process(
        self,
        requests: AsyncIterator[pb.ProcessingRequest],
        context: grpc.aio.ServicerContext[pb.ProcessingRequest, pb.ProcessingResponse],
    ) -> None:
        # Envoy opens one gRPC stream for each HTTP request.
        stream = ExtProcStream(self._picker, self._body_limit)
        open_stream = _OpenStream(asyncio.current_task(), stream)
        self._open.add(open_stream)
        try:
            async for request in requests:
                open_stream.is_reading = False
                for answer in await self._answers(stream, read_message(request)):
                    await context.write(write_answer(answer))
                open_stream.is_reading = True
                if self._is_stopping and stream.is_placed:
                    break
        except asyncio.CancelledError:
            # Cancelled by `stop`: return normally, so that grpcio sends status OK.
            if not (self._is_stopping and stream.is_placed):
                raise
        finally:
            # Whatever ended the gRPC stream, the request's count on its pods ends with it.
            stream.close(time())
            self._open.discard(open_stream)

    async def _answers(
        self, stream: ExtProcStream, message: messages.Input
    ) -> Sequence[messages.Answer]:
        if self.prepare is not None and (complete := stream.complete_body(message)):
            async with self.prepare(*complete) as preparation:
                stream.prepare(preparation)
                return stream.receive(message, time())
        return stream.receive(message, time())


def read_message(message: pb.ProcessingRequest) -> messages.Input:
    """The message as a plain value. Raises ValueError for a message without content."""
    kind = message.WhichOneof("request")
    if kind is None:
        raise ValueError("an ext_proc message without content")
    return _READERS[kind](message)


def write_answer(answer: messages.Answer) -> pb.ProcessingResponse:
    """The protobuf message for `answer`."""
    message = pb.ProcessingResponse()
    if isinstance(answer, messages.ImmediateResponse):
        _write_immediate(message.immediate_response, answer)
        return message
    part = getattr(message, answer.part.name.lower())
    if isinstance(answer, messages.Continue):
        # An empty message must still be present: it is what says "continue".
        part.SetInParent()
        if answer.part not in _TRAILERS:
            part.response.SetInParent()
        if answer.mutation is not None:
            _write_mutation(message, part.response, answer.mutation)
        return message
    streamed = part.response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = answer.body, answer.end_of_stream
    return message


_TRAILERS: Final = (messages.Part.REQUEST_TRAILERS, messages.Part.RESPONSE_TRAILERS)


def _write_mutation(
    message: pb.ProcessingResponse, response: pb.CommonResponse, mutation: messages.HeaderMutation
) -> None:
    for name, value in mutation.set:
        _set_header(response.header_mutation, name, value)
    response.header_mutation.remove_headers.extend(mutation.remove)
    if mutation.destination is not None:
        # Envoy selects the route before its filters run; this route depends on the header above.
        response.clear_route_cache = True
        namespace = Struct()
        namespace.update({wire.DESTINATION_ENDPOINT: mutation.destination})
        message.dynamic_metadata.update({wire.METADATA_NAMESPACE: namespace})


def _set_header(mutation: pb.HeaderMutation, name: str, value: str) -> None:
    option = mutation.set_headers.add(append_action=_OVERWRITE)
    option.header.key, option.header.raw_value = name, value.encode("latin-1")


def _write_immediate(message: pb.ImmediateResponse, response: messages.ImmediateResponse) -> None:
    message.status.code = response.status
    message.body = response.body
    for name, value in response.headers:
        _set_header(message.headers, name, value)


def _read_request_headers(message: pb.ProcessingRequest) -> messages.RequestHeaders:
    headers = _read_headers(message.request_headers)
    modes = message.protocol_config
    # A gateway that does not send its body modes is older than this field. Inference gateways then
    # use FULL_DUPLEX_STREAMED, as the Gateway API Inference Extension prescribes.
    has_modes = message.HasField("protocol_config")
    default = messages.BodyMode.FULL_DUPLEX_STREAMED
    return messages.RequestHeaders(
        messages.HttpRequest(
            method=headers.get(":method", ""),
            path=headers.get(":path", ""),
            headers=headers,
            subset=_read_subset(message.metadata_context.filter_metadata),
        ),
        message.request_headers.end_of_stream,
        messages.BodyMode(modes.request_body_mode) if has_modes else default,
        messages.BodyMode(modes.response_body_mode) if has_modes else default,
    )


def _read_headers(message: pb.HttpHeaders) -> dict[str, str]:
    # Header values are bytes to Envoy; latin-1 keeps every byte.
    return {h.key: h.raw_value.decode("latin-1") or h.value for h in message.headers.headers}


def _read_response_headers(message: pb.ProcessingRequest) -> messages.ResponseHeaders:
    headers = _read_headers(message.response_headers)
    return messages.ResponseHeaders(
        headers.get(wire.TIMING),
        int(headers.get(":status", "0")),
        headers.get(wire.PREFILL_BACKEND),
        headers.get(wire.ROUTING_PATH),
        headers.get(wire.RETRY_AFTER),
        _read_served(message),
        _read_attribute(message, wire.CODE_DETAILS),
        headers.get("content-type", "").startswith(_EVENT_STREAM),
    )


def _read_served(message: pb.ProcessingRequest) -> str | None:
    """The backend that Envoy used: where a gateway with alternates names it, else the address that
    it connected to last."""
    metadata = message.metadata_context.filter_metadata
    if wire.METADATA_NAMESPACE in metadata:
        fields = metadata[wire.METADATA_NAMESPACE].fields
        if wire.SERVED_ENDPOINT in fields and (served := fields[wire.SERVED_ENDPOINT].string_value):
            return served
    return _read_attribute(message, wire.UPSTREAM_ADDRESS)


def _read_attribute(message: pb.ProcessingRequest, name: str) -> str | None:
    # One struct per filter that asked for attributes, under the filter's name, which gateways
    # choose.
    for attributes in message.attributes.values():
        if name in attributes.fields:
            return attributes.fields[name].string_value or None
    return None


def _read_subset(metadata: Mapping[str, Struct]) -> frozenset[str] | None:
    """The backends that the gateway allows, from either place that may name them."""
    for namespace, key in _SUBSET_HINTS:
        if namespace in metadata and key in metadata[namespace].fields:
            value = metadata[namespace].fields[key]
            # A list of strings, or one string with commas.
            values = [item.string_value for item in value.list_value.values]
            addresses = values or value.string_value.split(",")
            return frozenset(address.strip() for address in addresses)
    return None


_EVENT_STREAM: Final = "text/event-stream"
_SUBSET_HINTS: Final = (
    (wire.METADATA_NAMESPACE, wire.SUBSET_HINT),
    (wire.SUBSET_NAMESPACE, wire.SUBSET_KEY),
)
_READERS: Final[dict[str, Callable[[pb.ProcessingRequest], messages.Input]]] = {
    "request_headers": _read_request_headers,
    "request_body": lambda message: messages.RequestBody(
        message.request_body.body, message.request_body.end_of_stream
    ),
    "request_trailers": lambda message: messages.RequestTrailers(),
    "response_headers": _read_response_headers,
    "response_body": lambda message: messages.ResponseBody(
        message.response_body.body, message.response_body.end_of_stream
    ),
    "response_trailers": lambda message: messages.ResponseTrailers(),
}
