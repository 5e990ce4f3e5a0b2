"""Answers of the responses API, as vLLM sends them."""

import json
from typing import Any

import pytest

from tandem_loadtest.calls import Answer, Usage
from tandem_loadtest.client.answers import AnswerError
from tandem_loadtest.client.responses import ResponsesStream, parse_answer

USAGE = {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}}


def event(kind: str, **body: Any) -> bytes:
    data = json.dumps({"type": kind, "sequence_number": 1, **body})
    return f"event: {kind}\ndata: {data}\n\n".encode()


def completed(status: str = "completed", **more: Any) -> bytes:
    response = {"status": status, "error": None, "usage": USAGE, "output": [], **more}
    return event(f"response.{status}", response=response)


BEGIN = (
    event("response.created", response={"status": "in_progress", "usage": None}),
    event("response.in_progress", response={"status": "in_progress", "usage": None}),
    event("response.output_item.added", item={"type": "message", "content": [], "id": "m"}),
    event("response.content_part.added", part={"type": "output_text", "text": ""}),
)
TEXT = (
    event("response.output_text.delta", delta="a", logprobs=[]),
    event("response.output_text.delta", delta="b"),
    event("response.output_text.done", text="ab"),
    event("response.content_part.done", part={"type": "output_text", "text": "ab"}),
    event("response.output_item.done", item={"type": "message", "content": [{"text": "ab"}]}),
)


def streamed(*events: bytes) -> ResponsesStream:
    stream = ResponsesStream()
    stream.add_all(b"".join(events))
    return stream


def test_a_streamed_answer_is_joined() -> None:
    stream = streamed(*BEGIN, *TEXT, completed())
    assert stream.so_far() == Answer("ab", None, "completed", Usage(9, 2, 8))
    assert stream.has_ended
    assert stream.token_events == 2


def test_what_precedes_the_first_token_is_none() -> None:
    assert streamed(*BEGIN).token_events == 0
    assert streamed(event("response.output_text.delta", delta="")).token_events == 0


def test_reasoning_and_tool_calls_are_tokens() -> None:
    stream = streamed(
        event("response.reasoning_text.delta", delta="hm"),
        event("response.reasoning_summary_text.delta", delta="m"),
        event("response.output_item.added", item={"type": "function_call", "name": "f"}),
        event("response.function_call_arguments.delta", delta="{}"),
        event("response.function_call_arguments.done", arguments="{}", name="f"),
    )
    assert stream.so_far() == Answer(reasoning="hmm", tool_calls="f{}")
    assert stream.token_events == 4


@pytest.mark.parametrize(
    ("details", "reason"),
    [({"reason": "max_output_tokens"}, "max_output_tokens"), (None, "incomplete")],
)
@pytest.mark.parametrize("name", ["response.incomplete", "response.completed"])
def test_an_answer_at_its_limit_is_whole(name: str, details: Any, reason: str) -> None:
    response = {"status": "incomplete", "usage": USAGE, "incomplete_details": details}
    stream = streamed(*TEXT, event(name, response=response))
    assert stream.has_ended
    assert stream.so_far().finish_reason == reason


def test_a_stream_without_its_last_event_has_not_ended() -> None:
    stream = streamed(*BEGIN, *TEXT, b"data: [DONE]\n\n")
    assert not stream.has_ended
    assert stream.so_far() == Answer("ab")


def test_done_may_follow_the_last_event() -> None:
    assert streamed(completed(), b"data: [DONE]\n\n").has_ended


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (event("error", message="engine died", code="x"), "^x: engine died$"),
        (b'data: {"error": {"message": "died"}}\n\n', "^died$"),
        (completed("failed", error={"code": "x", "message": "died"}), "^x: died$"),
        (completed("failed"), "has status 'failed'"),
        (completed("cancelled"), "has status 'cancelled'"),
        (b"data: nonsense\n\n", "not an answer of this API"),
        (completed() + TEXT[0], "after the last"),
    ],
)
def test_an_error_in_a_stream_is_raised(data: bytes, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        streamed(TEXT[0], data)


def test_an_answer_without_streaming_is_parsed() -> None:
    body = {
        "status": "completed",
        "error": None,
        "output": [
            {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]},
            {"type": "message", "content": [{"type": "output_text", "text": "ab"}]},
            {"type": "function_call", "name": "f", "arguments": "{}"},
        ],
        "usage": USAGE,
    }
    answer = parse_answer(json.dumps(body).encode())
    assert answer == Answer("ab", None, "completed", Usage(9, 2, 8), "hm", "f{}")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "no output"),
        ({"error": {"message": "no"}}, "^no$"),
        ({"status": "failed", "output": []}, "status 'failed'"),
        ([], "not an answer of this API"),
    ],
)
def test_a_body_that_is_no_answer_is_an_error(body: object, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        parse_answer(json.dumps(body).encode())


def test_an_unfinished_answer_has_no_finish_reason() -> None:
    body = json.dumps({"status": "in_progress", "output": []}).encode()
    assert parse_answer(body).finish_reason is None
