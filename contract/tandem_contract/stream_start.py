"""Finds the first token of a stream, or the error that comes instead.

    start = StreamStart(kind)
    meaning = start.take(data)      # for each piece, until it is not Meaning.NOTHING

A reasoning text, a refusal, the name of a called tool and its arguments are tokens as well. An
event that this module cannot read counts as a token, so that nothing waits for one.
"""

from typing import Final

import msgspec

from . import openai_errors
from .api_grammar import (
    GRAMMARS,
    Chunk,
    Meaning,
    TypedEvent,
    decode_chunk,
    decode_typed_event,
)
from .request_kinds import RequestKind

_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_DATA: Final = b"data:"
_EVENT: Final = b"event:"
_TOKEN_FIELDS: Final = (
    "content",
    "reasoning",
    "reasoning_content",
    "refusal",
    "tool_calls",
    "function_call",
)
"""What the delta of a chat may add."""
_WITHOUT_TOKENS: Final = frozenset(
    {
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.content_part.added",
        "response.reasoning_part.added",
        "response.reasoning_summary_part.added",
        "message_start",
        "ping",
    }
)


class StreamStart:
    """Reads a stream until its first token, its end or an error. The pieces may have their chunked
    coding: its lines are none of an event's."""

    def __init__(self, kind: RequestKind | None) -> None:
        self._kind = kind
        self._line = b""
        """The newest line, without its end."""
        self._name = b""
        self._data = b""

    def take(self, piece: bytes) -> Meaning:
        """What the events completed by `piece` mean; those after the first that means something
        are not read."""
        unread, start = self._line + piece, 0
        # Line by line, because of a large piece only the first events are needed.
        while (end := unread.find(b"\n", start)) >= 0:
            line, start = unread[start:end], end + 1
            if line.startswith(_DATA):
                data = line[len(_DATA) :].strip()
                self._data = self._data + b"\n" + data if self._data else data
            elif line.startswith(_EVENT):
                self._name = line[len(_EVENT) :].strip()
            # An empty line ends an event; one without data may end a chunk within the event.
            elif self._data and not line.strip():
                meaning = read_event(self._kind, self._name, self._data)
                if meaning is not Meaning.NOTHING:
                    return meaning
                self._name = self._data = b""
        self._line = unread[start:]
        return Meaning.NOTHING

    def error(self) -> tuple[int, str]:
        """HTTP status and message of the error that `take` found."""
        return openai_errors.read_error(self._data)


def read_event(kind: RequestKind | None, name: bytes, data: bytes) -> Meaning:
    """What one event means. `kind`: None for an API without a row. `name`: its `event` field."""
    if name == b"error":
        return Meaning.ERROR
    if data == b"[DONE]":
        return Meaning.END
    try:
        if kind is RequestKind.RESPONSES or kind is RequestKind.MESSAGES:
            return _read_typed_event(kind, decode_typed_event(data))
        return _read_chunk(kind, decode_chunk(data))
    except _UNREADABLE:
        return Meaning.TOKEN


def _read_chunk(kind: RequestKind | None, chunk: Chunk) -> Meaning:
    # Older vLLM writes the members of an error at the top; other APIs may mean anything by them.
    is_older = kind is not None and chunk.message is not None and not chunk.choices
    if chunk.error is not None or is_older:
        return Meaning.ERROR
    meaning = Meaning.NOTHING
    for choice in chunk.choices or ():
        has_token = choice.text or choice.token_ids or choice.logprobs
        if has_token or any(map(choice.delta.get, _TOKEN_FIELDS)):
            return Meaning.TOKEN
        if choice.finish_reason == "error":
            return Meaning.ERROR
        if choice.finish_reason:
            meaning = Meaning.END
    return meaning


def _read_typed_event(kind: RequestKind, event: TypedEvent) -> Meaning:
    # An error in place of an event has no type, which each event has.
    if event.type in ("", "error", "response.failed"):
        return Meaning.ERROR
    if event.type in _WITHOUT_TOKENS:
        return Meaning.NOTHING
    if event.type.encode() in GRAMMARS[kind].last_events or event.type == "message_delta":
        return Meaning.END
    delta = event.delta
    # The name of a called tool is generated, and precedes its arguments.
    if event.type == "content_block_start":
        block = event.content_block
        has_tokens = block is not None and bool(block.name or block.text or block.thinking)
    elif event.type == "response.output_item.added":
        has_tokens = event.item is not None and bool(event.item.name)
    elif event.type == "content_block_delta":
        has_tokens = not isinstance(delta, dict) or any(
            value for key, value in delta.items() if key != "type"
        )
    else:
        has_tokens = delta != ""
    return Meaning.TOKEN if has_tokens else Meaning.NOTHING
