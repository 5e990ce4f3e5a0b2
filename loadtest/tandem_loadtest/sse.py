"""Parses server-sent events from chunks of any size (WHATWG HTML, § 9.2.6).

parser = EventParser()
async for data in response.content.iter_any():
    for event in parser.feed(data): ...
"""

from codecs import getincrementaldecoder
from dataclasses import dataclass
from typing import Final

_Decoder: Final = getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One dispatched event; several `data` lines are joined by newlines."""

    data: str
    name: str = "message"


class EventParser:
    """Parses a stream chunk by chunk. An event without its final blank line is not returned."""

    def __init__(self) -> None:
        self._decoder = _Decoder()
        self._line = ""
        self._after_cr = False
        self._begun = False
        self._data: list[str] = []
        self._name = ""

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that `chunk` completes. Raises UnicodeDecodeError when it is not UTF-8."""
        text = self._decoder.decode(chunk)
        if not text:
            return []
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\ufeff")
        # A CRLF split between two chunks is one line end, not two.
        if self._after_cr:
            text = text.removeprefix("\n")
        self._after_cr = text.endswith("\r")
        # The last part has no line end yet: it waits for the next chunk.
        *lines, self._line = (
            (self._line + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        )
        return [event for line in lines if (event := self._take(line))]

    def _take(self, line: str) -> ServerSentEvent | None:
        if not line:
            # A blank line without data dispatches nothing, as after a keep-alive comment.
            event = (
                ServerSentEvent("\n".join(self._data), self._name or "message")
                if self._data
                else None
            )
            self._data, self._name = [], ""
            return event
        field, _, value = line.partition(":")
        # Only one space belongs to the syntax.
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None
