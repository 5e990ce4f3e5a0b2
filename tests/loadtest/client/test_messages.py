"""Answers of the messages API, as vLLM sends them."""

import json
from typing import Any

import pytest

from tandem_loadtest.calls import Answer, Usage
from tandem_loadtest.client.answers import AnswerError
from tandem_loadtest.client.messages import MessagesStream, parse_answer

DONE = b"data: [DONE]\n\n"


def event(kind: str, **body: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **body})}\n\n".encode()


def delta(**part: Any) -> bytes:
    return event("content_block_delta", index=0, delta=part)


def end(usage: dict[str, int] | None, reason: str | None = "end_turn") -> bytes:
    fields = {"usage": usage} if usage else {}
    return event("message_delta", delta={"stop_reason": reason}, **fields)


START = (
    event("message_start", message={"content": [], "usage": {"input_tokens": 9,
                                                             "output_tokens": 0}}),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event("ping"),
)  # fmt: skip
TEXT = (delta(type="text_delta", text="a"), delta(type="text_delta", text="b"))
STOP = event("message_stop")


def streamed(*events: bytes) -> MessagesStream:
    stream = MessagesStream()
    stream.add_all(b"".join(events))
    return stream


def test_a_streamed_answer_is_joined() -> None:
    stop_block = event("content_block_stop", index=0)
    stream = streamed(*START, *TEXT, stop_block, end({"output_tokens": 2}), STOP, DONE)
    assert stream.so_far() == Answer("ab", None, "end_turn", Usage(9, 2))
    assert stream.has_ended
    assert stream.token_events == 2


def test_what_precedes_the_first_token_is_none() -> None:
    assert streamed(*START).token_events == 0
    assert streamed(delta(type="signature_delta", signature="x")).token_events == 0


def test_cached_tokens_are_part_of_the_prompt() -> None:
    usage = {"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 5,
             "cache_creation_input_tokens": 1}  # fmt: skip
    assert streamed(*TEXT, end(usage)).so_far().usage == Usage(9, 2, 5)


def test_the_counts_of_the_start_alone_are_no_usage() -> None:
    assert streamed(*START, *TEXT, end(None), STOP).so_far().usage is None


def test_reasoning_and_tool_calls_are_tokens() -> None:
    tool = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    stream = streamed(
        delta(type="thinking_delta", thinking="hm"),
        event("content_block_start", index=1, content_block=tool),
        delta(type="input_json_delta", partial_json="{}"),
    )
    assert stream.so_far() == Answer(reasoning="hm", tool_calls="f{}")
    assert stream.token_events == 3


def test_a_stream_without_its_last_event_has_not_ended() -> None:
    stream = streamed(*START, *TEXT, end({"output_tokens": 2}), DONE)
    assert not stream.has_ended


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            event("error", error={"type": "internal_error", "message": "died"}) + DONE,
            "^internal_error: died$",
        ),
        (b'data: {"type": "error", "error": {"message": "died"}}\n\n', "^died$"),
        (b'data: {"error": {"message": "died"}}\n\n', "^died$"),
        (b"data: nonsense\n\n", "not an answer of this API"),
        (STOP + TEXT[0], "after message_stop"),
    ],
)
def test_an_error_in_a_stream_is_raised(data: bytes, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        streamed(TEXT[0], data)


def test_an_answer_without_streaming_is_parsed() -> None:
    body = {
        "type": "message",
        "content": [
            {"type": "thinking", "thinking": "hm"},
            {"type": "text", "text": "ab"},
            {"type": "tool_use", "name": "f", "input": {"x": 1}},
        ],
        "stop_reason": "max_tokens",
        "usage": {"input_tokens": 9, "output_tokens": 2},
    }
    answer = parse_answer(json.dumps(body, separators=(",", ":")).encode())
    assert answer == Answer("ab", None, "max_tokens", Usage(9, 2), "hm", 'f{"x":1}')


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "no content"),
        ({"type": "error", "error": {"message": "no"}}, "^no$"),
        ([], "not an answer of this API"),
    ],
)
def test_a_body_that_is_no_answer_is_an_error(body: object, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        parse_answer(json.dumps(body).encode())
