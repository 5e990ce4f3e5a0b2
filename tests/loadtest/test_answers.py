"""Response bodies to answers; everything that is no whole answer is an error that says why."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.answers import AnswerBuilder, AnswerError, error_message, parse_answer
from tandem_loadtest.calls import Answer, Usage
from tandem_loadtest.sse import ServerSentEvent


def event(**body: Any) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(body))


def chunk(text: str, ids: list[int] | None = None, finish: str | None = None) -> ServerSentEvent:
    return event(choices=[{"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}])


DONE = ServerSentEvent("[DONE]")
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def streamed(*events: ServerSentEvent) -> Answer:
    builder = AnswerBuilder()
    for event in events:
        builder.add(event)
    builder.finish()
    return builder.so_far()


def test_a_streamed_completion_is_joined() -> None:
    answer = streamed(
        chunk("a", [4]),
        chunk("", [5]),
        chunk("b", [], "length"),
        event(choices=[], usage=USAGE),
        DONE,
    )
    assert answer == Answer("ab", (4, 5), "length", Usage(9, 2, 8))


def test_a_streamed_chat_is_joined() -> None:
    answer = streamed(
        event(choices=[{"delta": {"role": "assistant", "content": ""}}]),
        event(choices=[{"delta": {"content": "hi"}, "token_ids": [7]}]),
        event(choices=[{"delta": {"content": None}, "finish_reason": "stop"}]),
        DONE,
    )
    assert answer == Answer("hi", (7,), "stop", None)


def test_a_server_that_sends_no_ids_gives_none() -> None:
    assert streamed(chunk("a", None, "stop"), DONE).token_ids is None


def test_other_choices_are_left_out() -> None:
    other = event(choices=[{"index": 1, "text": "no", "token_ids": [1], "finish_reason": "stop"}])
    assert streamed(other, chunk("a", [4], "stop"), DONE) == Answer("a", (4,), "stop")


@pytest.mark.parametrize(
    ("event", "has_tokens"),
    [
        (chunk("a"), True),
        (chunk("", [3]), True),
        (chunk("", [], "stop"), False),
        (event(choices=[], usage=USAGE), False),
        (event(choices=[{"delta": {"role": "assistant"}}]), False),
        (DONE, False),
    ],
)
def test_an_event_says_whether_it_brought_tokens(event: ServerSentEvent, has_tokens: bool) -> None:
    assert AnswerBuilder().add(event) is has_tokens


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "without a finish_reason"),
        ([chunk("a")], "without a finish_reason"),
        ([chunk("a"), DONE], "without a finish_reason"),
        ([chunk("a", None, "stop")], r"without \[DONE\]"),
        ([chunk("a", None, "abort"), DONE], "gave up: finish_reason 'abort'"),
        ([chunk("a", None, "stop"), DONE, chunk("b")], r"after \[DONE\]"),
        ([event(error={"message": "engine\ndied", "code": 502})], "^engine died$"),
        ([event(error="engine died")], "^engine died$"),
        ([event(object="error", message="too long")], "^too long$"),
        ([ServerSentEvent("engine died", "error")], "^engine died$"),
        ([ServerSentEvent('{"error": {"message": "m"}}', "error")], "^m$"),
        ([ServerSentEvent('{"detail": 1}', "error")], "detail"),
        ([ServerSentEvent("nonsense")], "not an OpenAI answer .*: nonsense"),
        ([ServerSentEvent("")], "not an OpenAI answer"),
        ([event(choices=[{"text": 3}])], "not an OpenAI answer"),
    ],
)
def test_an_incomplete_stream_is_an_error(events: list[ServerSentEvent], message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        streamed(*events)


def test_a_completion_without_streaming_is_parsed() -> None:
    body = {
        "choices": [{"text": "ab", "token_ids": [1, 2], "finish_reason": "stop"}],
        "usage": USAGE,
    }
    answer = parse_answer(json.dumps(body).encode())
    assert answer == Answer("ab", (1, 2), "stop", Usage(9, 2, 8))


def test_a_chat_without_streaming_is_parsed() -> None:
    body = {
        "choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": None},
    }
    assert parse_answer(json.dumps(body).encode()) == Answer("hi", None, "length", Usage(3, 1))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "no choice"),
        ({"choices": [{"index": 1, "text": "a", "finish_reason": "stop"}]}, "no choice"),
        ({"choices": [{"text": "a"}]}, "no finish_reason"),
        ({"choices": [{"text": "a", "finish_reason": "error"}]}, "gave up"),
        ({"error": {"message": "no"}}, "^no$"),
        ([], "not an OpenAI answer"),
    ],
)
def test_an_incomplete_body_is_an_error(body: object, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        parse_answer(json.dumps(body).encode())


@given(st.binary(max_size=60))
def test_random_bytes_are_an_answer_error(body: bytes) -> None:
    with pytest.raises(AnswerError):
        parse_answer(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such\\n model"}}', "no such model"),
        (b'{"object": "error", "message": "older"}', "older"),
        (b"upstream connect error\r\n", "upstream connect error"),
        (b'{"detail": "x"}', '{"detail": "x"}'),
        (b"", "an empty body"),
        (b"\xff", "\ufffd"),
        (b"x" * 300, "x" * 200 + "…"),
    ],
)
def test_an_error_response_becomes_one_line(body: bytes, message: str) -> None:
    assert error_message(body) == message
