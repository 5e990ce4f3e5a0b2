"""What one stream has delivered: its token ids, and where another engine can go on.

An event is forwarded once it is complete, without the token ids unless the client asked for them.
An event without text, whose ids end within a character, is held back until text follows: the engine
that goes on may divide the text otherwise. `seam` says where that engine begins.

The events are searched as bytes, since each token of every stream passes here. Within a string of
JSON a quote is escaped, so a member's name is never found in a text.
"""

from array import array
from typing import Final, Protocol

import msgspec
from msgspec import Raw

from .errors import StreamBroken
from .seam import Repeated, Seam

_EVENT_END: Final = b"\n\n"
_IDS: Final = b'"token_ids":['
_PROMPT_IDS: Final = b'"prompt_token_ids":['
_NO_TEXT: Final = b'"text":""'
_FINISH: Final = b'"finish_reason":"'
_FAILED: Final = (b'"finish_reason":"abort"', b'"finish_reason":"error"')
_DATA: Final = b"data: "
_LOGPROBS: Final = b'"text_offset":['
_ERROR: Final = b'data: {"error"'
_DONE: Final = b"data: [DONE]"
MAX_EVENT: Final = 16 * 1024 * 1024
"""Largest event, in bytes: the first one repeats the prompt's ids."""


class First(msgspec.Struct, frozen=True, gc=False):
    """What all events of a stream repeat, encoded."""

    id: Raw = Raw(b'""')
    created: Raw = Raw(b"0")


class EventEditor(Protocol):
    """Edits events of an engine that continues a stream."""

    def edit(self, event: bytes) -> bytes:
        """Edit an event whose data is a JSON object."""


class Ledger:
    """The record of one stream of completions."""

    def __init__(self, seam: Seam, *, keeps_ids: bool) -> None:
        """`seam`: a new one; `keeps_ids`: the client asked for the ids itself."""
        self.seam = seam
        self.prompt_ids: array[int] = array("I")
        self.ids: array[int] = array("I")
        """Of the answer's tokens, those that were delivered, and those held back."""
        self.delivered = 0
        """How many of `ids` were delivered with all of their text."""
        self.is_finished = False
        """Whether a finish reason was delivered."""
        self.is_done = False
        """Whether the last event was."""
        self.first = First()
        """What all events of the stream repeat."""
        self.editor: EventEditor | None = None
        """Edits the events of an engine that continues the stream."""
        self._keeps_ids = keeps_ids
        self._repeated = Repeated((), "")
        self._logprobs = b""
        """The last event with logprobs that was delivered."""
        self._unread = b""
        self._held = b""
        """Events without text, that wait for the next."""

    def take(self, payload: bytes) -> bytes:
        """The bytes that may be sent now; `payload` are the newest ones, without chunked coding.

        Raises StreamBroken for an event that ends the stream early; it has those before.
        """
        data = self._unread + payload if self._unread else payload
        if b"\r" in data:
            # Both end a line of an event, and JSON has neither within a string.
            data = data.replace(b"\r\n", b"\n")
        end = data.rfind(_EVENT_END) + len(_EVENT_END)
        if end < len(_EVENT_END):
            self._unread = data
            if len(data) > MAX_EVENT:
                raise StreamBroken(f"an event of more than {MAX_EVENT} bytes")
            return b""
        self._unread, data = data[end:], data[:end]
        # Mostly one event.
        if data.find(_EVENT_END) == end - len(_EVENT_END):
            return self._event(data)
        events: list[bytes] = []
        try:
            for event in data.split(_EVENT_END)[:-1]:
                events.append(self._event(event + _EVENT_END))
        except StreamBroken as err:
            err.before = b"".join(events)
            raise
        return b"".join(events)

    def begin_again(self) -> None:
        """Forget what the failed engine sent beyond what the client has; the next engine begins at
        the seam."""
        self._unread = self._held = b""
        del self.ids[self.delivered :]
        self._repeated = Repeated(self.ids[self.seam.start :], self.seam.text)

    @property
    def text_offset(self) -> int:
        """Where logprobs say that the text of the next token begins, in characters."""
        logprobs = _choice(self._logprobs).logprobs if self._logprobs else None
        if logprobs is None:
            return 0
        return logprobs.text_offset[-1] + len(logprobs.tokens[-1])

    def _event(self, event: bytes) -> bytes:
        """Note one event; returns it for the client, or nothing if it is held back."""
        if self._repeated and not event.startswith((_ERROR, _DONE)):
            event = self._repeated.rest(event)
            if not event:
                return event
        if _FINISH in event:
            if any(mark in event for mark in _FAILED):
                raise StreamBroken("the engine ended the request")
            self.is_finished = True
        start = event.find(_IDS)
        if start < 0:
            return self._other_event(event)
        return self._token_event(event, start + len(_IDS))

    def _token_event(self, event: bytes, start: int) -> bytes:
        """An event whose ids are at `start`."""
        end = event.index(b"]", start)
        before = len(self.ids)
        if end > start:
            self.ids.extend(map(int, event[start:end].split(b",")))
        count = len(self.ids) - before
        if not self._keeps_ids:
            event = b"%bnull%b" % (event[: start - 1], event[end + 1 :])
        if not self.prompt_ids:
            event = self._first_event(event)
        if self.editor is not None:
            event = self.editor.edit(event)
        if _NO_TEXT in event and not self.is_finished:
            self._held += event
            return b""
        self._delivered(event, count)
        if self._held:
            event, self._held = self._held + event, b""
        return event

    def _delivered(self, event: bytes, count: int) -> None:
        """Note an event that is delivered, with so many tokens."""
        self.delivered = len(self.ids)
        if count and _LOGPROBS in event:
            self._logprobs = event
        if count == 1 and self.seam.is_last_boundary:
            self.seam.move(self.delivered)
        else:
            self.seam.add(self.delivered, _choice(event).text, is_boundary=count == 1)

    def _first_event(self, event: bytes) -> bytes:
        """Read the prompt's ids."""
        start = event.find(_PROMPT_IDS)
        if start < 0:
            return event
        first = _first.decode(event[len(_DATA) :])
        # Copies, because a Raw refers to the whole event.
        self.first = First(first.id.copy(), first.created.copy())
        start += len(_PROMPT_IDS)
        end = event.index(b"]", start)
        self.prompt_ids.extend(map(int, event[start:end].split(b",")))
        if self._keeps_ids:
            return event
        return b"%bnull%b" % (event[: start - 1], event[end + 1 :])

    def _other_event(self, event: bytes) -> bytes:
        if event.startswith(_ERROR):
            raise StreamBroken("the engine reported an error")
        if event.startswith(_DONE):
            if not self.is_finished:
                raise StreamBroken("the stream ended without a finish reason")
            self.is_done = True
        elif self.editor is not None:
            event = self.editor.edit(event)
        held, self._held = self._held, b""
        return held + event


class _TextOffsets(msgspec.Struct):
    text_offset: list[int]
    tokens: list[str]


class _TextChoice(msgspec.Struct):
    text: str
    logprobs: _TextOffsets | None = None


class _TextEvent(msgspec.Struct):
    choices: list[_TextChoice]


_first: Final = msgspec.json.Decoder(First)
_event: Final = msgspec.json.Decoder(_TextEvent)


def _choice(event: bytes) -> _TextChoice:
    [choice] = _event.decode(event[len(_DATA) :]).choices
    return choice
