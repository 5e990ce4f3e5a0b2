"""What crosses between a transport and the stream logic: ext_proc's messages as plain values.

A transport turns its wire form into an `Input` and an `Answer` into its wire form; nothing here
knows gRPC or protobuf.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto


class BodyMode(IntEnum):
    """ext_proc's body send modes, with Envoy's numbers."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class Part(Enum):
    """The part of the exchange an answer is for."""

    REQUEST_HEADERS = auto()
    REQUEST_BODY = auto()
    REQUEST_TRAILERS = auto()
    RESPONSE_HEADERS = auto()
    RESPONSE_BODY = auto()
    RESPONSE_TRAILERS = auto()


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The head of a client's request."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Lower-case names."""
    subset: frozenset[str] | None = None
    """The gateway's subset hint: `ip:port` or `ip`; None allows every backend."""


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """The first message of a stream."""

    request: HttpRequest
    end_of_stream: bool
    request_mode: BodyMode
    response_mode: BodyMode = BodyMode.NONE


@dataclass(frozen=True, slots=True)
class RequestBody:
    """A piece of the body, or all of it in BUFFERED mode."""

    body: bytes
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class RequestTrailers:
    """The request ended with trailers."""


@dataclass(frozen=True, slots=True)
class ResponseHeaders:
    """The backend's response began."""

    timing: str | None
    """Value of the timing header, None where there is none."""
    status: int = 200
    prefill: str | None = None
    """Name of the backend that ran the prefill, where the sidecar says so."""


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """A piece of the response, sent only by a gateway configured to."""

    body: bytes
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class ResponseTrailers:
    """The response ended with trailers."""


Input = (
    RequestHeaders
    | RequestBody
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of headers; removals never touch what is set."""

    set: tuple[tuple[str, str], ...] = ()
    remove: tuple[str, ...] = ()
    destination: str | None = None
    """Set on a pick: the route is chosen anew, and the value also goes out as metadata."""

    def also(self, name: str, value: str) -> "Mutation":
        """This one, and a header more."""
        return Mutation((*self.set, (name, value)), self.remove, self.destination)


@dataclass(frozen=True, slots=True)
class Pass:
    """Go on with `part`, its headers changed where a mutation is given."""

    part: Part
    mutation: Mutation | None = None


@dataclass(frozen=True, slots=True)
class StreamedChunk:
    """A piece of body handed back in FULL_DUPLEX_STREAMED mode."""

    part: Part
    body: bytes
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class Immediate:
    """Answer the client here and now."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = field(default=(("content-type", "application/json"),))


Answer = Pass | StreamedChunk | Immediate
