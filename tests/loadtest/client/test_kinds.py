"""Every API, streamed and not, from the request to the result."""

from typing import Any

import pytest
from aiohttp import web

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_loadtest.calls import Call, Usage
from tandem_loadtest.client import Client, ClientSettings
from tandem_loadtest.records import Outcome

from ..servers import DONE, WHOLE, answering, chunk, serving, sse, streaming
from .raw import chunked, once, raw_server

USAGE = sse({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
GOOD = (chunk("a", 1), chunk("b", 2, "length"), USAGE)


def settings(url: str) -> ClientSettings:
    return ClientSettings(url=url, model="tiny")


def event(kind: str, **body: Any) -> bytes:
    return f"event: {kind}\n".encode() + sse({"type": kind, **body})


IDS = {"index": 0, "token_ids": [1, 2], "finish_reason": "length"}
OPENAI_USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
OTHER_USAGE = {"input_tokens": 3, "output_tokens": 2}
RESPONSE = {"status": "completed", "output": [{"type": "message", "content": [{"text": "ab"}]}],
            "usage": OTHER_USAGE}  # fmt: skip
TEXT = {"type": "text", "text": "ab"}
MESSAGE = {"type": "message", "content": [TEXT], "stop_reason": "end_turn", "usage": OTHER_USAGE}
CHAT = {"index": 0, "finish_reason": "length"}
ANSWERS: dict[RequestKind, tuple[dict[str, Any], tuple[bytes, ...]]] = {
    RequestKind.COMPLETIONS: (WHOLE, (*GOOD, DONE)),
    RequestKind.CHAT: (
        {"choices": [{**CHAT, "message": {"content": "ab"}}], "usage": OPENAI_USAGE},
        (sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
         sse({"choices": [{**CHAT, "delta": {"content": "ab"}}]}), USAGE, DONE),
    ),
    RequestKind.GENERATE: ({"choices": [IDS]}, (sse({"choices": [IDS]}), USAGE, DONE)),
    RequestKind.RESPONSES: (
        RESPONSE,
        (event("response.created", response={"status": "in_progress"}),
         event("response.output_text.delta", delta="ab"),
         event("response.completed", response=RESPONSE)),
    ),
    RequestKind.MESSAGES: (
        MESSAGE,
        (event("message_start", message={"usage": {"input_tokens": 3, "output_tokens": 0}}),
         event("content_block_delta", delta={"type": "text_delta", "text": "ab"}),
         event("message_delta", delta={"stop_reason": "end_turn"}, usage=OTHER_USAGE),
         event("message_stop"), DONE),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", RequestKind)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_api_is_read_and_measured(kind: RequestKind, stream: bool) -> None:
    body, events = ANSWERS[kind]
    paths: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        return await (streaming(*events) if stream else answering(body))(request)

    async with serving(handler) as url, Client(settings(url)) as client:
        result = await client.send(Call("hi", 2, kind=kind, stream=stream))
    assert paths == [PATHS[kind]]
    assert (result.outcome, result.error) == (Outcome.OK, None)
    assert result.answer.text == ("" if kind is RequestKind.GENERATE else "ab")
    if kind is not RequestKind.GENERATE or stream:
        assert result.answer.usage == Usage(3, 2)
    assert (result.first_token is not None) is stream


@pytest.mark.parametrize("kind", RequestKind)
async def test_a_stream_that_ends_after_any_event_is_truncated(kind: RequestKind) -> None:
    _, events = ANSWERS[kind]
    complete = len(events) - (kind is RequestKind.MESSAGES)
    for count in range(complete):
        response = once(chunked(*events[:count]))
        async with raw_server(response) as url, Client(settings(url)) as client:
            result = await client.send(Call("hi", 2, kind=kind))
        assert result.outcome is Outcome.TRUNCATED, count
