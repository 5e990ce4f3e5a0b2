"""ext_proc's messages between protobuf and plain values.

`read_message` takes any message by protobuf's own parser, which is C and takes under a microsecond.
Building an answer from protobuf's objects takes several, because each nested message is a Python
object: `write_answer` does that for grpcio, and `wire_answers` writes the bytes for our own server.
"""

from collections.abc import Callable, Mapping
from typing import Final

from google.protobuf.struct_pb2 import Struct

from tandem_contract import headers as wire

from ...exchange import HeaderChanges, HttpRequest, Reply, ResponseHeaders
from . import ext_proc_pb2 as pb
from . import messages

_OVERWRITE: Final = 2
"""`HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD`."""


def read_message(message: pb.ProcessingRequest) -> messages.Input:
    """The message as a plain value. Raises ValueError for a message without content."""
    kind = message.WhichOneof("request")
    if kind is None:
        raise ValueError("an ext_proc message without content")
    return _READERS[kind](message)


def write_answer(answer: messages.Answer) -> pb.ProcessingResponse:
    """The protobuf message for `answer`."""
    message = pb.ProcessingResponse()
    if isinstance(answer, Reply):
        _write_immediate(message.immediate_response, answer)
        return message
    if isinstance(answer, messages.MoreTime):
        message.override_message_timeout.FromMilliseconds(round(1000 * answer.seconds))
        return message
    part = getattr(message, answer.part.name.lower())
    if isinstance(answer, messages.Continue):
        # An empty message must still be present: it is what says "continue".
        part.SetInParent()
        if answer.part not in _TRAILERS:
            part.response.SetInParent()
        if answer.mutation is not None:
            _write_mutation(message, part.response, answer.mutation)
        if answer.body is not None:
            part.response.body_mutation.body = answer.body
        if answer.asks_for_body:
            message.mode_override.CopyFrom(_STREAMED_RESPONSE)
        return message
    streamed = part.response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = answer.body, answer.end_of_stream
    return message


_TRAILERS: Final = (messages.Part.REQUEST_TRAILERS, messages.Part.RESPONSE_TRAILERS)
_SEND: Final = 1
"""`HeaderSendMode.SEND`."""
_STREAMED_RESPONSE: Final = pb.ProcessingMode(
    request_header_mode=_SEND,
    response_header_mode=_SEND,
    # An override names all modes: the request's may still be under way.
    request_body_mode=messages.BodyMode.BUFFERED,
    response_body_mode=messages.BodyMode.STREAMED,
    request_trailer_mode=_SEND,
    response_trailer_mode=_SEND,
)
"""The modes of Tandem's Envoy, and response bodies."""


def _write_mutation(
    message: pb.ProcessingResponse, response: pb.CommonResponse, mutation: HeaderChanges
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


def _write_immediate(message: pb.ImmediateResponse, response: Reply) -> None:
    message.status.code = response.status
    message.body = response.body
    for name, value in response.headers:
        _set_header(message.headers, name, value)


def read_request_headers(message: pb.ProcessingRequest) -> messages.RequestHeaders:
    """The request headers in `message`, which has some."""
    headers = _read_headers(message.request_headers)
    modes = message.protocol_config
    # A gateway that does not send its body modes is older than this field. Inference gateways then
    # use FULL_DUPLEX_STREAMED, as the Gateway API Inference Extension prescribes.
    has_modes = message.HasField("protocol_config")
    default = messages.BodyMode.FULL_DUPLEX_STREAMED
    return messages.RequestHeaders(
        HttpRequest(
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


def read_response_headers(message: pb.ProcessingRequest) -> ResponseHeaders:
    """The response headers in `message`, which has some."""
    headers = {
        header.key: header.raw_value.decode("latin-1") or header.value
        for header in message.response_headers.headers.headers
        if header.key in RESPONSE_HEADERS
    }
    return response_headers(
        headers, _read_served(message), _read_attribute(message, wire.CODE_DETAILS)
    )


def response_headers(
    headers: Mapping[str, str], served: str | None, details: str | None
) -> ResponseHeaders:
    """The message with those of RESPONSE_HEADERS that came, and what the gateway tells beside
    them. Raises ValueError for a status that is no number."""
    get = headers.get
    return ResponseHeaders(
        get(wire.TIMING),
        int(get(":status", "0")),
        get(wire.PREFILL_BACKEND),
        get(wire.ROUTING_PATH),
        get(wire.RETRY_AFTER),
        served,
        details,
        get("content-type", "").startswith(_EVENT_STREAM),
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
RESPONSE_HEADERS: Final = frozenset(
    (
        *(wire.TIMING, wire.PREFILL_BACKEND, wire.ROUTING_PATH, wire.RETRY_AFTER),
        ":status",
        "content-type",
    )
)
"""Those that are read of a response."""
_SUBSET_HINTS: Final = (
    (wire.METADATA_NAMESPACE, wire.SUBSET_HINT),
    (wire.SUBSET_NAMESPACE, wire.SUBSET_KEY),
)
_READERS: Final[dict[str, Callable[[pb.ProcessingRequest], messages.Input]]] = {
    "request_headers": read_request_headers,
    "request_body": lambda message: messages.RequestBody(
        message.request_body.body, message.request_body.end_of_stream
    ),
    "request_trailers": lambda message: messages.RequestTrailers(),
    "response_headers": read_response_headers,
    "response_body": lambda message: messages.ResponseBody(
        message.response_body.body, message.response_body.end_of_stream
    ),
    "response_trailers": lambda message: messages.ResponseTrailers(),
}
