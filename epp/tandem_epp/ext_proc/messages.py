"""ext_proc's messages as plain values, between a transport and the stream's state machine.

A transport turns its wire form into an `Input` and an `Answer` into its wire form. Nothing here
knows gRPC or protobuf. They are structs of msgspec, not data classes, because a request makes ten
of them: they are made in a tenth of the time.
"""

from collections.abc import Mapping
from enum import IntEnum, auto

from msgspec import Struct


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


class HttpRequest(Struct, frozen=True):
    """Method, path and headers of a client's request."""

    method: str
    path: str
    """With its query string."""
    headers: Mapping[str, str]
    """Names in lower case."""
    subset: frozenset[str] | None = None
    """The gateway's subset hint: the `ip:port` or `ip` of each backend it allows; None allows
    all."""
    preparation: object = None
    """What the picker found out about the body before the pick; None: nothing."""


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


class ResponseHeaders(Struct, frozen=True):
    """The backend's response headers passed Envoy."""

    timing: str | None
    """Value of the timing header; None when there is none."""
    status: int = 200
    prefill: str | None = None
    """Name of the backend that ran the prefill; None when the sidecar names none."""
    path: str | None = None
    """Routing path that the sidecar took; None when no Tandem sidecar answered."""
    retry_after: str | None = None
    """Value of the header Retry-After."""
    served: str | None = None
    """`ip:port` of the backend that Envoy used, which may be another one than the EPP named; None
    when the gateway does not tell."""
    details: str | None = None
    """Envoy's response code details: `via_upstream` for a backend's own response, else why Envoy
    answered itself; None when the gateway does not tell."""
    is_stream: bool = False
    """Whether the answer is an event stream: its headers pass with the first token, if a sidecar
    or Tandem's engine sent them."""


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


class HeaderMutation(Struct, frozen=True):
    """Headers to set and to remove. Removals are never among the headers to set."""

    set: tuple[tuple[str, str], ...] = ()
    remove: tuple[str, ...] = ()
    destination: str | None = None
    """The picked endpoint. If given, Envoy also selects the route again and receives the value as
    dynamic metadata."""

    def with_header(self, name: str, value: str) -> "HeaderMutation":
        """A copy that also sets the header `name`."""
        return HeaderMutation((*self.set, (name, value)), self.remove, self.destination)


class Continue(Struct, frozen=True):
    """Envoy goes on with `part`; headers and body change only where they are given."""

    part: Part
    mutation: HeaderMutation | None = None
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


class ImmediateResponse(Struct, frozen=True):
    """Envoy answers the client with this and contacts no backend."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)


Answer = Continue | StreamedChunk | ImmediateResponse
"""A message to Envoy."""
