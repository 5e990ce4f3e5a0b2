"""Scripts for `FakeDecode`, which then serves all five generating APIs as vLLM 0.32 does.

For the APIs that the reference engine lacks, and for failures between two given events. The events
and their order are those of vLLM's `serving.py` in `entrypoints/openai/completion`,
`chat_completion` and `responses`, `entrypoints/anthropic`, and
`entrypoints/scale_out/token_in_token_out`.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tandem_contract import transfer_params
from tandem_contract.request_kinds import RequestKind, kind_of_path

from .peers import Script, Turn

WORDS: Final = ("one", " two", " three")
"""The text of every answer, a token each."""
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


def _completions() -> EventStream:
    def token(text: str, finish: str | None) -> str:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return _completions_event([{**choice, "stop_reason": None, "prompt_token_ids": None}])

    usage = _completions_event([], usage=_USAGE)
    return EventStream((), _with_finish(token), (usage, DONE), _openai_error())


def _chat() -> EventStream:
    def chunk(choices: list[dict[str, Any]], **more: object) -> str:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1}
        return _data({**head, "model": MODEL, "choices": choices, **more})

    def choice(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}

    def token(text: str, finish: str | None) -> str:
        return chunk([choice({"content": text}, finish)])

    role = chunk([choice({"role": "assistant", "content": ""})])
    return EventStream(
        (role,), _with_finish(token), (chunk([], usage=_USAGE), DONE), _openai_error()
    )


def _generate() -> EventStream:
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


def _responses() -> EventStream:
    numbers = iter(range(100))

    def event(name: str, **members: object) -> str:
        return _data({"type": name, "sequence_number": next(numbers), **members}, name)

    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant"}
    begun, done = {**_RESPONSE, "status": "in_progress"}, whole(RequestKind.RESPONSES)
    (item,) = done["output"]
    part: dict[str, Any] = item["content"][0]
    preamble = (
        event("response.created", response=begun),
        event("response.in_progress", response=begun),
    )
    opened = (
        event(
            "response.output_item.added",
            output_index=0,
            item={**message, "content": [], "status": "in_progress"},
        ),
        event("response.content_part.added", **place, part=empty),
    )
    first, *rest = (
        event("response.output_text.delta", **place, delta=word, logprobs=[]) for word in WORDS
    )
    end = (
        event("response.output_text.done", **place, text=part["text"], logprobs=[]),
        event("response.content_part.done", **place, part=part),
        event("response.output_item.done", output_index=0, item=item),
        event("response.completed", response=done),
    )
    # vLLM opens the item only when the first token is there. An error it cannot write: it is none
    # of the events that it validates against.
    return EventStream(preamble, ("".join((*opened, first)), *rest), end, ())


def _messages() -> EventStream:
    def event(name: str, **members: object) -> str:
        return _data({"type": name, **members}, name)

    def delta(text: str) -> str:
        return event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    empty = {**whole(RequestKind.MESSAGES), "content": [], "stop_reason": None}
    usage = {"input_tokens": 40, "output_tokens": 0}
    first, *rest = map(delta, WORDS)
    opened = event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    end = (
        event("content_block_stop", index=0),
        event(
            "message_delta",
            delta={"stop_reason": "max_tokens", "stop_sequence": None},
            usage=_MESSAGE_USAGE,
        ),
        event("message_stop"),
    )
    error = event("error", error={"type": "internal_error", "message": "Internal server error"})
    preamble = (event("message_start", message={**empty, "usage": usage}),)
    return EventStream(preamble, (opened + first, *rest), end, (error,))


_FINISHES: Final = (None, None, "length")


def _with_finish(token: Callable[[str, str | None], str]) -> tuple[str, ...]:
    return tuple(map(token, WORDS, _FINISHES))


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


def whole(kind: RequestKind) -> Any:
    """The answer that is not streamed: a JSON object."""
    text = "".join(WORDS)
    choice = {"index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    match kind:
        case RequestKind.COMPLETIONS:
            head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
            return {**head, "choices": [{**choice, "text": text}], "usage": _USAGE}
        case RequestKind.CHAT:
            head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL}
            message = {"role": "assistant", "content": text}
            return {**head, "choices": [{**choice, "message": message}], "usage": _USAGE}
        case RequestKind.GENERATE:
            head = {"request_id": "generate-1", "output_mode": "tokens", "usage": _USAGE}
            return {**head, "choices": [{**choice, "token_ids": list(TOKEN_IDS)}]}
        case RequestKind.RESPONSES:
            part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
            item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
            output = [{**item, "content": [{**part, "logprobs": None}]}]
            return {**_RESPONSE, "status": "completed", "output": output, "usage": _ITEMS_USAGE}
        case RequestKind.MESSAGES:
            head = {"id": "chatcmpl-1", "type": "message", "role": "assistant", "model": MODEL}
            content = [{"type": "text", "text": text}]
            end = {"stop_reason": "max_tokens", "stop_sequence": None, "usage": _MESSAGE_USAGE}
            return {**head, "content": content, **end}


STREAMS: Final[Mapping[RequestKind, EventStream]] = {
    RequestKind.COMPLETIONS: _completions(),
    RequestKind.CHAT: _chat(),
    RequestKind.RESPONSES: _responses(),
    RequestKind.MESSAGES: _messages(),
    RequestKind.GENERATE: _generate(),
}


class Answering(Turn):
    """A turn, with what an engine writes in it."""

    @property
    def kind(self) -> RequestKind:
        kind = kind_of_path(self.request.target)
        assert kind is not None
        return kind

    @property
    def streams(self) -> bool:
        return self.request.json.get("stream") is True

    @property
    def reads_kv(self) -> bool:
        params = self.request.json.get(transfer_params.FIELD) or {}
        return bool(params.get("do_remote_prefill"))

    @property
    def events(self) -> EventStream:
        return STREAMS[self.kind]

    def write(self, *events: str) -> None:
        """Send each event in a chunk of its own, as uvicorn does."""
        for event in events:
            self.chunk(event.encode())

    def complete(self) -> None:
        """Send the whole answer."""
        if not self.streams:
            self.answer(200, json.dumps(whole(self.kind)).encode())
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
