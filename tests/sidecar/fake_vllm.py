"""Scripts for `FakeDecode`, which then serves all five generating APIs as vLLM 0.32 does.

For the APIs that the reference engine lacks, and for failures between two given events. The events
and their order are those of vLLM's `serving.py` in `entrypoints/openai/completion`,
`chat_completion` and `responses`, `entrypoints/anthropic`, and
`entrypoints/scale_out/token_in_token_out`.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from tandem_contract import transfer_params
from tandem_contract.request_kinds import RequestKind, kind_of_path

from .peers import Script, Turn

WORDS: Final = ("one", " two", " three")
"""The text of every answer, a token each."""
ARGUMENTS: Final = ('{"far"', ": ", "true}")
"""The same of a called tool."""
TOOL: Final = "look"
TOKEN_IDS: Final = (11, 12, 13)
MODEL: Final = "tiny"
DONE: Final = "data: [DONE]\n\n"
_ENGINE_ERROR: Final[Mapping[str, Any]] = {
    "message": "Internal server error",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}
_USAGE: Final = {"prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43}
_ITEMS_USAGE: Final = {
    "input_tokens": 40,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 43,
}
_MESSAGE_USAGE: Final = {"input_tokens": 40, "output_tokens": 3}


class Content(StrEnum):
    """What an answer consists of."""

    TEXT = "text"
    CHOICES = "two choices"
    CALL = "tool call"
    REASONING = "reasoning"


@dataclass(frozen=True)
class EventStream:
    """The events of a streamed answer, as text."""

    preamble: tuple[str, ...]
    """Before any token."""
    tokens: tuple[str, ...]
    """One for each of `WORDS`."""
    end: tuple[str, ...]
    error: tuple[str, ...]
    """What vLLM writes in place of the rest when the engine fails the request. Empty: it writes
    nothing, and closes the connection within the body."""

    @property
    def whole(self) -> tuple[str, ...]:
        return self.preamble + self.tokens + self.end


def _data(value: object, name: str = "") -> str:
    event = f"event: {name}\n" if name else ""
    return f"{event}data: {json.dumps(value)}\n\n"


def _completions_event(choices: list[dict[str, Any]], **more: object) -> str:
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
    return _data({**head, "choices": choices, **more})


def _completions(content: Content) -> EventStream:
    def token(text: str, finish: str | None) -> str:
        choice = {"text": text, "logprobs": None, "finish_reason": finish}
        more = {**choice, "stop_reason": None, "prompt_token_ids": None}
        return "".join(_completions_event([{"index": i, **more}]) for i in _choices(content))

    usage = _completions_event([], usage=_USAGE)
    tokens = tuple(map(token, WORDS, _FINISHES))
    return EventStream((), tokens, (usage, DONE), _openai_error())


def _choices(content: Content) -> range:
    return range(2 if content is Content.CHOICES else 1)


def _chat_deltas(content: Content) -> list[dict[str, Any]]:
    """One for each token."""
    if content is Content.REASONING:
        return [{"reasoning": word} for word in WORDS]
    if content is not Content.CALL:
        return [{"content": word} for word in WORDS]
    named = {"id": "call_1", "type": "function"}
    first, *rest = ({"index": 0, "function": {"arguments": part}} for part in ARGUMENTS)
    first = {**first, **named, "function": {"name": TOOL, "arguments": ARGUMENTS[0]}}
    return [{"tool_calls": [call]} for call in (first, *rest)]


def _chat(content: Content) -> EventStream:
    def chunk(choices: list[dict[str, Any]], **more: object) -> str:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1}
        return _data({**head, "model": MODEL, "choices": choices, **more})

    def all_choices(delta: dict[str, Any], finish: str | None = None) -> str:
        choice = {"delta": delta, "logprobs": None, "finish_reason": finish}
        return "".join(chunk([{"index": i, **choice}]) for i in _choices(content))

    finishes = (None, None, "tool_calls" if content is Content.CALL else "length")
    tokens = map(all_choices, _chat_deltas(content), finishes)
    role = all_choices({"role": "assistant", "content": ""})
    return EventStream((role,), tuple(tokens), (chunk([], usage=_USAGE), DONE), _openai_error())


def _generate(_: Content) -> EventStream:
    def chunk(choices: list[dict[str, Any]], usage: object = None) -> str:
        head = {"request_id": "generate-1", "usage": usage, "output_mode": "tokens"}
        return _data({**head, "choices": choices})

    tokens = tuple(
        chunk([
            {"index": 0, "finish_reason": finish, "stop_reason": None, "token_ids": [token],
             "routed_experts": None, "sampling_mask": None, "logprobs": None}
        ])
        for token, finish in zip(TOKEN_IDS, _FINISHES, strict=True)
    )  # fmt: skip
    return EventStream((), tokens, (chunk([], _USAGE), DONE), _openai_error())


_RESPONSES_EVENTS: Final[Mapping[Content, tuple[str, str, str]]] = {
    Content.TEXT: ("response.output_text", "text", "output_text"),
    Content.REASONING: ("response.reasoning_text", "text", "reasoning_text"),
    Content.CALL: ("response.function_call_arguments", "arguments", ""),
}
"""The name of the events with a token, the member that has them all, and the type of their part."""


def _responses(content: Content) -> EventStream:
    numbers = iter(range(100))

    def event(name: str, /, **members: object) -> str:
        return _data({"type": name, "sequence_number": next(numbers), **members}, name)

    name, member, part_type = _RESPONSES_EVENTS[content]
    begun, done = {**_RESPONSE, "status": "in_progress"}, whole(RequestKind.RESPONSES, content)
    (item,) = done["output"]
    place: dict[str, Any] = {"item_id": item["id"], "output_index": 0}
    empty = {"arguments": ""} if content is Content.CALL else {"content": []}
    preamble = (
        event("response.created", response=begun),
        event("response.in_progress", response=begun),
    )
    added = {**item, "status": "in_progress", **empty}
    opened = event("response.output_item.added", output_index=0, item=added)
    if part_type:
        place["content_index"] = 0
        part = {"type": part_type, "text": "", "annotations": [], "logprobs": []}
        opened += event("response.content_part.added", **place, part=part)
    words = ARGUMENTS if content is Content.CALL else WORDS
    first, *rest = (event(f"{name}.delta", **place, delta=word, logprobs=[]) for word in words)
    ended = event(f"{name}.done", **place, **{member: "".join(words)}, name=TOOL, logprobs=[])
    if part_type:
        ended += event("response.content_part.done", **place, part=item["content"][0])
    end = (
        ended,
        event("response.output_item.done", output_index=0, item=item),
        event("response.completed", response=done),
    )
    # vLLM opens the item only when the first token is there. An error it cannot write: it is none
    # of the events that it validates against.
    return EventStream(preamble, (opened + first, *rest), end, ())


_BLOCKS: Final[Mapping[Content, tuple[dict[str, Any], str, str]]] = {
    Content.TEXT: ({"type": "text", "text": ""}, "text_delta", "text"),
    Content.REASONING: ({"type": "thinking", "thinking": ""}, "thinking_delta", "thinking"),
    Content.CALL: (
        {"type": "tool_use", "id": "call_1", "name": TOOL, "input": {}},
        "input_json_delta",
        "partial_json",
    ),
}
"""How the block begins, and the type and the member of its deltas."""


def _messages(content: Content) -> EventStream:
    def event(name: str, **members: object) -> str:
        return _data({"type": name, **members}, name)

    block, delta_type, member = _BLOCKS[content]

    def delta(word: str) -> str:
        return event("content_block_delta", index=0, delta={"type": delta_type, member: word})

    done = whole(RequestKind.MESSAGES, content)
    empty = {**done, "content": [], "stop_reason": None}
    usage = {"input_tokens": 40, "output_tokens": 0}
    first, *rest = map(delta, ARGUMENTS if content is Content.CALL else WORDS)
    opened = event("content_block_start", index=0, content_block=block)
    ended = {"stop_reason": done["stop_reason"], "stop_sequence": None}
    end = (
        event("content_block_stop", index=0),
        event("message_delta", delta=ended, usage=_MESSAGE_USAGE),
        event("message_stop"),
    )
    error = event("error", error={"type": "internal_error", "message": "Internal server error"})
    preamble = (event("message_start", message={**empty, "usage": usage}),)
    return EventStream(preamble, (opened + first, *rest), end, (error,))


_FINISHES: Final = (None, None, "length")


def _openai_error() -> tuple[str, ...]:
    return _data({"error": _ENGINE_ERROR}), DONE


_RESPONSE: Final[Mapping[str, Any]] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": MODEL,
    "output": [],
    "parallel_tool_calls": True,
    "temperature": 0.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "background": False,
    "max_output_tokens": 3,
    "service_tier": "auto",
    "truncation": "disabled",
    "usage": None,
}


def whole(kind: RequestKind, content: Content = Content.TEXT) -> Any:
    """The answer that is not streamed: a JSON object."""
    text, arguments = "".join(WORDS), "".join(ARGUMENTS)
    is_call, is_reasoning = content is Content.CALL, content is Content.REASONING
    finish = "tool_calls" if is_call else "length"
    choice = {"logprobs": None, "finish_reason": finish, "stop_reason": None}
    match kind:
        case RequestKind.COMPLETIONS:
            head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
            choices = [{"index": i, **choice, "text": text} for i in _choices(content)]
            return {**head, "choices": choices, "usage": _USAGE}
        case RequestKind.CHAT:
            head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL}
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if is_reasoning:
                message |= {"content": None, "reasoning": text}
            elif is_call:
                function = {"name": TOOL, "arguments": arguments}
                call = {"id": "call_1", "type": "function", "function": function}
                message |= {"content": None, "tool_calls": [call]}
            choices = [{"index": i, **choice, "message": message} for i in _choices(content)]
            return {**head, "choices": choices, "usage": _USAGE}
        case RequestKind.GENERATE:
            head = {"request_id": "generate-1", "output_mode": "tokens", "usage": _USAGE}
            return {**head, "choices": [{"index": 0, **choice, "token_ids": list(TOKEN_IDS)}]}
        case RequestKind.RESPONSES:
            item: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant"}
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
            if is_reasoning:
                item = {"id": "rs_1", "type": "reasoning", "summary": []}
                part = {"type": "reasoning_text", "text": text}
            item |= {"status": "completed", "content": [part]}
            if is_call:
                item = {"id": "fc_1", "type": "function_call", "status": "completed"}
                item |= {"call_id": "call_1", "name": TOOL, "arguments": arguments}
            return {**_RESPONSE, "status": "completed", "output": [item], "usage": _ITEMS_USAGE}
        case RequestKind.MESSAGES:
            head = {"id": "chatcmpl-1", "type": "message", "role": "assistant", "model": MODEL}
            block, _, member = _BLOCKS[content]
            full = {**block, "input": json.loads(arguments)} if is_call else {**block, member: text}
            stop = "tool_use" if is_call else "max_tokens"
            end = {"stop_reason": stop, "stop_sequence": None, "usage": _MESSAGE_USAGE}
            return {**head, "content": [full], **end}


_STREAMS: Final[Mapping[RequestKind, Callable[[Content], EventStream]]] = {
    RequestKind.COMPLETIONS: _completions,
    RequestKind.CHAT: _chat,
    RequestKind.RESPONSES: _responses,
    RequestKind.MESSAGES: _messages,
    RequestKind.GENERATE: _generate,
}


class Answering(Turn):
    """A turn, with what an engine writes in it."""

    @property
    def kind(self) -> RequestKind:
        kind = kind_of_path(self.request.target)
        assert kind is not None
        return kind

    @property
    def content(self) -> Content:
        """What the request asks for."""
        fields = self.request.json
        if fields.get("n", 1) > 1:
            return Content.CHOICES
        if fields.get("tools"):
            return Content.CALL
        reasons = {"reasoning_effort", "reasoning", "thinking"} & fields.keys()
        return Content.REASONING if reasons else Content.TEXT

    @property
    def streams(self) -> bool:
        return self.request.json.get("stream") is True

    @property
    def reads_kv(self) -> bool:
        params = self.request.json.get(transfer_params.FIELD) or {}
        return bool(params.get("do_remote_prefill"))

    @property
    def events(self) -> EventStream:
        return _STREAMS[self.kind](self.content)

    def write(self, *events: str) -> None:
        """Send each event in a chunk of its own, as uvicorn does."""
        for event in events:
            self.chunk(event.encode())

    def complete(self) -> None:
        """Send the whole answer."""
        if not self.streams:
            self.answer(200, json.dumps(whole(self.kind, self.content)).encode())
            return
        self.stream()
        self.write(*self.events.whole)
        self.end()

    def fail(self) -> None:
        """Send what vLLM does for a request whose KV it could not load, with the policy `fail`."""
        if not self.streams:
            body: dict[str, object] = {"error": _ENGINE_ERROR}
            if self.kind is RequestKind.MESSAGES:
                error = {"type": "InternalServerError", "message": "Internal server error"}
                body = {"type": "error", "error": error}
            self.answer(500, json.dumps(body).encode())
            return
        self.stream()
        self.write(*self.events.preamble)
        self.give_up()

    def give_up(self) -> None:
        """End a stream that has begun, as vLLM does when its engine fails the request."""
        if self.events.error:
            self.write(*self.events.error)
            self.end()
        else:
            self.writer.close()


Act = Callable[[Answering], Awaitable[None]]


async def complete(turn: Answering) -> None:
    turn.complete()


def script(act: Act) -> Script:
    """The script of an engine that answers by `act`."""

    async def answer(turn: Turn) -> None:
        await act(Answering(turn.request, turn.writer, turn.gone))

    return answer
