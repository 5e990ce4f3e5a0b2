"""The grpcio transport: ext_proc messages in and out of the stream logic.

Errors: `ListenError` when the address cannot be had.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from time import time
from typing import Final

import grpc
import grpc.aio
from google.protobuf.struct_pb2 import Struct

from tandem_contract import headers as wire
from tandem_contract.commandline import HostPort

from . import ext_proc_pb2 as pb
from .messages import (
    Answer,
    BodyMode,
    HttpRequest,
    Immediate,
    Input,
    Mutation,
    Part,
    Pass,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from .stream import ExtProcStream, Placer

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_ENVELOPE: Final = 1 << 16
"""Bytes a message may hold beside the body: headers and framing."""
_OVERWRITE: Final = 2
"""`HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD`."""


class ListenError(OSError):
    """The address is taken or not ours: the process cannot serve."""


@dataclass(eq=False, slots=True)
class _Call:
    """An open stream. Only while it is `reading` can its task be cancelled and still end with a
    status: grpcio refuses one beside an unfinished write."""

    task: asyncio.Task[None] | None
    stream: ExtProcStream
    reading: bool = True


class GrpcServer:
    """Serves ext_proc on one address."""

    def __init__(self, placer: Placer, listen: HostPort, body_limit: int) -> None:
        self._placer, self._listen, self._limit = placer, listen, body_limit
        self._open: set[_Call] = set()
        self._stopping = False
        self._server = grpc.aio.server(
            options=(
                # BUFFERED bodies come in one message.
                ("grpc.max_receive_message_length", body_limit + _ENVELOPE),
                # Else a second picker on the port would silently share its requests.
                ("grpc.so_reuseport", 0),
            )
        )
        method = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Process": method})
        self._server.add_generic_rpc_handlers((handler,))

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
        """Take no new stream; end those whose request is placed, the rest after `grace` seconds.

        Placed ones end with status OK: to Envoy that means no more processing. Any other status
        is an error, on which it resets a request that it sent in FULL_DUPLEX_STREAMED mode.
        """
        self._stopping = True
        stopped = asyncio.create_task(self._server.stop(grace))
        for call in self._open:
            if call.task and call.reading and call.stream.placed:
                call.task.cancel()
        await stopped

    async def _process(
        self,
        requests: AsyncIterator[pb.ProcessingRequest],
        context: grpc.aio.ServicerContext[pb.ProcessingRequest, pb.ProcessingResponse],
    ) -> None:
        stream = ExtProcStream(self._placer, self._limit)
        call = _Call(asyncio.current_task(), stream)
        self._open.add(call)
        try:
            async for request in requests:
                call.reading = False
                for answer in stream.receive(read_message(request), time()):
                    await context.write(write_answer(answer))
                call.reading = True
                if self._stopping and stream.placed:
                    break
        except asyncio.CancelledError:
            if not (self._stopping and stream.placed):
                raise
        finally:
            stream.close()
            self._open.discard(call)


def read_message(message: pb.ProcessingRequest) -> Input:
    """What Envoy sent. Raises ValueError for a message of no kind."""
    kind = message.WhichOneof("request")
    if kind is None:
        raise ValueError("an ext_proc message without content")
    return _READERS[kind](message)


def write_answer(answer: Answer) -> pb.ProcessingResponse:
    """The message that says `answer`."""
    message = pb.ProcessingResponse()
    if isinstance(answer, Immediate):
        _immediate(message.immediate_response, answer)
        return message
    part = getattr(message, answer.part.name.lower())
    if isinstance(answer, Pass):
        part.SetInParent()
        if answer.part not in _TRAILERS:
            part.response.SetInParent()
        if answer.mutation is not None:
            _mutate(message, part.response, answer.mutation)
        return message
    streamed = part.response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = answer.body, answer.end_of_stream
    return message


_TRAILERS: Final = (Part.REQUEST_TRAILERS, Part.RESPONSE_TRAILERS)


def _mutate(
    message: pb.ProcessingResponse, response: pb.CommonResponse, mutation: Mutation
) -> None:
    for name, value in mutation.set:
        _set(response.header_mutation, name, value)
    response.header_mutation.remove_headers.extend(mutation.remove)
    if mutation.destination is not None:
        # Routes are chosen before filters run; this one depends on the header just set.
        response.clear_route_cache = True
        namespace = Struct()
        namespace.update({wire.DESTINATION_ENDPOINT: mutation.destination})
        message.dynamic_metadata.update({wire.METADATA_NAMESPACE: namespace})


def _set(mutation: pb.HeaderMutation, name: str, value: str) -> None:
    option = mutation.set_headers.add(append_action=_OVERWRITE)
    option.header.key, option.header.raw_value = name, value.encode("latin-1")


def _immediate(message: pb.ImmediateResponse, answer: Immediate) -> None:
    message.status.code = answer.status
    message.body = answer.body
    for name, value in answer.headers:
        _set(message.headers, name, value)


def _request_headers(message: pb.ProcessingRequest) -> RequestHeaders:
    headers = _headers(message.request_headers)
    modes = message.protocol_config
    # A gateway that does not tell its modes is older than the message; inference gateways then
    # run FULL_DUPLEX_STREAMED, as the Gateway API Inference Extension prescribes.
    told = message.HasField("protocol_config")
    default = BodyMode.FULL_DUPLEX_STREAMED
    return RequestHeaders(
        HttpRequest(
            method=headers.get(":method", ""),
            path=headers.get(":path", ""),
            headers=headers,
            subset=_subset(message.metadata_context.filter_metadata),
        ),
        message.request_headers.end_of_stream,
        BodyMode(modes.request_body_mode) if told else default,
        BodyMode(modes.response_body_mode) if told else default,
    )


def _headers(message: pb.HttpHeaders) -> dict[str, str]:
    return {h.key: h.raw_value.decode("latin-1") or h.value for h in message.headers.headers}


def _response_headers(message: pb.ProcessingRequest) -> ResponseHeaders:
    found = _headers(message.response_headers)
    return ResponseHeaders(
        found.get(wire.TIMING), int(found.get(":status", "0")), found.get(wire.PREFILL_BACKEND)
    )


def _subset(metadata: Mapping[str, Struct]) -> frozenset[str] | None:
    """The candidates a gateway allows, in either place it may say so."""
    for namespace, key in _SUBSET_HINTS:
        if namespace in metadata and key in metadata[namespace].fields:
            value = metadata[namespace].fields[key]
            listed = [item.string_value for item in value.list_value.values]
            names = listed or value.string_value.split(",")
            return frozenset(name.strip() for name in names)
    return None


_SUBSET_HINTS: Final = (
    (wire.METADATA_NAMESPACE, wire.SUBSET_HINT),
    (wire.SUBSET_NAMESPACE, wire.SUBSET_KEY),
)
_READERS: Final[dict[str, Callable[[pb.ProcessingRequest], Input]]] = {
    "request_headers": _request_headers,
    "request_body": lambda m: RequestBody(m.request_body.body, m.request_body.end_of_stream),
    "request_trailers": lambda m: RequestTrailers(),
    "response_headers": _response_headers,
    "response_body": lambda m: ResponseBody(m.response_body.body, m.response_body.end_of_stream),
    "response_trailers": lambda m: ResponseTrailers(),
}
