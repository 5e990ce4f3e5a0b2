"""ext_proc's messages as plain values, between a transport and the stream's state machine.

A transport turns its wire form into an `Input` and an `Answer` into its wire form. Nothing here
knows gRPC or protobuf. They are structs of msgspec, not data classes, because a request makes ten
of them: they are made in a tenth of the time.
"""

from enum import IntEnum, auto

from msgspec import Struct

from ...exchange import HeaderChanges, HttpRequest, Reply, ResponseHeaders


class BodyMode(IntEnum):
    """ext_proc's body send modes, with Envoy's numbers."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class Part(IntEnum):
    """The part of the HTTP exchange that an answer is for. A number, because it is a key of tables
    and other enums are hashed in Python."""

    REQUEST_HEADERS = auto()
    REQUEST_BODY = auto()
    REQUEST_TRAILERS = auto()
    RESPONSE_HEADERS = auto()
    RESPONSE_BODY = auto()
    RESPONSE_TRAILERS = auto()


class RequestHeaders(Struct, frozen=True):
    """The first message of a stream."""

    request: HttpRequest
    end_of_stream: bool
    request_mode: BodyMode
    response_mode: BodyMode = BodyMode.NONE


class RequestBody(Struct, frozen=True):
    """A chunk of the request body; the whole body in BUFFERED mode."""

    body: bytes
    end_of_stream: bool


class RequestTrailers(Struct, frozen=True):
    """The request ended with trailers."""


class ResponseBody(Struct, frozen=True):
    """A chunk of the response body; sent only by gateways configured to."""

    body: bytes
    end_of_stream: bool


class ResponseTrailers(Struct, frozen=True):
    """The response ended with trailers."""


Input = (
    RequestHeaders
    | RequestBody
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
)
"""A message from Envoy."""


class Continue(Struct, frozen=True):
    """Envoy goes on with `part`; headers and body change only where they are given."""

    part: Part
    mutation: HeaderChanges | None = None
    body: bytes | None = None
    """The body that takes the place of the one in the message; not for FULL_DUPLEX_STREAMED."""
    asks_for_body: bool = False
    """In the answer to response headers: whether Envoy, which sends request bodies in the mode
    BUFFERED and no response bodies, is to send the body of this response in the mode STREAMED.
    Without `allow_mode_override` in its configuration Envoy ignores it."""


class StreamedChunk(Struct, frozen=True):
    """A chunk of body that Envoy sends on, in FULL_DUPLEX_STREAMED mode."""

    part: Part
    body: bytes
    end_of_stream: bool


class MoreTime(Struct, frozen=True):
    """The answer to the last message takes longer than the gateway waits by itself. Envoy takes one
    such message for each of its own, and no time beyond its `max_message_timeout`."""

    seconds: float


Answer = Continue | StreamedChunk | MoreTime | Reply
"""A message to Envoy."""
