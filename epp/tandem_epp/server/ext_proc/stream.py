"""One HTTP request's ext_proc stream as a pure state machine: messages in, answers out.

    OPEN ──headers need no body───────────► PLACED ──response headers──► (until the stream ends)
      └──headers──► COLLECT ──body ends──► PLACED
                       └──local reply, body too large──► REPLIED

*Body modes*, as the first message of a stream names them:

- FULL_DUPLEX_STREAMED: Envoy waits for nothing. The EPP answers nothing until the body is complete,
  and then sends the headers and the body, in this order.
- BUFFERED: Envoy sends the body only after the headers are answered. So the headers pass unchanged,
  and the pick travels in the answer to the body.
- Any other mode: a pick must not wait for the body, so the EPP picks from the headers alone.

*The end of a request* is the end of its gRPC stream, provided that Envoy sends response trailers
(`response_trailer_mode: SEND`) and no response body. Observed with Envoy 1.40: with trailers
skipped, Envoy ends the stream as soon as the response headers are answered, while tokens still
flow. With trailers sent, it ends the stream when the client has the last byte, or at once when the
client disconnects, before the response or in the middle of it. HTTP/1 responses have no trailers,
so this costs no message. The alternatives cost a message per response chunk (a response body mode)
or a second service whose records arrive in batches (an access log). The transport therefore calls
`close` when the gRPC stream ends, for whatever reason.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, Protocol

from msgspec.structs import replace

from tandem_contract import headers as wire
from tandem_contract.held_bytes import HeldBytes

from ...exchange import HeaderChanges, HttpRequest, NotPlaced, ResponseHeaders
from ...request.answered_model import AnsweredModel
from ..http2.limits import Budget
from ..http2.pieces import Pieces
from .messages import (
    Answer,
    BodyMode,
    Continue,
    Input,
    Part,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    StreamedChunk,
)

_REMOVE_TIMING: Final = HeaderChanges(remove=(wire.TIMING,))
_LENGTH: Final = "content-length"
# Constants, because an enum's members are looked up at each use.
_BUFFERED: Final = BodyMode.BUFFERED
_RESPONSE: Final = Part.RESPONSE_BODY
_DUPLEX: Final = BodyMode.FULL_DUPLEX_STREAMED


class PlacedRequest(Protocol):
    """A request on its pods; counted there until `end`."""

    @property
    def mutation(self) -> HeaderChanges:
        """The changes that Envoy makes to the request's headers."""

    @property
    def response_headers(self) -> tuple[tuple[str, str], ...]:
        """The headers that the client gets in addition, once the response headers passed."""

    @property
    def answered_model(self) -> AnsweredModel | None:
        """Changes the model in the answer; None: the answer stays."""

    def take_body(self) -> bytes | None:
        """The request's body if it was changed, once; None: it stays."""

    def on_response_headers(self, response: ResponseHeaders, now: float) -> None:
        """Response headers passed at `now` (Unix seconds)."""

    def end(self, now: float) -> None:
        """The request has ended at `now` (Unix seconds), in whatever way. Called once."""


class RequestPicker(Protocol):
    """The methods of the picker that this state machine calls."""

    def needs_body(self, request: HttpRequest) -> bool:
        """Whether the pick depends on the request's body."""

    def place(self, request: HttpRequest, body: bytes | None, now: float) -> PlacedRequest:
        """Pick pods, and count the request on them from now on (Unix seconds). `body` is None if it
        comes after the pick, or never to the EPP. Raises NotPlaced."""

    def body_too_large(self, request: HttpRequest | None, limit: int) -> NotPlaced:
        """The reply to a body of more than `limit` bytes."""

    def body_too_slow(self, request: HttpRequest | None) -> NotPlaced:
        """The reply to a request whose body does not come in time."""

    def body_in_pieces(self, request: HttpRequest | None) -> NotPlaced:
        """The reply to a body of too many small parts."""

    def memory_full(self, request: HttpRequest | None) -> NotPlaced:
        """The reply to a body for which there is no memory now."""


_FREE_PARTS: Final = 4096
"""Parts of a body of any size: Envoy sends a message for each that a client sends, so single bytes
would keep a core busy without end. The connection has no such limit: it carries the requests of
all clients of an Envoy, and answers, whose tokens come in small messages."""
_PART_BYTES: Final = 64
"""Bytes of a body that allow a further part."""
_UNSHARED_PARTS: Final = 64
"""Small parts that each body may have. They cost the EPP about what the pick does, so a client of
many such bodies takes at most twice what as many ordinary requests take. Ordinary bodies come in a
few parts of kilobytes."""


def shared_parts() -> Budget:
    """The small parts beyond `_UNSHARED_PARTS` that all bodies of a server may have together: a
    burst of four bodies of single bytes, and then a few hundredths of a core."""
    return Budget(4 * _FREE_PARTS, rate=5000)


_OPEN: Final = 0
"""No message yet. Numbers, because an enum's members are looked up at each use."""
_COLLECT: Final = 1
"""Headers received; body chunks are collected until the body is complete."""
_PLACED: Final = 2
"""The pods are picked and the request counts on them."""
_REPLIED: Final = 3
"""The EPP answered itself: no further message gets an answer."""


class ExtProcStream:
    """One stream's state. Not thread-safe."""

    def __init__(
        self,
        picker: RequestPicker,
        body_limit: int,
        held: HeldBytes | None = None,
        parts: Budget | None = None,
    ) -> None:
        """`body_limit` is in bytes. `held` counts the bytes of all streams, and `parts` is what
        their small parts are taken from."""
        self._picker = picker
        self._body_limit = body_limit
        self._held = held or HeldBytes()
        self._taken = 0
        """Bytes that are counted in `held`."""
        self._state = _OPEN
        self._request_mode = self._response_mode = BodyMode.NONE
        self._has_asked_for_body = False
        self._request: HttpRequest | None = None
        # Set from `_place` to `close`. Owning it means that the request counts on its pods.
        self._placed_request: PlacedRequest | None = None
        self._chunks = Pieces()
        self._parts = 0
        self._shared_parts = parts or shared_parts()
        self.is_in_pieces = False
        """Whether the body came in so many small parts that it was refused."""
        self._whole: bytes | None = None
        """The complete body, once `complete_body` has joined it."""

    @property
    def is_collecting(self) -> bool:
        """Whether the body is awaited."""
        return self._state == _COLLECT

    @property
    def is_timed(self) -> bool:
        """Whether the gateway waits for each answer, and only so long."""
        return self._request_mode is _BUFFERED

    @property
    def is_placed(self) -> bool:
        """Whether the pods are picked. The request no longer depends on this stream then."""
        return self._state == _PLACED

    def receive(self, message: Input, now: float) -> Iterable[Answer]:
        """The answers to `message`, in order; `now` is Unix seconds.

        An Reply is the last answer of a stream: later messages get none.
        """
        if self._state == _REPLIED:
            return ()
        try:
            return self._answers(message, now)
        except NotPlaced as refusal:
            return self._reply(refusal)

    def expire(self) -> Sequence[Answer]:
        """The answers if the body has not come in time."""
        return self._reply(self._picker.body_too_slow(self._request)) if self.is_collecting else ()

    def refuse_body(self) -> Sequence[Answer]:
        """The answers if there is no memory for the rest of a message."""
        return self._reply(self._picker.memory_full(self._request)) if self.is_collecting else ()

    def complete_body(self, message: Input) -> tuple[HttpRequest, bytes] | None:
        """The request and its whole body, if `message` completes it; the request is then placed
        when the message is received."""
        if self._state != _COLLECT or self._request is None:
            return None
        match message:
            case RequestBody(body=body, end_of_stream=end):
                is_last = end or self._request_mode is _BUFFERED
            case RequestTrailers():
                body, is_last = b"", True
            case _:
                return None
        if not is_last or self._chunks.size + len(body) > self._body_limit:
            return None
        self._whole = whole = self._with(body)
        self._held.add(len(whole) - self._taken)
        self._taken = len(whole)
        return self._request, whole

    def prepare(self, preparation: object) -> None:
        """Give the pick what was found out about the body."""
        if self._request is not None:
            self._request = replace(self._request, preparation=preparation)

    def close(self, now: float) -> None:
        """End the request's count on its pods: the stream has ended at `now` (Unix seconds). May be
        called again."""
        # Cleared before the call, so that a second `close` does nothing.
        placed_request, self._placed_request = self._placed_request, None
        self._drop_body()
        if placed_request is not None:
            placed_request.end(now)

    def _reply(self, reply: NotPlaced) -> Sequence[Answer]:
        # Envoy answers the client and ends the stream; what it has sent meanwhile is ignored.
        self._state = _REPLIED
        self._drop_body()
        return (reply.reply,)

    def _drop_body(self) -> None:
        self._chunks.clear()
        self._whole = None
        self._held.give_back(self._taken)
        self._taken = 0

    def _answers(self, message: Input, now: float) -> Iterable[Answer]:
        # By identity, and what comes most often first: `isinstance` takes long to say no for a
        # struct of msgspec.
        if type(message) is ResponseBody:
            mode, asked = self._response_mode, self._has_asked_for_body
            body, end = message.body, message.end_of_stream
            return answer_body(mode, self._answered_model, body, end, has_no_trailers=asked)
        if type(message) is RequestHeaders:
            return self._request_headers(message, now)
        if type(message) is RequestBody:
            return self._request_body(message, now)
        if type(message) is ResponseHeaders:
            return (self._response_headers(message, now),)
        if type(message) is RequestTrailers:
            return chain(self._request_trailers(now), (Continue(Part.REQUEST_TRAILERS),))
        return answer_trailers(self._response_mode, self._answered_model)

    @property
    def _answered_model(self) -> AnsweredModel | None:
        return self._placed_request.answered_model if self._placed_request is not None else None

    def _response_headers(self, message: ResponseHeaders, now: float) -> Answer:
        # The timing header is internal: it must not reach the client.
        mutation = None if message.timing is None else _REMOVE_TIMING
        self._ask_for_body()
        if self._placed_request is not None:
            self._placed_request.on_response_headers(message, now)
            if headers := self._placed_request.response_headers:
                mutation = HeaderChanges(headers, mutation.remove if mutation else ())
            if self._response_mode and self._answered_model is not None:
                # The body may become longer or shorter.
                mutation = mutation or HeaderChanges()
                mutation = HeaderChanges(mutation.set, (*mutation.remove, _LENGTH))
        return Continue(Part.RESPONSE_HEADERS, mutation, asks_for_body=self._has_asked_for_body)

    def _ask_for_body(self) -> None:
        """Ask for the response's body, if the model in it must change and none is sent unasked."""
        # Envoy takes no other modes in a stream with bodies in full duplex.
        can_ask = self._request_mode is _BUFFERED and not self._response_mode
        if can_ask and self._answered_model is not None:
            self._response_mode, self._has_asked_for_body = BodyMode.STREAMED, True

    def _request_headers(self, message: RequestHeaders, now: float) -> Sequence[Answer]:
        if self._state != _OPEN:
            return ()
        # Only this first message carries the modes; they hold for the whole stream.
        self._request_mode, self._response_mode = message.request_mode, message.response_mode
        self._request = message.request
        # No body comes, or none is needed: the request is placed now, and a body passes through
        # later.
        if message.end_of_stream or not self._waits_for_body(message.request):
            body = b"" if message.end_of_stream else None
            mutation, _ = self._place(body, now)
            return (Continue(Part.REQUEST_HEADERS, mutation),)
        self._state = _COLLECT
        if self._request_mode is _BUFFERED:
            # Without this answer Envoy would never send the body.
            return (Continue(Part.REQUEST_HEADERS),)
        return ()

    def _waits_for_body(self, request: HttpRequest) -> bool:
        is_sent = self._request_mode in (_DUPLEX, _BUFFERED)
        return is_sent and self._picker.needs_body(request)

    def _request_body(self, message: RequestBody, now: float) -> Iterable[Answer]:
        is_duplex = self._request_mode is _DUPLEX
        if self._state != _COLLECT:
            # Placed on its headers alone: the body passes through, whatever its size.
            if is_duplex:
                return tuple(split(Part.REQUEST_BODY, message.body, message.end_of_stream))
            return (Continue(Part.REQUEST_BODY),)
        if self._whole is None:
            size = self._chunks.size + len(message.body)
            if size > self._body_limit:
                # Refused while it arrives: the EPP never holds more than the limit and one chunk.
                raise self._picker.body_too_large(self._request, self._body_limit)
            if is_duplex and not message.end_of_stream:
                self._collect(message.body, size, now)
                return ()
        # In BUFFERED mode one message holds the whole body.
        body = self._whole if self._whole is not None else self._with(message.body)
        if not is_duplex:
            mutation, changed = self._place(body, now)
            return (Continue(Part.REQUEST_BODY, mutation, changed),)
        return self._forward(body, now, end=True)

    def _collect(self, body: bytes, size: int, now: float) -> None:
        """Hold a part of a body that has `size` bytes so far, until it is complete: `_body_limit`
        bounds that per stream, and `_held` over all."""
        self._parts += 1
        small = self._parts - size // _PART_BYTES
        if small > _FREE_PARTS or (
            small > _UNSHARED_PARTS and not self._shared_parts.spend(1, now)
        ):
            self.is_in_pieces = True
            raise self._picker.body_in_pieces(self._request)
        if not self._held.take(len(body), of=size):
            raise self._picker.memory_full(self._request)
        self._taken += len(body)
        self._chunks.add(body)

    def _with(self, body: bytes) -> bytes:
        """The collected body with its last part."""
        if not self._chunks:
            return body
        self._chunks.add(body)
        return self._chunks.take()

    def _request_trailers(self, now: float) -> Iterable[Answer]:
        """Trailers end a body whose last chunk did not say so."""
        is_duplex = self._request_mode is _DUPLEX
        if self._state == _COLLECT and is_duplex:
            body = self._whole if self._whole is not None else self._with(b"")
            return self._forward(body, now, end=False)
        if self._state == _COLLECT:
            # BUFFERED: an empty body gets no message of its own. Where it is no request, this
            # refuses it; otherwise the gateway routes it, since its headers were answered.
            self._place(b"", now)
        return ()

    def _forward(self, body: bytes, now: float, *, end: bool) -> Iterable[Answer]:
        """Pick, answer the headers, then return the collected body, which the pick may change."""
        mutation, changed = self._place(body, now)
        headers = Continue(Part.REQUEST_HEADERS, mutation)
        # A large body is cut into chunks only as they are sent.
        chunks = split(Part.REQUEST_BODY, body if changed is None else changed, end)
        return chain((headers,), chunks)

    def _place(self, body: bytes | None, now: float) -> tuple[HeaderChanges, bytes | None]:
        """The changes of the headers, and the body if it is changed."""
        if self._request is None:
            raise ValueError("ext_proc: a request body came before the request headers")
        self._placed_request = self._picker.place(self._request, body, now)
        # Only after `place` has returned: after a NotPlaced nothing counts on any pod.
        self._state = _PLACED
        # The headers are up to 64 KB, and the stream may last for hours.
        self._request = None
        self._drop_body()
        return self._placed_request.mutation, self._placed_request.take_body()


CHUNK: Final = 62 * 1024
"""Bytes of body per answer. Envoy takes at most 64 KiB per message, including its envelope."""


def answer_body(
    mode: BodyMode,
    model: AnsweredModel | None,
    body: bytes,
    end: bool,
    *,
    has_no_trailers: bool = False,
) -> Sequence[Answer]:
    """The answers to a part of a response, which ends if `end`; `model` changes it.
    `has_no_trailers`: a last part will come, so that the end of this one may wait for it: Tandem's
    Envoy, which alone sends bodies that are asked for, drops trailers of HTTP/1."""
    if mode is not _DUPLEX:
        changed = body
        if model is not None:
            # Otherwise trailers may come, whose answer carries no body.
            changed = model.feed(body, is_last=end) if has_no_trailers else model.replace(body)
        return (Continue(_RESPONSE, body=changed if changed != body else None),)
    # In full duplex Envoy forwards only what the EPP sends back.
    if model is not None:
        body = model.feed(body, is_last=end)
    if 0 < len(body) <= CHUNK:
        # Most chunks are a token or a few: this is the path that gateways take for each.
        return (StreamedChunk(_RESPONSE, body, end),)
    return tuple(split(_RESPONSE, body, end))


def answer_trailers(mode: BodyMode, model: AnsweredModel | None) -> Sequence[Answer]:
    """The answers to a response's trailers, before which comes what was held back of its body."""
    is_held = model is not None and mode is _DUPLEX
    rest = model.feed(b"", is_last=True) if is_held and model is not None else b""
    return (*split(_RESPONSE, rest, end=False), Continue(Part.RESPONSE_TRAILERS))


def split(part: Part, body: bytes, end: bool) -> Iterator[StreamedChunk]:
    """`body` in chunks of at most CHUNK bytes; an empty chunk only where it carries the end."""
    last = max(0, (len(body) - 1) // CHUNK)
    for i in range(last + 1):
        chunk = body[i * CHUNK : (i + 1) * CHUNK] if last else body
        if chunk or end:
            yield StreamedChunk(part, chunk, end and i == last)
