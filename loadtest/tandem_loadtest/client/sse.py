"""Parses server-sent events from chunks of any size (WHATWG HTML, § 9.2.6).

    parser = EventParser()
    for event in parser.feed(data): ...

Errors: `EventTooLarge`: an event without end; close the connection.
"""

from typing import Final

import msgspec

MAX_EVENT: Final = 8 * 1024 * 1024
"""Largest event in bytes: far above any answer's, far below the machine's memory."""

_BOM: Final = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """An event exceeds `MAX_EVENT`: the rest of the stream cannot be read."""


class StreamEvent(msgspec.Struct, frozen=True, gc=False):
    """One dispatched event; several `data` lines are joined by newlines."""

    data: bytes
    name: bytes = b"message"


class EventParser:
    """Parses a stream chunk by chunk. An event without its final blank line is not returned."""

    __slots__ = ("_after_cr", "_begun", "_rest", "_size")

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._size = 0
        self._after_cr = False
        self._begun = False

    def feed(self, chunk: bytes) -> list[StreamEvent]:
        """The events that `chunk` completes. Raises EventTooLarge."""
        return parse_events(self.complete(chunk))

    def complete(self, chunk: bytes) -> bytes:
        """The events that `chunk` completes, for `parse_events`; lines end with a line feed.

        Raises EventTooLarge.
        """
        if self._after_cr or b"\r" in chunk:
            chunk = self._with_line_feeds(chunk)
        if self._rest or not self._begun:
            joined = self._with_rest(chunk)
            if joined is None:
                return b""
            chunk = joined
        # The usual case: events are written as a whole.
        if chunk.endswith(b"\n\n"):
            self._rest = []
            self._size = 0
            return chunk
        blank = chunk.rfind(b"\n\n")
        end = blank + 2 if blank >= 0 else 0
        self._rest = [chunk[end:]] if chunk else []
        self._size = len(chunk) - end
        return chunk[:end]

    def _with_line_feeds(self, chunk: bytes) -> bytes:
        # A CRLF split between two chunks is one line end, not two.
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _with_rest(self, chunk: bytes) -> bytes | None:
        """The rest of earlier chunks with this one; None if that cannot complete an event."""
        self._size += len(chunk)
        self._rest.append(chunk)
        if self._size > MAX_EVENT and b"\n\n" not in chunk:
            raise EventTooLarge(f"an event of the stream exceeds {MAX_EVENT >> 20} MiB")
        # No line ends here, so no event either: joining now would copy a large event many times.
        if self._begun and b"\n" not in chunk:
            return None
        data = b"".join(self._rest)
        if not self._begun:
            if len(data) < len(_BOM) and _BOM.startswith(data):
                return None
            self._begun = True
            data = data.removeprefix(_BOM)
        return data


def parse_events(data: bytes) -> list[StreamEvent]:
    """The events of whole blocks of lines, each ended by a blank line."""
    events = []
    for block in data.split(b"\n\n"):
        # Nearly all events are a single line, which needs no search for fields.
        if block.startswith(b"data: ") and b"\n" not in block:
            events.append(StreamEvent(block[6:]))
        elif block and (event := _parse(block)):
            events.append(event)
    return events


def _parse(block: bytes) -> StreamEvent | None:
    """The event of the lines between two blank ones; None without data, as after a comment."""
    data: list[bytes] = []
    name = b""
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        # Only one space belongs to the syntax.
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return StreamEvent(b"\n".join(data), name or b"message") if data else None
