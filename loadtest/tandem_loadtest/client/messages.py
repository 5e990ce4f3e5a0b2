"""Answers of the messages API (Anthropic's, as vLLM serves it)."""

from typing import Any, Final

import msgspec

from tandem_contract.api_grammar import GRAMMARS, Meaning
from tandem_contract.request_kinds import RequestKind
from tandem_contract.stream_start import read_event

from ..calls import Answer, Usage
from .answers import AnswerError, Parts, ServerError, decode, message_of, server_message
from .sse import StreamEvent, parse_events

_NO_INPUT: Final = msgspec.Raw(b"")
_LAST: Final = frozenset(map(bytes.decode, GRAMMARS[RequestKind.MESSAGES].last_events))


class _MessageUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _Block(msgspec.Struct):
    """A content block, or the part of it that an event adds."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    name: str | None = None
    input: msgspec.Raw = _NO_INPUT
    partial_json: str | None = None
    stop_reason: str | None = None


class _WholeMessage(msgspec.Struct):
    content: list[_Block] | None = None
    stop_reason: str | None = None
    usage: _MessageUsage | None = None
    error: Any = None


class _MessageEvent(msgspec.Struct):
    type: str = ""
    message: _WholeMessage | None = None
    content_block: _Block | None = None
    delta: _Block | None = None
    usage: _MessageUsage | None = None


_event: Final = msgspec.json.Decoder(_MessageEvent)
_message: Final = msgspec.json.Decoder(_WholeMessage)


class MessagesStream:
    """Builds a streamed answer, event by event."""

    __slots__ = ("_parts", "_usage", "has_ended", "token_events")

    def __init__(self) -> None:
        self._parts = Parts()
        self._usage = _MessageUsage()
        self.has_ended = False
        self.token_events = 0

    def add(self, event: StreamEvent) -> None:
        """See `AnswerStream.add`."""
        # vLLM ends the stream like those of the other APIs, too.
        if event.data == b"[DONE]":
            return
        if self.has_ended:
            raise AnswerError("an event after message_stop")
        # Its members may be other ones than those of the API's events.
        if event.name == b"error":
            raise ServerError(server_message(event.data))
        body = decode(_event, event.data)
        match body.type:
            case "content_block_delta" if body.delta:
                self.token_events += _take_block(body.delta, self._parts)
            # The name of a tool call is generated as well, and precedes its arguments.
            case "content_block_start" if body.content_block:
                block = body.content_block
                start = _Block(text=block.text, name=block.name)
                self.token_events += _take_block(start, self._parts)
            case "message_start" if body.message:
                self._merge(body.message.usage)
            case "message_delta":
                self._parts.finish_reason = (body.delta and body.delta.stop_reason) or None
                self._merge(body.usage)
                # Before, the counts are those of the prompt alone.
                self._parts.usage = _counts(self._usage) if body.usage else None
            case last if last in _LAST:
                self.has_ended = True
            case _ if read_event(RequestKind.MESSAGES, event.name, event.data) is Meaning.ERROR:
                raise ServerError(server_message(event.data))

    def add_all(self, data: bytes) -> None:
        """See `AnswerStream.add_all`."""
        for event in parse_events(data):
            self.add(event)

    def so_far(self) -> Answer:
        """The answer as received so far."""
        return self._parts.answer()

    def _merge(self, usage: _MessageUsage | None) -> None:
        """Keep the latest value of each count; an event has only some of them."""
        for name in _MessageUsage.__struct_fields__ if usage else ():
            if (value := getattr(usage, name)) is not None:
                setattr(self._usage, name, value)


def parse_answer(data: bytes) -> Answer:
    """Parse an answer that is not streamed. Raises AnswerError when it is not an answer."""
    message, parts = decode(_message, data), Parts()
    if message.error is not None:
        raise ServerError(message_of(message.error))
    if message.content is None:
        raise AnswerError("the answer has no content")
    for block in message.content:
        _take_block(block, parts)
    parts.finish_reason = message.stop_reason
    parts.usage = _counts(message.usage) if message.usage else None
    return parts.answer()


def _take_block(block: _Block, parts: Parts) -> bool:
    """Add a block, or its part, to the parts. Returns whether it has tokens."""
    # Whole blocks have the input, streamed ones its parts.
    tool_call = (block.name or "") + bytes(block.input).decode() + (block.partial_json or "")
    if block.text:
        parts.texts.append(block.text)
    if block.thinking:
        parts.reasoning.append(block.thinking)
    if tool_call:
        parts.tool_calls.append(tool_call)
    return bool(block.text or block.thinking or tool_call)


def _counts(usage: _MessageUsage) -> Usage | None:
    """The counts; None without one of prompt and answer."""
    if usage.input_tokens is None or usage.output_tokens is None:
        return None
    read = usage.cache_read_input_tokens
    # This API counts tokens from the cache, and those written to it, beside the input tokens.
    cached = (read or 0) + (usage.cache_creation_input_tokens or 0)
    return Usage(usage.input_tokens + cached, usage.output_tokens, read)
