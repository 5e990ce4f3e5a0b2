"""One stream as its client reads it, which another engine generates again from its beginning.

    transcript.take(payload)        the bytes that may be sent now
    transcript.begin_again()        another engine serves the same request from here on

The other engine gets the request as the client sent it. What its events have that was delivered is
compared and removed (`repeated`), so that the client's stream is in the end the other engine's,
but for ids and times, which are the first stream's. It takes no part in what engines count or
parse, and so serves every field; but the engine has to generate the same again.
"""

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from tandem_contract.api_grammar import GRAMMARS, Meaning
from tandem_contract.request_kinds import RequestKind
from tandem_contract.stream_start import read_event

from ..bodies.parse import UNREADABLE
from .errors import AnswerDiffers, StreamBroken
from .event_shapes import check_chunk, check_typed
from .repeated import Lane, Repeated, choice_parts
from .typed_events import TypedIds, is_aborted, is_ping, typed_parts
from .whole_events import WholeEvents

_EVENT: Final = b"event: "
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
_FAILED: Final = frozenset({"abort", "error"})


class Transcript:
    """What one stream has delivered."""

    def __init__(
        self, kind: RequestKind, choices: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`choices`: how many the answer has; `clock`: the time, in seconds."""
        self.has_usage = False
        """Whether the event was delivered that has only the usage."""
        self.is_done = False
        """Whether the last event was."""
        self.seconds = 0.0
        """How long an engine took from the first to the last event that was delivered: the tokens
        times the time between two."""
        self.delivered = 0
        """How many tokens were; an event counts as one."""
        self.obstacle = ""
        """What in the stream keeps it from being generated again; empty: nothing."""
        self._kind, self._choices, self._clock = kind, choices, clock
        self._is_typed = kind in {RequestKind.MESSAGES, RequestKind.RESPONSES}
        self._lanes: dict[int, Lane] = {}
        self._finished: set[int] = set()
        self._events = WholeEvents()
        self._repeated: Repeated | None = None
        """None: the first engine serves the stream."""
        self._begun: float | None = None
        """When this engine's first event came."""
        self._first_read: float | None = None
        """When the stream's first event came."""
        self._head: dict[str, Any] | None = None
        """Id and time of the stream's first event."""
        self._call_ids: dict[tuple[int, int], str] = {}
        """Index of a choice and of its tool call → the id that the client knows."""
        self._ids = TypedIds()

    @property
    def is_finished(self) -> bool:
        """Whether finish reasons of all choices were delivered."""
        return len(self._finished) == self._choices

    def take(self, payload: bytes) -> bytes:
        """The bytes that may be sent now; `payload` are the newest ones, without chunked coding.

        Raises StreamBroken for an event that ends the stream early; it has those before.
        """
        return self._events.take(payload, self.read)

    def set_text(self, text: str, count: int, ids: list[int], entries: int) -> None:
        """A chat, whose first event was read, has this text since then, of `count` tokens, with
        ids, or without them so many logprobs."""
        self._begun, self.delivered = self._first_read, count
        self._lanes.setdefault(0, Lane()).set_tokens("content", text, ids, entries)

    def begin_again(self) -> None:
        """Another engine begins the same answer."""
        self._events.forget()
        self._repeated = Repeated(self._lanes)
        self._begun = None

    def read(self, event: bytes) -> bytes:
        """Note one event that is delivered; returns what the client gets of it."""
        if self._first_read is None:
            self._first_read = self._clock()
        name, data = _divided(event)
        if not data or (self._is_typed and is_ping(name, data)):
            # A comment or a ping: each engine sends its own.
            return event if self._repeated is None else b""
        meaning = read_event(self._kind, name, data)
        if meaning is Meaning.ERROR:
            raise StreamBroken("the engine reported an error")
        if data == _DONE:
            self._read_done()
            return event
        try:
            check = check_typed if self._is_typed else check_chunk
            check(data)
            chunk = msgspec.json.decode(data)
        except UNREADABLE as err:
            return self._unreadable(event, err)
        is_delivered = self._typed(chunk) if self._is_typed else self._chunk(chunk)
        if meaning is not Meaning.NOTHING:
            self._measure()
        if not is_delivered:
            return b""
        self.delivered += meaning is Meaning.TOKEN
        if self._repeated is None:
            return event
        lines = _EVENT + name + b"\n" if name else b""
        return b"%b%b%b\n\n" % (lines, _DATA, msgspec.json.encode(chunk))

    def _read_done(self) -> None:
        """Note `[DONE]`. An API whose events have types may send it besides its own last event."""
        # Of an engine that generates again, what was delivered has to come first.
        is_whole = self._lanes.keys() == self._finished and self._finished and not self._repeated
        if not is_whole and not (self._is_typed and self.is_done):
            raise StreamBroken("the stream ended without a finish reason")
        self.is_done = True

    def _unreadable(self, event: bytes, err: Exception) -> bytes:
        """An event that is none of the API's: the client may understand it, but nothing is compared
        after it."""
        self.obstacle = f"an event cannot be read: {err}"
        if self._repeated is not None:
            raise StreamBroken(self.obstacle) from err
        return event

    def _measure(self) -> None:
        now = self._clock()
        if self._begun is None:
            self._begun = now
        self.seconds = max(self.seconds, now - self._begun)

    def _chunk(self, chunk: dict[str, Any]) -> bool:
        """Note an event of completions or a chat; returns whether any of it is new."""
        choices = chunk["choices"]
        if not choices:
            if self.has_usage:
                return False
            if self._repeated:
                raise AnswerDiffers
            self.has_usage = True
        if any(choice.get("finish_reason") in _FAILED for choice in choices):
            raise StreamBroken("the engine ended the request")
        if self._repeated and not self._repeated.cut(chunk):
            return False
        for choice in chunk["choices"]:
            index = choice["index"]
            self._name_calls(choice)
            self._lanes.setdefault(index, Lane()).add(choice, choice_parts(choice))
            if choice.get("finish_reason"):
                self._finished.add(index)
        if self._head is None:
            self._head = {name: chunk[name] for name in ("id", "created") if name in chunk}
        elif self._repeated is not None:
            chunk |= self._head
        return True

    def _name_calls(self, choice: dict[str, Any]) -> None:
        """Give the tool calls of a choice the ids that the client knows."""
        for call in (choice.get("delta") or {}).get("tool_calls") or ():
            if "id" in call:
                place = choice["index"], call.get("index")
                call["id"] = self._call_ids.setdefault(place, call["id"])

    def _typed(self, event: dict[str, Any]) -> bool:
        """The same of an API whose events have types."""
        if is_aborted(event):
            raise StreamBroken("the engine ended the request")
        parts = typed_parts(event)
        is_new = not self._repeated or self._repeated.cut_lane(0, event, parts)
        self._ids.note(event)
        if is_new:
            if self._repeated is None:
                self._ids.delivered(event)
            else:
                self._ids.edit(event)
            self._lanes.setdefault(0, Lane()).add(event, parts)
            self.is_done = event["type"].encode() in GRAMMARS[self._kind].last_events
        return is_new


def _divided(event: bytes) -> tuple[bytes, bytes]:
    """Name and data of an event."""
    name = data = b""
    for line in event.splitlines():
        if line.startswith(_EVENT):
            name = line[len(_EVENT) :]
        elif line.startswith(_DATA):
            data = line[len(_DATA) :]
    return name, data
