"""Token counts are read; the count of cached tokens is corrected, and nothing else changes."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_sidecar.bodies.usage import (
    TokenCounts,
    UsageCorrector,
    correct_usage,
    read_cached_tokens,
    read_token_counts,
)

CHAT = (
    b'{"id":"c", "choices":[{"message":{"content":"\\"usage\\":{\\"cached_tokens\\":9}"}}],'
    b' "usage" : {"prompt_tokens":9007199254740993,"prompt_tokens_details":{"cached_tokens":%b},'
    b'"x":1.50}}\n'
)


@pytest.mark.parametrize("wrong", [b"1500", b"null", b"0"])
def test_the_cached_tokens_of_a_chat_are_corrected(wrong: bytes) -> None:
    assert correct_usage(CHAT % wrong, 32) == CHAT % b"32"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8}}}',
            b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4}}}',
        ),
        (
            b'{"type":"response.completed","response":{"metadata":{"usage":"x"},'
            b'"usage":{"input_tokens_details":{"cached_tokens":8}}}}',
            b'{"type":"response.completed","response":{"metadata":{"usage":"x"},'
            b'"usage":{"input_tokens_details":{"cached_tokens":4}}}}',
        ),
        (
            b'{"usage":{"input_tokens":1,"cache_read_input_tokens":8,"output_tokens":1}}',
            b'{"usage":{"input_tokens":5,"cache_read_input_tokens":4,"output_tokens":1}}',
        ),
        (
            b'{"message":{"usage":{"cache_read_input_tokens":4,"input_tokens":8}}}',
            b'{"message":{"usage":{"cache_read_input_tokens":4,"input_tokens":8}}}',
        ),
    ],
)
def test_the_count_is_corrected_in_every_api(before: bytes, after: bytes) -> None:
    assert correct_usage(before, 4) == after


@pytest.mark.parametrize(
    ("cached", "written", "after"),
    [
        # One engine alone: 160 of 172 tokens fill blocks that it wrote. vLLM's decode engine, 0.32.
        (None, 160, (12, 0, 160)),
        (160, 0, (12, 160, 0)),
        (32, 128, (12, 32, 128)),
        (None, None, (172, 0, 0)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_the_prefill_wrote_to_its_cache(
    cached: int | None, written: int | None, after: tuple[int, int, int], stream: bool
) -> None:
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    usage = {**dict(zip(names, (172, 0, 0), strict=True)), "output_tokens": 5}
    event = json.dumps({"message": {"usage": usage}} if stream else {"usage": usage}).encode()
    answer = b"event: message_start\ndata: " + event + b"\n\n" if stream else event
    corrected = UsageCorrector(cached, written, stream=stream).take(answer, last=True)
    body = json.loads(corrected.partition(b"data: ")[2] if stream else corrected)
    counts = (body["message"] if stream else body)["usage"]
    assert tuple(counts[name] for name in names) == after
    assert counts["output_tokens"] == 5


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b'{"choices":[]}',
        b'{"usage":null}',
        b'{"usage":{"prompt_tokens":1,"prompt_tokens_details":null}}',
        b'{"usage":{"cache_read_input_tokens":8}}',
        b'{"usage":3}',
        b'["usage"]',
        b'{"usage":{"prompt_tokens_details":{"cached_tokens":1}',
    ],
)
def test_an_answer_without_a_count_is_unchanged(answer: bytes) -> None:
    assert correct_usage(answer, 4) == answer


def test_the_same_bytes_elsewhere_are_unchanged() -> None:
    usage = b'{"prompt_tokens_details":{"cached_tokens":8}}'
    answer = b'{"tools":[%b,%b],"usage":%b,"more":%b}' % (usage, usage, usage, usage)
    right = usage.replace(b"8", b"4")
    assert (
        correct_usage(answer, 4)
        == answer[:-1].replace(b'"usage":' + usage, b'"usage":' + right) + b"}"
    )


EVENTS = (
    b'data: {"choices":[{"delta":{"content":"usage"}}],"usage":null}\r\n\r\n'
    b": comment\n\n"
    b'event: x\ndata:{"usage":{"prompt_tokens_details":{"cached_tokens":%b}}}\n\n'
    b"data: [DONE]\n\n"
)


@settings(max_examples=60)
@given(st.lists(st.integers(0, len(EVENTS)), max_size=6))
def test_a_stream_is_corrected_however_it_is_cut(cuts: list[int]) -> None:
    stream = EVENTS % b"1500"
    corrector = UsageCorrector(32, stream=True)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parts = [corrector.take(stream[a:b], last=False) for a, b in pairwise(places)]
    assert b"".join(parts) + corrector.take(b"", last=True) == EVENTS % b"32"


@pytest.mark.parametrize("cached", [1, None])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_complete_events_are_not_held_back(cached: int | None, end: bytes) -> None:
    corrector = UsageCorrector(cached, stream=True)
    assert corrector.take(b"data: a" + end + end + b"da", last=False) == b"data: a" + end + end
    assert corrector.take(b"ta: b" + end, last=False) == b""
    assert corrector.take(end, last=False) == b"data: b" + end + end
    assert corrector.between_events


def test_complete_lines_of_an_event_too_long_to_hold_are_not_held_back() -> None:
    corrector, line = UsageCorrector(1, stream=True), b"data: " + b"x" * 50_000 + b"\n"
    assert corrector.take(line, last=False) == b""
    assert corrector.between_events
    assert corrector.take(line + b"da", last=False) == line + line
    assert not corrector.between_events
    assert corrector.take(b"ta: z\n\n", last=False) == b"data: z\n\n"
    assert corrector.between_events


def test_a_json_answer_is_held_until_it_is_complete() -> None:
    corrector = UsageCorrector(32, stream=False)
    answer = CHAT % b"1500"
    assert corrector.take(answer[:50], last=False) == b""
    assert corrector.take(answer[50:], last=True) == CHAT % b"32"


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 5}}, 5),
        ({"prompt_tokens_details": {"cached_tokens": None}}, 0),
        ({"prompt_tokens_details": None, "cache_read_input_tokens": None}, 0),
        ({"input_tokens_details": {"cached_tokens": 6}}, 6),
        ({"cache_read_input_tokens": 7}, 7),
        (None, 0),
        ("odd", 0),
    ],
)
def test_cached_tokens_of_a_prefill_answer(usage: object, cached: int) -> None:
    assert read_cached_tokens(json.dumps({"usage": usage}).encode()) == cached


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 5},
            },
            TokenCounts(9, 5, 2),
        ),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, TokenCounts(9)),
        (
            {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 0}},
            TokenCounts(9, 0, 2),
        ),
        ({"input_tokens": 9, "output_tokens": 2}, TokenCounts(9, None, 2)),
        ({"input_tokens": 9, "cache_read_input_tokens": 32}, TokenCounts(41, 32)),
        (None, TokenCounts()),
        ("odd", TokenCounts()),
        ({"prompt_tokens": "odd"}, TokenCounts()),
    ],
)
def test_token_counts_of_each_api(usage: object, counts: TokenCounts) -> None:
    answer = {"choices": [{"text": '"usage": {"prompt_tokens": 1}'}], "usage": usage, "ids": [1]}
    assert read_token_counts(json.dumps(answer).encode()) == counts


def test_token_counts_in_the_events_of_a_stream() -> None:
    started = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":7}}}\n\n'
    assert read_token_counts(started) == TokenCounts(7)
    ended = b'data: {"usage":null}\n\ndata: {"usage":{"prompt_tokens":7}}\n\ndata: [DONE]\n\n'
    assert read_token_counts(ended) == TokenCounts(7)
    assert read_token_counts(ended[:40]) == TokenCounts()


def test_computed_tokens_are_those_that_were_not_cached() -> None:
    assert TokenCounts(9, 5).computed == 4
    assert TokenCounts(9).computed is None
    assert TokenCounts(cached=5).computed is None
