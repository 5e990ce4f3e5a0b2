"""Answers of completions, chat and generate; an error inside one says why."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.calls import Answer, Usage
from tandem_loadtest.client.answers import AnswerError
from tandem_loadtest.client.openai import OpenAIStream, parse_answer

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 8},
}
DONE = b"data: [DONE]\n\n"


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(content: str, ids: list[int] | None = None, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": content, "token_ids": ids, "finish_reason": finish}])


def delta(**message: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": message}])


def streamed(*events: bytes) -> OpenAIStream:
    """One by one, then all at once: both must be the same."""
    single, together = OpenAIStream(), OpenAIStream()
    for data in events:
        single.add_all(data)
    together.add_all(b"".join(events))
    assert single.so_far() == together.so_far()
    assert single.has_ended == together.has_ended
    assert single.token_events == together.token_events
    return single


def test_a_streamed_completion_is_joined() -> None:
    stream = streamed(
        text("a", [4]), text("", [5]), text("b", [], "length"), event(choices=[], usage=USAGE), DONE
    )
    assert stream.so_far() == Answer("ab", (4, 5), "length", Usage(9, 2, 8))
    assert stream.has_ended


def test_a_streamed_chat_is_joined() -> None:
    stream = streamed(
        delta(role="assistant", content=""),
        event(choices=[{"delta": {"content": "hi"}, "token_ids": [7]}]),
        event(choices=[{"delta": {"content": None}, "finish_reason": "stop"}]),
    )
    assert stream.so_far() == Answer("hi", (7,), "stop")
    assert not stream.has_ended


def test_a_streamed_generate_has_only_ids() -> None:
    stream = streamed(
        event(choices=[{"index": 0, "token_ids": [7]}]),
        event(choices=[{"index": 0, "token_ids": [8], "finish_reason": "length"}]),
    )
    assert stream.so_far() == Answer("", (7, 8), "length")
    assert stream.token_events == 2


def test_reasoning_and_tool_calls_are_kept_apart_from_the_text() -> None:
    stream = streamed(
        delta(reasoning="hm", reasoning_content="hm"),
        delta(reasoning_content="m"),
        delta(content="so"),
        delta(tool_calls=[{"index": 0, "id": "1", "function": {"name": "f", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]),
    )
    assert stream.so_far() == Answer("so", reasoning="hmm", tool_calls="f{}")
    assert stream.token_events == 5


def test_a_server_that_sends_no_ids_gives_none() -> None:
    assert streamed(text("a", None, "stop")).so_far().token_ids is None


def test_other_choices_are_left_out() -> None:
    other = event(choices=[{"index": 1, "text": "no", "token_ids": [1], "finish_reason": "stop"}])
    stream = streamed(other, text("a", [4], "stop"))
    assert stream.so_far() == Answer("a", (4,), "stop")
    assert stream.token_events == 1


@pytest.mark.parametrize(
    ("data", "has_tokens"),
    [
        (text("a"), True),
        (text("", [3]), True),
        (text("", [], "stop"), False),
        (event(choices=[], usage=USAGE), False),
        (event(), False),
        (event(choices=None), False),
        (delta(role="assistant"), False),
        (delta(role="assistant", content=""), False),
        (delta(role="assistant", content="", reasoning=""), False),
        (delta(), False),
        (delta(content=" "), True),
        (delta(refusal="no"), True),
        (delta(reasoning="a"), True),
        (delta(reasoning_content="a"), True),
        (delta(tool_calls=[{"function": {"name": "f"}}]), True),
        (delta(tool_calls=[{"function": {"arguments": "{"}}]), True),
        (delta(tool_calls=[{"function": {"name": None, "arguments": ""}}]), False),
        (delta(tool_calls=[]), False),
        (DONE, False),
        (b": keep-alive\n\n", False),
    ],
)
def test_only_generated_tokens_count(data: bytes, has_tokens: bool) -> None:
    assert (streamed(data).token_events == 1) is has_tokens


def test_with_continuous_usage_the_last_one_counts() -> None:
    first = {"prompt_tokens": 9, "completion_tokens": 1}
    assert streamed(event(usage=first), event(usage=USAGE)).so_far().usage == Usage(9, 2, 8)


def test_an_empty_finish_reason_is_none() -> None:
    assert streamed(text("a", None, "")).so_far().finish_reason is None


ERRORS = [
    ([text("a"), DONE, text("b")], r"after \[DONE\]"),
    ([DONE, DONE], r"after \[DONE\]"),
    ([event(error={"message": "engine\ndied", "code": 502})], "^engine\ndied$"),
    ([event(error="engine died")], "^engine died$"),
    ([event(object="error", message="too long")], "^too long$"),
    ([b"event: error\ndata: engine died\n\n"], "^engine died$"),
    ([b'event: error\ndata: {"error": {"message": "m"}}\n\n'], "^m$"),
    ([b'event: error\ndata: {"detail": 1}\n\n'], "detail"),
    ([b"data: nonsense\n\n"], "not an answer of this API: JSON is malformed"),
    ([b"data:\n\n"], "not an answer of this API"),
    ([b"data: {\n\n", b"data: }\n\n"], "not an answer of this API"),
    ([b'data: {"choices": [{"text": "\xff"}]}\n\n'], "not UTF-8"),
    ([event(choices=[{"text": 3}])], "not an answer of this API: Expected `str"),
    ([b"data: []\n\n"], "not an answer of this API"),
]


@pytest.mark.parametrize(("events", "message"), ERRORS)
def test_an_error_in_a_stream_is_raised(events: list[bytes], message: str) -> None:
    stream = OpenAIStream()
    with pytest.raises(AnswerError, match=message):
        # After tokens, in the same read.
        stream.add_all(text("secret", [1]) + b"".join(events))
    assert stream.so_far().text.startswith("secret")
    assert stream.token_events >= 1


def test_two_halves_of_an_object_are_not_joined() -> None:
    with pytest.raises(AnswerError):
        streamed(b'data: {"choices": [{"text": "x}\n\ndata: {y"}]}\n\n')


def test_an_error_shows_no_text_of_the_answer() -> None:
    for bad in (b'data: {"choices": [{"text": "secret", "index": "x"}]}\n\n', b"data: secret\n\n"):
        with pytest.raises(AnswerError) as info:
            streamed(bad)
        assert "secret" not in str(info.value)


@pytest.mark.parametrize(
    ("choice", "answer"),
    [
        ({"text": "ab", "token_ids": [1, 2], "finish_reason": "stop"},
         Answer("ab", (1, 2), "stop", Usage(9, 2, 8))),
        ({"message": {"role": "assistant", "content": "hi"}, "finish_reason": "length"},
         Answer("hi", None, "length", Usage(9, 2, 8))),
        ({"message": {"content": None, "reasoning": "hm", "tool_calls": [
            {"function": {"name": "f", "arguments": "{}"}}]}, "finish_reason": "tool_calls"},
         Answer("", None, "tool_calls", Usage(9, 2, 8), "hm", "f{}")),
        ({"token_ids": [3], "finish_reason": "length"}, Answer("", (3,), "length", Usage(9, 2, 8))),
        ({"text": "ab"}, Answer("ab", usage=Usage(9, 2, 8))),
    ],
)  # fmt: skip
def test_an_answer_without_streaming_is_parsed(choice: dict[str, Any], answer: Answer) -> None:
    assert parse_answer(json.dumps({"choices": [choice], "usage": USAGE}).encode()) == answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "no choice"),
        ({"choices": [{"index": 1, "text": "a", "finish_reason": "stop"}]}, "no choice"),
        ({"error": {"message": "no"}}, "^no$"),
        ({"object": "error", "message": "older"}, "^older$"),
        ([], "not an answer of this API"),
    ],
)
def test_a_body_that_is_no_answer_is_an_error(body: object, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        parse_answer(json.dumps(body).encode())


@given(st.binary(max_size=60))
def test_random_bytes_are_an_answer_error(body: bytes) -> None:
    with pytest.raises(AnswerError):
        parse_answer(body)


CHUNKS = st.sampled_from([text("a", [1]), text("b"), delta(content="c"), delta(role="x"),
                          event(choices=[], usage=USAGE), b": comment\n\n", DONE,
                          b"event: message\ndata: {}\n\n", text("é", [2], "stop")])  # fmt: skip


@given(st.lists(CHUNKS, max_size=8))
def test_events_that_come_together_are_like_events_one_by_one(events: list[bytes]) -> None:
    single, together = OpenAIStream(), OpenAIStream()
    raised = []
    for stream, reads in ((single, events), (together, [b"".join(events)])):
        try:
            for data in reads:
                stream.add_all(data)
            raised.append("")
        except AnswerError as err:
            raised.append(str(err))
    assert raised[0] == raised[1]
    assert single.so_far() == together.so_far()
    assert single.token_events == together.token_events
