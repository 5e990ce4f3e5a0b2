"""One HTTP request's ext_proc stream as a pure state machine: messages in, answers out.

    OPEN ──headers need no body──────────────► PLACED ──response headers──► (until the stream ends)
      └──headers──► COLLECT ──end of body──► PLACED
                       └──refused, too large──► REFUSED

*Body modes*, told by the first message. FULL_DUPLEX_STREAMED: nothing is answered until the body
is whole, then headers and body follow each other. BUFFERED: Envoy holds the body back until the
headers are answered, so these pass unchanged and the pick travels with the body's answer. In any
other mode a pick must not wait for a body, so it is made from the headers alone.

*When a request has ended.* The gRPC stream's own end says so, exactly and for nothing, provided
that Envoy is told to send response trailers (`response_trailer_mode: SEND`) and no response body.
Seen with Envoy 1.40: with trailers skipped, the stream ends as soon as the response headers are
answered, while tokens still flow; with trailers sent, it ends when the client has the last byte,
and at once when the client goes away before the response or in the middle of it. An HTTP/1
response has no trailers, so this costs no message. The alternatives cost one message per response
chunk (a response body mode) or a second service whose records arrive in batches (an access log).
So whoever drives this machine calls `close` when the stream ends, in whatever way it does.
"""

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Final, Protocol

from tandem_contract import headers as wire

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
    StreamedChunk,
)

CHUNK: Final = 62 * 1024
"""Bytes of body per answer. Envoy takes at most 64 KiB per message, its envelope included."""

_FORGET_TIMING: Final = Mutation(remove=(wire.TIMING,))


class Placed(Protocol):
    """Where one request went; counted until `end`."""

    @property
    def mutation(self) -> Mutation:
        """What Envoy is to do to the request's headers."""

    def responded(self, timing: str | None, status: int, prefill: str | None = None) -> None:
        """Response headers passed: `timing` and the name of the backend that ran the `prefill` are
        what the sidecar reported with them."""

    def end(self) -> None:
        """The request is over, however it ended. Called once."""


class Refused(Exception):
    """The request is answered here: `immediate` says how, `reason` why, in one word."""

    def __init__(self, immediate: Immediate, reason: str = "") -> None:
        super().__init__(immediate.status)
        self.immediate, self.reason = immediate, reason


class Placer(Protocol):
    """The decision this machine asks for."""

    def needs_body(self, request: HttpRequest) -> bool:
        """Whether the pick depends on the body."""

    def place(self, request: HttpRequest, body: bytes, now: float) -> Placed:
        """Pick, and count the request from now on. Raises Refused."""

    def too_large(self, limit: int) -> Immediate:
        """The answer to a body of more than `limit` bytes."""


class _State(Enum):
    OPEN = auto()
    COLLECT = auto()
    PLACED = auto()
    REFUSED = auto()


class ExtProcStream:
    """One stream's state. Not for use from two threads."""

    def __init__(self, placer: Placer, body_limit: int) -> None:
        self._placer = placer
        self._limit = body_limit
        self._state = _State.OPEN
        self._request_mode = self._response_mode = BodyMode.NONE
        self._request: HttpRequest | None = None
        self._placed: Placed | None = None
        self._body: list[bytes] = []
        self._size = 0

    @property
    def placed(self) -> bool:
        """Whether the request is on its way: nothing more is needed of this stream."""
        return self._state is _State.PLACED

    def receive(self, message: Input, now: float) -> Sequence[Answer]:
        """The answers to `message`, in order; `now` is Unix seconds.

        A refusal is the last answer of a stream: what follows it is not answered.
        """
        if self._state is _State.REFUSED:
            return ()
        try:
            return self._answers(message, now)
        except Refused as refused:
            self._state = _State.REFUSED
            self._body.clear()
            return (refused.immediate,)

    def close(self) -> None:
        """The stream has ended; the request is counted no longer. May be called again."""
        placed, self._placed = self._placed, None
        self._body.clear()
        if placed is not None:
            placed.end()

    def _answers(self, message: Input, now: float) -> Sequence[Answer]:
        match message:
            case RequestHeaders():
                return self._request_headers(message, now)
            case RequestBody():
                return self._request_body(message, now)
            case RequestTrailers():
                return (*self._request_trailers(now), Pass(Part.REQUEST_TRAILERS))
            case ResponseHeaders():
                return (self._response_headers(message),)
            case ResponseBody(body=body, end_of_stream=end):
                return self._response_body(body, end)
            case ResponseTrailers():
                return (Pass(Part.RESPONSE_TRAILERS),)

    def _response_headers(self, message: ResponseHeaders) -> Answer:
        if self._placed is not None:
            self._placed.responded(message.timing, message.status, message.prefill)
        return Pass(Part.RESPONSE_HEADERS, None if message.timing is None else _FORGET_TIMING)

    def _response_body(self, body: bytes, end: bool) -> Sequence[Answer]:
        if self._response_mode is BodyMode.FULL_DUPLEX_STREAMED:
            return tuple(_chunks(Part.RESPONSE_BODY, body, end))
        return (Pass(Part.RESPONSE_BODY),)

    def _request_headers(self, message: RequestHeaders, now: float) -> Sequence[Answer]:
        if self._state is not _State.OPEN:
            return ()
        self._request_mode, self._response_mode = message.request_mode, message.response_mode
        self._request = message.request
        if message.end_of_stream or not self._awaits_body(message.request):
            return (Pass(Part.REQUEST_HEADERS, self._place(b"", now)),)
        self._state = _State.COLLECT
        if self._request_mode is BodyMode.BUFFERED:
            return (Pass(Part.REQUEST_HEADERS),)
        return ()

    def _awaits_body(self, request: HttpRequest) -> bool:
        carried = self._request_mode in (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED)
        return carried and self._placer.needs_body(request)

    def _request_body(self, message: RequestBody, now: float) -> Sequence[Answer]:
        duplex = self._request_mode is BodyMode.FULL_DUPLEX_STREAMED
        if self._state is not _State.COLLECT:
            if duplex:
                return tuple(_chunks(Part.REQUEST_BODY, message.body, message.end_of_stream))
            return (Pass(Part.REQUEST_BODY),)
        self._size += len(message.body)
        if self._size > self._limit:
            raise Refused(self._placer.too_large(self._limit))
        self._body.append(message.body)
        if not duplex:
            return (Pass(Part.REQUEST_BODY, self._place(b"".join(self._body), now)),)
        return tuple(self._release(now, end=True)) if message.end_of_stream else ()

    def _request_trailers(self, now: float) -> Sequence[Answer]:
        if self._state is _State.COLLECT and self._request_mode is BodyMode.FULL_DUPLEX_STREAMED:
            return tuple(self._release(now, end=False))
        return ()

    def _release(self, now: float, *, end: bool) -> Iterator[Answer]:
        """Answer the held-back headers, then give the body back as it came."""
        body = b"".join(self._body)
        yield Pass(Part.REQUEST_HEADERS, self._place(body, now))
        yield from _chunks(Part.REQUEST_BODY, body, end)

    def _place(self, body: bytes, now: float) -> Mutation:
        if self._request is None:
            raise ValueError("a body came before the headers")
        self._placed = self._placer.place(self._request, body, now)
        self._state = _State.PLACED
        self._body.clear()
        return self._placed.mutation


def _chunks(part: Part, body: bytes, end: bool) -> Iterator[StreamedChunk]:
    """`body` in pieces of at most CHUNK; an empty one only where it carries the end."""
    last = max(0, (len(body) - 1) // CHUNK)
    for i in range(last + 1):
        piece = body[i * CHUNK : (i + 1) * CHUNK] if last else body
        if piece or end:
            yield StreamedChunk(part, piece, end and i == last)
