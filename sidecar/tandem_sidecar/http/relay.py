"""Hands one engine answer on to the client: head edited, body bytes as they came.

The head waits for the first body bytes, so both leave in one write and until then another answer
may still take this one's place. Of an event stream only whole events go out, so that an error
event can follow when the engine dies in the middle of one.
"""

from typing import Final

from tandem_contract.openai_errors import error_event

from .framing import LAST_CHUNK, Chunked, Sized, UntilClose, chunk
from .messages import Request, ResponseHead
from .server import Client

_MAX_HELD: Final = 64 * 1024
"""Bytes of an unfinished event held back; a larger one is passed on, and cut if the engine dies."""
_EVENT_END: Final = b"\n\r\n"
"""The last line end of an event, and that of its chunk."""


class EventChunks:
    """Holds back the unfinished last event of a chunked stream.

    Engines end an event, a chunk and mostly a write together, so an event's end is known by the
    line ends of both. Where a payload happens to hold the same bytes, an error event put there
    breaks the chunked coding: seen by every client, as it must be.
    """

    def __init__(self, head: ResponseHead, *, wire: bool) -> None:
        self._active = wire and isinstance(head.framing, Chunked) and head.event_stream
        self._held = b""
        self.between = wire
        """Whether what was passed on ends between two chunks."""

    def take(self, data: bytes) -> bytes:
        """What may be passed on now, `data` being the newest bytes in wire form."""
        if not self._active:
            return data
        if self._held:
            data, self._held = self._held + data, b""
        if data.endswith(_EVENT_END):
            self.between = True
            return data
        end = data.rfind(_EVENT_END) + len(_EVENT_END)
        cut = end if end >= len(_EVENT_END) else 0
        if len(data) - cut > _MAX_HELD:
            self.between = False
            return data
        self._held = data[cut:]
        self.between = self.between or cut > 0
        return data[:cut]


class Relay:
    """One answer on its way to one client."""

    def __init__(self, client: Client, request: Request) -> None:
        self._client = client
        self._request = request
        self._head = b""
        self._stream: ResponseHead | None = None
        self._keep = False
        self.written = False
        """Whether the client has any of it: from then on another answer is out of question."""

    def begin(
        self, head: ResponseHead, drop: frozenset[bytes], extra: bytes, *, close: bool
    ) -> None:
        """Prepare the client's head: `drop` names out, `extra` lines in, `close` after this."""
        close = close or not self._request.keep_alive or self._request.http10
        self._keep = not (close or isinstance(head.framing, UntilClose))
        self._stream = head
        self._head = head.encode(drop, extra, close=not self._keep, plain=self._request.http10)

    def body(self, data: bytes, *, last: bool) -> None:
        """Pass `data` on; `last` ends the response."""
        out, self._head = self._head + data if self._head else data, b""
        if out:
            self.written = True
            self._client.write(out)
        if last:
            self._client.finish(keep=self._keep)

    def cut(self, status: int, message: str, *, between_chunks: bool) -> None:
        """End a started answer early: an error event where one can stand, else a broken end."""
        head = self._stream
        if head is None or not between_chunks or not self._takes_event(head):
            self._client.abort()
            return
        event = error_event(status, message)
        if isinstance(head.framing, Chunked) and not self._request.http10:
            event = chunk(event) + LAST_CHUNK
        self._client.write(event)
        self._client.finish(keep=False)

    @staticmethod
    def _takes_event(head: ResponseHead) -> bool:
        """Whether an event of ours can stand in the body: without a length or compression."""
        coded = head.value(b"content-encoding") not in (b"", b"identity")
        return head.event_stream and not coded and not isinstance(head.framing, Sized)
