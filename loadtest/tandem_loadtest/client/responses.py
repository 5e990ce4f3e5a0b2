"""Answers of the responses API."""

from typing import Any, Final

import msgspec

from tandem_contract.api_grammar import GRAMMARS, Meaning
from tandem_contract.request_kinds import RequestKind
from tandem_contract.stream_start import read_event

from ..calls import Answer, Usage
from .answers import AnswerError, Parts, ServerError, decode, message_of, server_message
from .sse import StreamEvent, parse_events

_LAST: Final = frozenset(map(bytes.decode, GRAMMARS[RequestKind.RESPONSES].last_events))
_FAILED: Final = frozenset({"failed", "cancelled"})


class _InputDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _ResponseUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    input_tokens_details: _InputDetails | None = None


class _ResponseContent(msgspec.Struct):
    text: str | None = None
    refusal: str | None = None


class _ResponseItem(msgspec.Struct):
    type: str = ""
    name: str | None = None
    arguments: str | None = None
    content: list[_ResponseContent] | None = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    error: Any = None
    incomplete_details: _Incomplete | None = None
    output: list[_ResponseItem] | None = None
    usage: _ResponseUsage | None = None


class _ResponseEvent(msgspec.Struct):
    type: str = ""
    delta: Any = None
    item: _ResponseItem | None = None
    response: _Response | None = None


_event: Final = msgspec.json.Decoder(_ResponseEvent)
_response: Final = msgspec.json.Decoder(_Response)


class ResponsesStream:
    """Builds a streamed answer, event by event."""

    __slots__ = ("_parts", "has_ended", "token_events")

    def __init__(self) -> None:
        self._parts = Parts()
        self.has_ended = False
        self.token_events = 0

    def add(self, event: StreamEvent) -> None:
        """See `AnswerStream.add`."""
        # The stream may end like those of the other APIs, too.
        if event.data == b"[DONE]":
            return
        if self.has_ended:
            raise AnswerError("an event after the last one of the response")
        body = decode(_event, event.data)
        # The name of a tool call is generated as well, and precedes its arguments.
        if body.type == "response.output_item.added" and body.item and body.item.name:
            self._parts.tool_calls.append(body.item.name)
            self.token_events += 1
        elif body.type.endswith(".delta") and isinstance(body.delta, str) and body.delta:
            self._texts(body.type).append(body.delta)
            self.token_events += 1
        elif body.response is not None:
            _check(body.response)
            if body.type == "response.failed":
                raise ServerError(server_message(event.data))
            if body.type in _LAST:
                self.has_ended = True
                _take_end(body.response, self._parts)
        elif read_event(RequestKind.RESPONSES, event.name, event.data) is Meaning.ERROR:
            raise ServerError(server_message(event.data))

    def _texts(self, delta: str) -> list[str]:
        """Where the text of a type of delta belongs."""
        if delta in ("response.output_text.delta", "response.refusal.delta"):
            return self._parts.texts
        if delta.startswith("response.reasoning"):
            return self._parts.reasoning
        return self._parts.tool_calls

    def add_all(self, data: bytes) -> None:
        """See `AnswerStream.add_all`."""
        for event in parse_events(data):
            self.add(event)

    def so_far(self) -> Answer:
        """The answer as received so far."""
        return self._parts.answer()


def parse_answer(data: bytes) -> Answer:
    """Parse an answer that is not streamed. Raises AnswerError when it is not an answer."""
    response, parts = decode(_response, data), Parts()
    _check(response)
    if response.output is None:
        raise AnswerError("the answer has no output")
    for item in response.output:
        texts = parts.reasoning if item.type == "reasoning" else parts.texts
        texts += [part.text or part.refusal or "" for part in item.content or ()]
        parts.tool_calls += [item.name or "", item.arguments or ""]
    _take_end(response, parts)
    return parts.answer()


def _check(response: _Response) -> None:
    if response.error is not None:
        raise ServerError(message_of(response.error))
    if response.status in _FAILED:
        raise AnswerError(f"the response has status {response.status!r}")


def _take_end(response: _Response, parts: Parts) -> None:
    if response.status == "completed":
        parts.finish_reason = "completed"
    elif response.status == "incomplete":
        details = response.incomplete_details
        parts.finish_reason = (details and details.reason) or "incomplete"
    usage = response.usage
    if usage is not None:
        details_of_input = usage.input_tokens_details
        cached = details_of_input.cached_tokens if details_of_input else None
        parts.usage = Usage(usage.input_tokens, usage.output_tokens, cached)
