"""What one stream has delivered: its token ids, and where another engine can go on.

An event is forwarded once it is complete, without the token ids unless the client asked for them.
An event without text, whose ids end within a character, is held back until text follows: the engine
that goes on may divide the text otherwise. `seam` says where that engine begins.

The events are searched as bytes, since each token of every stream passes here. Within a string of
JSON a quote is escaped, so a member's name is never found in a text.

A chat's engine may read tokens itself (reasoning, tool calls). Its deltas then hold something else
than text, and the state of that parser is not known by ids. Such a stream is not continued, but it
can be generated again; then `transcript` notes what it has.
"""

from array import array
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec
from msgspec import Raw

from tandem_contract.request_kinds import RequestKind

from .encoded_ids import read_ids
from .errors import StreamBroken
from .event_shapes import check_chunk
from .plain_events import Form
from .repeated import Lane, Repeated
from .seam import Seam
from .text_events import choice_of, text_of
from .transcript import Transcript
from .whole_events import WholeEvents
from .whole_tokens import WholeTokens

_IDS: Final = b'"token_ids":['
_PROMPT_IDS: Final = b'"prompt_token_ids":['
_FINISH: Final = b'"finish_reason":"'
_TEXT: Final[Mapping[RequestKind, bytes]] = {
    RequestKind.COMPLETIONS: b'"text":"',
    RequestKind.CHAT: b'"delta":{"content":"',
}
"""What precedes the text of an event."""
_ROLE: Final = b'"delta":{"role":"'
"""The first event of a chat, which has no token."""
_NO_DELTA: Final = b'"delta":{}'
_UNASKED: Final = (b'"finish_reason":null', b'"logprobs":null')
"""What an event without a delta has that was sent only because ids were asked for."""
_NO_CHOICE: Final = b'"choices":[]'
_FAILED: Final = (b'"finish_reason":"abort"', b'"finish_reason":"error"')
_DATA: Final = b"data: "
_COMMENT: Final = b":"
_CHAT_LOGPROBS: Final = b'"logprobs":{'
_LOGPROBS: Final = b'"text_offset":['
_ERROR: Final = b'data: {"error"'
_CALLS: Final = b'"tool_calls":['
PARSED: Final = "the engine reads reasoning or tool calls from the answer"
"""Why such a stream is not continued by ids alone."""
DONE: Final = b"data: [DONE]\n\n"
_MOST_UNSETTLED: Final = 64
"""Tokens that are noted together. More: other streams learn later which of them are whole."""


class First(msgspec.Struct, frozen=True, gc=False):
    """What all events of a stream repeat, encoded."""

    id: Raw = Raw(b'""')
    object: Raw = Raw(b'""')
    created: Raw = Raw(b"0")
    model: Raw = Raw(b'""')


class EventEditor(Protocol):
    """Edits events of an engine that continues a stream."""

    def edit(self, event: bytes) -> bytes:
        """Edit an event whose data is a JSON object."""


class Ledger:
    """The record of one stream of completions or a chat."""

    def __init__(
        self,
        kind: RequestKind,
        seam: Seam,
        tokens: WholeTokens,
        *,
        keeps_ids: bool,
        transcript: Transcript | None = None,
    ) -> None:
        """`seam`: a new one; `tokens`: what is known of the model's; `keeps_ids`: the client asked
        for the ids itself; `transcript`: a new one; None: the answer is never generated again."""
        self.prompt_ids: array[int] = array("I")
        self.is_finished = False
        """Whether a finish reason was delivered."""
        self.has_usage = False
        """Whether an event after the last token was, which has the usage."""
        self.is_done = False
        """Whether the last event was."""
        self.first = First()
        """What all events of the stream repeat."""
        self.obstacle = ""
        """What in the stream keeps another engine from going on by ids; empty: nothing."""
        self.transcript = transcript
        """What was delivered, if the stream has an `obstacle`; None: it lacks something."""
        self.call_ids: list[str] = []
        """The ids of the tool calls that were delivered, by their index."""
        self.editor: EventEditor | None = None
        """Edits the events of an engine that continues the stream."""
        self._groups: list[tuple[int, int]] = []
        """Events of several tokens: how many tokens came before, and how many it has."""
        self._has_all = True
        """Whether the engine that serves the stream generates all of it, so that its parser reads
        what the first one's did."""
        self._is_chat = kind is RequestKind.CHAT
        self._text, self._no_text = _TEXT[kind], _TEXT[kind] + b'"'
        self._tokens = tokens
        self._ends_character = True
        """Whether the text that was delivered ends where a token does that ends a character."""
        self._keeps_ids = keeps_ids
        self._repeated = Repeated({})
        self._logprobs = b""
        """The last event with logprobs that was delivered."""
        self._seam = seam
        self._ids: array[int] = array("I")
        self._delivered = 0
        self._unsettled = 0
        """Of `_ids`, the last that are not noted otherwise."""
        self._events = WholeEvents()
        self._form = Form()
        self._may_be_plain = False
        """Whether the next event is delivered at once, if it has the form and whole characters."""
        self._held = b""
        """Events without text, that wait for the next."""
        self._sent_text = bytearray()
        """With a transcript: the text of a chat that was delivered, encoded as in JSON."""
        self._notes_text = self._is_chat and transcript is not None
        self._has_logprobs = False
        """Whether an event has some; with a transcript."""

    @property
    def ids(self) -> "array[int]":
        """Of the answer's tokens, those that were delivered, and those held back."""
        return self._ids

    @property
    def delivered(self) -> int:
        """How many of `ids` were delivered with all of their text."""
        self._settle()
        return self._delivered

    @property
    def seam(self) -> Seam:
        """Where another engine can go on."""
        self._settle()
        return self._seam

    def take(self, payload: bytes) -> bytes:
        """The bytes that may be sent now; `payload` are the newest ones, without chunked coding.

        Raises StreamBroken for an event that ends the stream early; it has those before.
        """
        if not self._may_be_plain:
            return self._take_any(payload)
        sent, start, size = b"", 0, len(payload)
        while start < size:
            token, ids, end = self._form.token_of(payload, start)
            if token < 0:
                break
            self._ids.append(token)
            self._unsettled += 1
            if self._notes_text:
                text = start + len(self._form.before)
                self._sent_text += payload[text : ids - len(self._form.between)]
            event = payload[start:end]
            if not self._keeps_ids:
                event = payload[start : ids - 1] + self._form.rest
            # Mostly the only one.
            sent, start = sent + event if sent else event, end
        if self._unsettled >= _MOST_UNSETTLED:
            self._settle()
        if start == size:
            return sent
        try:
            return sent + self._take_any(payload[start:])
        except StreamBroken as err:
            err.before = sent + err.before
            raise

    def _take_any(self, payload: bytes) -> bytes:
        """The same, of events of any form."""
        self._settle()
        sent = self._events.take(payload, self._event)
        self._may_be_plain = (
            self._form.is_known
            # A token that begins within a character is not known to be whole.
            and self._ends_character
            and self.editor is None
            and self._delivered == len(self._ids)
            and not (self._held or self._events.unread or self.obstacle)
        )
        return sent

    def _settle(self) -> None:
        """Note what the newest tokens say, of plain events: each came alone, with all its text."""
        if self._unsettled:
            for token in self._ids[-self._unsettled :]:
                self._tokens.add(token)
            self._unsettled = 0
            self._delivered = len(self._ids)
            self._seam.move(self._delivered)

    def begin_again(self) -> None:
        """Forget what the failed engine sent beyond what the client has; the next engine begins at
        the seam."""
        self._forget_undelivered()
        self._has_all = self._has_all and self._seam.start == 0
        lane = Lane()
        name = "content" if self._is_chat else "text"
        lane.set_tokens(name, self._seam.text, self._ids[self._seam.start :].tolist())
        self._repeated = Repeated({0: lane})

    def begin_parsed(self) -> None:
        """Forget what the failed engine sent beyond what the client has. The next engine's tokens
        are parsed, and their events read like the first engine's."""
        self._forget_undelivered()
        self.editor = None
        self._transcribed(b"", len(self._ids), PARSED)

    def _forget_undelivered(self) -> None:
        """Forget all that the client does not have: another engine sends it."""
        self._settle()
        self._may_be_plain = False
        self._events.forget()
        self._held = b""
        del self._ids[self._delivered :]
        # An event is delivered as a whole, so only the last groups can end beyond.
        while self._groups and sum(self._groups[-1]) > self._delivered:
            self._groups.pop()

    def groups(self) -> list[int]:
        """How many tokens each event had; call it after `begin_parsed`, so that all of them were
        delivered."""
        made: list[int] = []
        place = 0
        for start, count in self._groups:
            made += [1] * (start - place) + [count]
            place = start + count
        return made + [1] * (len(self._ids) - place)

    @property
    def text_offset(self) -> int:
        """Where logprobs say that the text of the next token begins, in characters. Raises one of
        `whole_events.MALFORMED`."""
        logprobs = choice_of(self._logprobs[len(_DATA) :]).logprobs if self._logprobs else None
        if logprobs is None:
            return 0
        [*_, offset], [*_, token] = logprobs.text_offset, logprobs.tokens
        return offset + len(token)

    def _event(self, event: bytes) -> bytes:
        """Note one event; returns it for the client, or nothing if it is held back."""
        if event.startswith(_COMMENT):
            # Each engine sends its own.
            return event if self.editor is None and not self._repeated else b""
        if self._is_chat and _ROLE in event:
            # Another engine begins the message anew.
            if self.editor is not None:
                self._check_prompt(event)
                return b""
            event = self._first_event(event)
            return event if self.transcript is None else self.transcript.read(event)
        if self._repeated and not event.startswith((_ERROR, DONE)):
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
        before = len(self._ids)
        self._extend(read_ids(event[start:end]))
        count = len(self._ids) - before
        sent = event
        if not self._keeps_ids:
            event = b"%bnull%b" % (event[: start - 1], event[end + 1 :])
        if self._is_chat and not self._take_text(event):
            return self._parsed_event(event, before)
        text = sent.find(self._text)
        if text >= 0 and self._seam.is_last_boundary:
            self._form.learn(sent, text + len(self._text), start, end)
        if not self.prompt_ids:
            event = self._first_event(event)
        if self.editor is not None:
            event = self.editor.edit(event)
        if not self.is_finished and (self._no_text in event or _NO_DELTA in event):
            if self._keeps_ids or not _is_unasked(event):
                self._held += event
            return b""
        self._note_delivered(event, count)
        if self._held:
            event, self._held = self._held + event, b""
        return event

    def _extend(self, several: "array[int]") -> None:
        """Note the ids of one event."""
        if len(several) > 1:
            self._groups.append((len(self._ids), len(several)))
        self._ids += several

    def _note_delivered(self, event: bytes, count: int) -> None:
        """Note an event that is delivered, with so many tokens."""
        ids, began = self._ids, self._ends_character and self._delivered == len(self._ids) - count
        self._delivered = len(ids)
        if count and _LOGPROBS in event:
            self._logprobs = event
        is_boundary = count == 1 or (count > 1 and ids[-1] in self._tokens)
        if count == 1 and began and not self.is_finished:
            self._tokens.add(ids[-1])
        self._ends_character = is_boundary
        if is_boundary and self._seam.is_last_boundary:
            self._seam.move(self._delivered)
        else:
            self._seam.add(self._delivered, text_of(event[len(_DATA) :]), is_boundary=is_boundary)

    def _check_prompt(self, event: bytes) -> None:
        """Raises StreamBroken unless the engine that continues a chat, whose first event this is,
        read the ids it was given: an engine that reads the messages begins the answer anew."""
        _, _, rest = event.partition(_PROMPT_IDS)
        ids = rest.partition(b"]")[0]
        given = self.prompt_ids + self._ids[: self._seam.start]
        if read_ids(ids) != given:
            raise StreamBroken("the engine did not read the ids that continue the chat")

    def _first_event(self, event: bytes) -> bytes:
        """Read the prompt's ids."""
        start = event.find(_PROMPT_IDS)
        if start < 0:
            return event
        first = _first.decode(event[len(_DATA) :])
        # Copies, because a Raw refers to the whole event.
        self.first = First(*(value.copy() for value in msgspec.structs.astuple(first)))
        start += len(_PROMPT_IDS)
        end = event.index(b"]", start)
        self.prompt_ids = read_ids(event[start:end])
        if not self.prompt_ids:
            raise ValueError("a prompt without tokens")
        if self._keeps_ids:
            return event
        return b"%bnull%b" % (event[: start - 1], event[end + 1 :])

    def _other_event(self, event: bytes) -> bytes:
        if event.startswith(_ERROR):
            raise StreamBroken("the engine reported an error")
        if event.startswith(DONE):
            if not self.is_finished:
                raise StreamBroken("the stream ended without a finish reason")
            self.is_done = True
        else:
            if _NO_CHOICE in event:
                self.has_usage = True
                if self.obstacle and self.transcript is not None:
                    event = self.transcript.read(event)
            else:
                event = self._transcribed(event, len(self._ids), "the engine sent no token ids")
            if self.editor is not None:
                event = self.editor.edit(event)
        held, self._held = self._held, b""
        return held + event

    def _take_text(self, event: bytes) -> bool:
        """Note the text of a chat's event, if its delta has nothing else; returns whether it has
        not."""
        if self.obstacle:
            return False
        if self.transcript is not None and _CHAT_LOGPROBS in event:
            self._has_logprobs = True
        # A parser has no text, and no delta, for a token that ends within a character.
        if _NO_DELTA in event:
            return True
        text = event.find(self._text)
        start = text + len(self._text)
        end = event.find(b'"},"', start)
        if text < 0 or end < 0 or event.find(b'","', start, end) >= 0:
            return False
        if self.transcript is not None:
            self._sent_text += event[start:end]
        return True

    def _parsed_event(self, event: bytes, before: int) -> bytes:
        """The event of an engine that reads the answer's tokens itself, without the ids; so many
        tokens came before it."""
        if _CALLS in event:
            self._note_calls(event)
        if self.editor is not None:
            event = self.editor.edit(event)
        if not self._keeps_ids and _is_unasked(event):
            event = b""
        event = self._transcribed(event, before, PARSED)
        self._delivered = len(self._ids)
        held, self._held = self._held, b""
        return held + event

    def _note_calls(self, event: bytes) -> None:
        """Note the ids of tool calls that begin."""
        data = event[len(_DATA) :]
        check_chunk(data)
        [choice] = msgspec.json.decode(data)["choices"]
        for call in choice["delta"].get("tool_calls") or ():
            if call.get("id") and call.get("index") == len(self.call_ids):
                self.call_ids.append(call["id"])

    def _transcribed(self, event: bytes, before: int, obstacle: str) -> bytes:
        """An event with which no other engine can go on by ids; it is noted in `transcript`. So
        many tokens came before it."""
        if not self._has_all and self.editor is not None:
            raise StreamBroken(f"in the middle of the stream {obstacle}")
        if not self.obstacle:
            self.obstacle = obstacle
            if before and not self._is_chat:
                self.transcript = None
            elif before and self.transcript is not None:
                self.transcript.set_text(
                    msgspec.json.decode(b'"%b"' % bytes(self._sent_text)),
                    before,
                    self._ids[:before].tolist() if self._keeps_ids else [],
                    before if self._has_logprobs else 0,
                )
                self._sent_text = bytearray()
        if event and self.transcript is not None:
            return self.transcript.read(event)
        return event


def _is_unasked(event: bytes) -> bool:
    """Whether a chat's event was sent only because ids were asked for."""
    return _NO_DELTA in event and all(mark in event for mark in _UNASKED)


_first: Final = msgspec.json.Decoder(First)
