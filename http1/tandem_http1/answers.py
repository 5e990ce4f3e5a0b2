"""Receivers of an engine's answer: `Relay` sends it to a client, `Collector` gathers it.

`Relay` edits the head and sends the body bytes as they came. The head waits for the first body
bytes, so that both leave in one write; until then another answer, or an error, can still be sent
instead. `EventChunks` releases only whole events of a stream, so that an error event can follow
if the engine dies in the middle of one. `EditedAnswer` changes the payload of an answer and sends
it in new chunks.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Final, Protocol

import msgspec

from tandem_contract.api_grammar import error_event
from tandem_contract.request_kinds import api_of_path

from .client import ClientConnection
from .connection import Failure
from .framing import LAST_CHUNK, Chunked, Sized, UntilClose, chunk
from .messages import Request, ResponseHead

MAX_ANSWER: Final = 64 * 1024 * 1024
"""Largest answer, in bytes, that is collected: a prefill's may list the prompt's token ids."""
_MAX_HELD: Final = 64 * 1024
"""Largest unfinished event, in bytes, that is held back. A larger one is sent in parts, and the
connection is reset if the engine dies before its end."""
_EVENT_END: Final = b"\n\r\n"
"""The last line end of an event, followed by the line end of its chunk."""
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})


class CutPoint(Enum):
    """Where the bytes end that were sent of an answer which has to be cut."""

    WITHIN_EVENT = auto()
    """Nothing of the sidecar can follow."""
    BETWEEN_EVENTS = auto()
    """By their line ends between two events, but perhaps within a chunk."""
    BETWEEN_CHUNKS = auto()
    """Between two events and, for certain, between two chunks."""


class EventChunks:
    """Holds back the unfinished last event of a chunked event stream.

    Engines end an event, a chunk and mostly a write together, so the line ends of both mark the end
    of an event. A payload may happen to contain the same bytes; `cut_point` finds that out.
    """

    def __init__(self, head: ResponseHead, *, wire: bool) -> None:
        """`wire`: the body is relayed in wire form, chunked coding included."""
        self._chunked = head.framing if isinstance(head.framing, Chunked) else None
        self._active = wire and self._chunked is not None and head.event_stream
        self._held = b""
        self.between_events = wire
        """Whether the released bytes end, by their line ends, between two events."""

    def take(self, data: bytes) -> bytes:
        """Return the bytes that may be sent now; `data` are the newest ones in wire form."""
        if not self._active:
            return data
        if self._held:
            data, self._held = self._held + data, b""
        if data.endswith(_EVENT_END):
            self.between_events = True
            return data
        end = data.rfind(_EVENT_END) + len(_EVENT_END)
        cut = end if end >= len(_EVENT_END) else 0
        if len(data) - cut > _MAX_HELD:
            self.between_events = False
            return data
        self._held = data[cut:]
        # With `cut` 0 nothing is released, so the released bytes end where they did before.
        self.between_events = self.between_events or cut > 0
        return data[:cut]

    def cut_point(self) -> CutPoint:
        """Where the released bytes end; call it once, when nothing more comes."""
        if not self.between_events:
            return CutPoint.WITHIN_EVENT
        if self._chunked is None or self._chunked.ends_between_chunks(self._held):
            return CutPoint.BETWEEN_CHUNKS
        return CutPoint.BETWEEN_EVENTS


class PayloadEditor(Protocol):
    """Changes the payload of an answer as it arrives, its chunked coding removed."""

    between_events: bool
    """Whether the returned bytes end between two events of a stream."""

    def take(self, payload: bytes, *, last: bool) -> bytes:
        """Return the bytes that may be sent now; the others are held back until later calls."""


class EditedAnswer:
    """An answer whose payload an editor changes.

    The edited payload may have another length, so it is sent in chunks.
    """

    def __init__(self, head: ResponseHead, editor: PayloadEditor | None, *, chunked: bool) -> None:
        """`editor`: None leaves the payload as it is; not `chunked`: for HTTP/1.0 clients."""
        self.head = as_chunked(head)
        """The engine's head, changed to announce a chunked body."""
        self._editor = editor
        self._chunked = chunked

    def cut_point(self) -> CutPoint:
        """Where the bytes end that `take` returned; the sidecar itself ends their chunks."""
        if not self._chunked or self._editor is None or not self._editor.between_events:
            return CutPoint.WITHIN_EVENT
        return CutPoint.BETWEEN_CHUNKS

    def take(self, payload: bytes, *, last: bool) -> bytes:
        """Return the bytes to send now: none while the editor holds them back."""
        if self._editor is not None:
            payload = self._editor.take(payload, last=last)
        if not self._chunked:
            return payload
        out = chunk(payload) if payload else b""
        return out + LAST_CHUNK if last else out


def as_chunked(head: ResponseHead) -> ResponseHead:
    lines = [b"%b: %b" % pair for pair in head.headers if pair[0] not in _FRAMING]
    block = b"\r\n".join([head.status_line, *lines, b"transfer-encoding: chunked"])
    return ResponseHead(block, b"POST")


class Relay:
    """Sends one answer to one client."""

    def __init__(self, client: ClientConnection, request: Request) -> None:
        self._client = client
        self._request = request
        self._head = b""
        self._stream: ResponseHead | None = None
        self._keep = False
        self.written = False
        """Whether the client has any of the answer: from then on no other can be sent."""

    def begin(
        self, head: ResponseHead, drop: frozenset[bytes], extra: bytes, *, close: bool
    ) -> None:
        """Prepare the client's head: without the names in `drop`, with `extra` header lines.

        `close`: close the connection after this answer.
        """
        close = close or not self._request.keep_alive or self._request.http10
        # A body without a length ends with the connection for the client, too.
        self._keep = not (close or isinstance(head.framing, UntilClose))
        self._stream = head
        self._head = head.encode(drop, extra, close=not self._keep, plain=self._request.http10)

    def body(self, data: bytes, *, last: bool) -> None:
        """Send `data` to the client; `last` ends the response."""
        out, self._head = self._head + data if self._head else data, b""
        if out:
            self.written = True
            self._client.write(out)
        if last:
            self._client.finish(keep=self._keep)

    def cut(self, status: int, message: str, at: CutPoint) -> None:
        """End a started answer early, in a way that every client notices.

        An event stream gets an error event as its last. After it the chunked body is complete, and
        the connection stays open as the head promised: a client or Envoy may send its next request
        at once, which would be lost if the connection were closed here. If the event may stand
        within a chunk, the client could take it for payload and wait for the rest, so the body is
        left incomplete and the connection closed, which the client notices in both cases. An answer
        that cannot contain an event would be truncated silently, so the connection is reset.
        """
        head = self._stream
        if head is None or at is CutPoint.WITHIN_EVENT or not self._can_contain_event(head):
            self._client.abort()
            return
        kind = api_of_path(self._request.target.decode("latin-1"))
        event = error_event(kind, status, message)
        # The head waits for the first bytes, which may have been held back until now.
        lines, self._head = self._head, b""
        complete = at is CutPoint.BETWEEN_CHUNKS
        if isinstance(head.framing, Chunked) and not self._request.http10:
            event = chunk(event) + (LAST_CHUNK if complete else b"")
        self._client.write(lines + event)
        self._client.finish(keep=self._keep and complete)

    @staticmethod
    def _can_contain_event(head: ResponseHead) -> bool:
        """Whether the sidecar can add an event: the body has no length and no compression."""
        coded = head.value(b"content-encoding") not in (b"", b"identity")
        return head.event_stream and not coded and not isinstance(head.framing, Sized)


class Answer(msgspec.Struct, frozen=True):
    """A complete answer, its chunked coding removed."""

    head: ResponseHead
    body: bytes


class NoAnswer(msgspec.Struct, frozen=True, gc=False):
    """Why no complete answer came."""

    failure: Failure
    detail: str


class Collector:
    """Receiver for requests of the sidecar's own: calls `done` once, with Answer or NoAnswer."""

    payload_only = True

    def __init__(
        self, done: Callable[[Answer | NoAnswer], None], *, limit: int = MAX_ANSWER
    ) -> None:
        """`limit`: largest body, in bytes."""
        self._limit = limit
        self._done: Callable[[Answer | NoAnswer], None] | None = done
        self._head: ResponseHead | None = None
        self._parts: list[bytes] = []
        self._size = 0

    def head(self, head: ResponseHead) -> None:
        self._head = head

    def body(self, data: bytes, last: bool) -> None:
        self._size += len(data)
        if self._size > self._limit:
            self._parts.clear()
            self._report(NoAnswer(Failure.MALFORMED, f"the answer exceeds {self._limit} bytes"))
            return
        self._parts.append(data)
        if last and self._head is not None:
            self._report(Answer(self._head, b"".join(self._parts)))

    def failed(self, failure: Failure, detail: str) -> None:
        self._report(NoAnswer(failure, detail))

    def _report(self, answer: Answer | NoAnswer) -> None:
        # An answer above the limit goes on arriving after it was reported.
        done, self._done = self._done, None
        if done is not None:
            done(answer)
