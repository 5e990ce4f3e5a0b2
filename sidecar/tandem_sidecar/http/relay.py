"""Hands one engine answer on to the client: head edited, body bytes as they came.

The head waits for the first body bytes, so both leave in one write and until then another answer
may still take this one's place. Of an event stream only whole chunks go out, so that an error
event can follow when the engine dies in the middle of one.
"""

from typing import Final

from tandem_contract.openai_errors import error_event

from .framing import LAST_CHUNK, Chunked, Sized, UntilClose, chunk
from .messages import Request, ResponseHead
from .server import Client

_MAX_HELD: Final = 64 * 1024
"""Bytes of an unfinished chunk held back; a larger one is passed on, and cut if the engine dies."""


class EventChunks:
    """Holds back the unfinished last chunk of an event stream."""

    def __init__(self, head: ResponseHead, *, wire: bool) -> None:
        self._framing = head.framing
        self._active = wire and head.event_stream and isinstance(head.framing, Chunked)
        self._held = b""
        self.between = wire
        """Whether what was passed on ends between two chunks."""

    def take(self, data: bytes) -> bytes:
        """What may be passed on now, `data` being the newest bytes in wire form."""
        if not self._active:
            return data
        whole = self._framing.whole
        out, self._held = self._held + data[:whole], data[whole:]
        if not whole:
            out, self._held = b"", out + self._held
        if len(self._held) > _MAX_HELD:
            out, self._held = out + self._held, b""
            self.between = False
        elif whole:
            self.between = True
        return out


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
        if head is None or not head.event_stream or not between_chunks or self._sized(head):
            self._client.abort()
            return
        event = error_event(status, message)
        if isinstance(head.framing, Chunked) and not self._request.http10:
            event = chunk(event) + LAST_CHUNK
        self._client.write(event)
        self._client.finish(keep=False)

    @staticmethod
    def _sized(head: ResponseHead) -> bool:
        return isinstance(head.framing, Sized)
