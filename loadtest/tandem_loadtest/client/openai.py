"""Answers of completions, chat and generate, which differ only in where a choice has its tokens."""

from typing import Any, Final

import msgspec

from tandem_contract.api_grammar import GRAMMARS
from tandem_contract.request_kinds import RequestKind

from ..calls import Answer, Usage
from .answers import (
    AnswerError,
    Parts,
    ServerError,
    ServerMessage,
    decode,
    message_of,
    server_message,
)
from .sse import StreamEvent, parse_events

(DONE,) = GRAMMARS[RequestKind.COMPLETIONS].last_events
_DONE_EVENT: Final = b"data: %b\n\n" % DONE


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _OpenAIUsage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None

    def counts(self) -> Usage:
        details = self.prompt_tokens_details
        cached = details.cached_tokens if details else None
        return Usage(self.prompt_tokens, self.completion_tokens or 0, cached)


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    function: _Function | None = None

    def text(self) -> str:
        function = self.function
        return (function.name or "") + (function.arguments or "") if function else ""


class _ChatMessage(msgspec.Struct, gc=False):
    """A chat message, or the part of it that a chunk adds."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct, gc=False):
    """A choice of any of these APIs, complete or in a chunk."""

    index: int = 0
    text: str | None = None
    message: _ChatMessage | None = None
    delta: _ChatMessage | None = None
    token_ids: list[int] | None = None
    logprobs: Any = None
    """A token that a parser keeps back may have these and no text."""
    finish_reason: str | None = None


class _Body(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _OpenAIUsage | None = None
    error: Any = None
    message: Any = None


_decoder: Final = msgspec.json.Decoder(_Body)
_array_decoder: Final = msgspec.json.Decoder(list[_Body])


class OpenAIStream:
    """Builds a streamed answer, event by event; the first choice when there are several."""

    __slots__ = ("_parts", "has_ended", "token_events")

    def __init__(self) -> None:
        self._parts = Parts()
        self.has_ended = False
        self.token_events = 0

    def add(self, event: StreamEvent) -> None:
        """See `AnswerStream.add`."""
        data = event.data
        if self.has_ended:
            raise AnswerError("an event after [DONE]")
        if data == DONE:
            self.has_ended = True
        elif event.name == b"error":
            raise ServerError(server_message(data))
        else:
            self._add_body(decode(_decoder, data))

    def add_all(self, data: bytes) -> None:
        """See `AnswerStream.add_all`."""
        bodies = None if self.has_ended else _decode_all(data)
        if bodies is None:
            for event in parse_events(data):
                self.add(event)
            return
        for body in bodies:
            self._add_body(body)
        if data.endswith(_DONE_EVENT):
            self.has_ended = True

    def _add_body(self, body: _Body) -> None:
        if body.error is not None or body.message is not None:
            _refuse_error(body)
        # With continuous usage, each chunk repeats it: the last one counts.
        if body.usage is not None:
            self._parts.usage = body.usage.counts()
        for choice in body.choices or ():
            if choice.index == 0 and _take(choice, self._parts):
                self.token_events += 1

    def so_far(self) -> Answer:
        """The answer as received so far."""
        return self._parts.answer()


def _decode_all(data: bytes) -> list[_Body] | None:
    """The JSON objects of events of one `data` line each, up to a final `[DONE]`.

    None if an event is something else, or wrong. Events come faster than each could be decoded on
    its own, so that those of one read become an array.
    """
    if not data.startswith(b"data: {"):
        return None
    try:
        if data.find(b"\n") == len(data) - 2:
            return [_decoder.decode(data[6:])]
        data = data.removesuffix(_DONE_EVENT)
        events = data.count(b"}\n\ndata: {") + 1
        array = b"[%b]" % data[6:].replace(b"}\n\ndata: {", b"},{")
        # JSON has no bare line feeds in its strings, so a further one is that of another field, or
        # of JSON in several lines.
        if array.find(b"\n") != len(array) - 3:
            return None
        bodies = _array_decoder.decode(array)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return bodies if len(bodies) == events else None


def parse_answer(data: bytes) -> Answer:
    """Parse an answer that is not streamed. Raises AnswerError when it is not an answer."""
    body, parts = decode(_decoder, data), Parts()
    _refuse_error(body)
    choice = next((c for c in body.choices or () if c.index == 0), None)
    if choice is None:
        raise AnswerError("the answer has no choice")
    _take(choice, parts)
    parts.usage = body.usage.counts() if body.usage else None
    return parts.answer()


def _refuse_error(body: _Body) -> None:
    if body.error is not None:
        raise ServerError(message_of(body.error))
    # The form of older vLLM: the fields of the error at the top of the object.
    if body.message is not None and not body.choices:
        raise ServerError(ServerMessage(str(body.message)))


def _take(choice: _Choice, parts: Parts) -> bool:
    """Add a choice to the parts. Returns whether it has tokens."""
    message = choice.delta or choice.message
    # The first chunk of a chat has only the role: it is no token and sets no TTFT.
    text = choice.text if message is None else message.content or message.refusal
    has_tokens = bool(text or choice.logprobs)
    if text:
        parts.texts.append(text)
    if message is not None:
        # vLLM has used both names, some versions both at once.
        reasoning = message.reasoning or message.reasoning_content
        if reasoning:
            parts.reasoning.append(reasoning)
            has_tokens = True
        if message.tool_calls and (calls := "".join(c.text() for c in message.tool_calls)):
            parts.tool_calls.append(calls)
            has_tokens = True
    if choice.token_ids is not None:
        parts.has_ids = True
        parts.token_ids += choice.token_ids
        has_tokens = has_tokens or bool(choice.token_ids)
    if choice.finish_reason:
        parts.finish_reason = choice.finish_reason
    return has_tokens
