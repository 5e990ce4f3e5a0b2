"""Classification of engines' answers by their heads and first bytes."""

import pytest

from tandem_contract.api_grammar import MAX_PREAMBLE
from tandem_contract.request_kinds import RequestKind
from tandem_http1.messages import ResponseHead
from tandem_sidecar.handoff.classify import AnswerStart, decode_event, result_of, retry_after
from tandem_sidecar.handoff.events_actions import (
    DecodeAdmitted,
    DecodeErrored,
    DecodeEvent,
    DecodeRefused,
)
from tandem_sidecar.observability.record import Result

NOON = 1767268800.0
"""2026-01-01, 12:00 UTC."""


def head(*lines: str) -> ResponseHead:
    return ResponseHead("\r\n".join(["HTTP/1.1 503 Busy", *lines]).encode(), b"POST")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("99999999999999999999", 999999999.0),
        ("Thu, 01 Jan 2026 12:00:30 GMT", 30.0),
        ("Thu, 01 Jan 2026 11:59:30 GMT", 0.0),
        ("-1", 0.0),
        ("soon", 0.0),
        ("\u00b2", 0.0),
        ("", 0.0),
    ],
)
def test_a_retry_after_is_seconds_or_a_date(value: str, seconds: float) -> None:
    block = head(f"retry-after: {value}")
    assert retry_after(block, NOON) == seconds


def test_without_a_retry_after_the_wait_is_zero() -> None:
    assert retry_after(head(), NOON) == 0.0


@pytest.mark.parametrize(
    ("status", "event", "result"),
    [
        (200, DecodeAdmitted(), Result.ANSWERED),
        (400, DecodeRefused(kv_released=False), Result.REJECTED),
        (404, DecodeRefused(kv_released=True), Result.REJECTED),
        (429, DecodeRefused(kv_released=False), Result.BUSY),
        (500, DecodeErrored(), Result.ERROR),
        (503, DecodeErrored(busy=True), Result.BUSY),
    ],
)
def test_a_status_maps_to_one_event_and_one_result(
    status: int, event: DecodeEvent, result: Result
) -> None:
    assert (decode_event(RequestKind.CHAT, status), result_of(status)) == (event, result)


def test_a_404_of_generate_has_not_released_the_kv() -> None:
    assert decode_event(RequestKind.GENERATE, 404) == DecodeRefused(kv_released=False)


STREAM = head("content-type: text/event-stream")
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
ERROR = b'data: {"error": {}}\n\n'


@pytest.mark.parametrize(("event", "is_error"), [(TOKEN, False), (ERROR, True)])
def test_a_stream_begins_with_its_first_token_or_an_error(event: bytes, is_error: bool) -> None:
    start = AnswerStart(RequestKind.CHAT, STREAM)
    assert not start.take(ROLE, 1.0, last=False)
    assert not start.take(event[:9], 1.0, last=False)
    assert start.take(event[9:], 1.0, last=False)
    assert (start.data, start.is_error) == (ROLE + event, is_error)


def test_what_is_held_back_is_bounded_and_ends_with_the_answer() -> None:
    start = AnswerStart(RequestKind.CHAT, STREAM)
    assert not start.take(b":" * (MAX_PREAMBLE - 1), 1.0, last=False)
    assert start.take(b"\n", 1.0, last=False)
    assert AnswerStart(RequestKind.CHAT, STREAM).take(ROLE, 1.0, last=True)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (RequestKind.CHAT, head("content-type: application/json")),
        (RequestKind.CHAT, head("content-type: text/event-stream", "content-encoding: gzip")),
        (None, STREAM),
    ],
)
def test_every_other_answer_begins_with_its_first_bytes(
    kind: RequestKind | None, answer: ResponseHead
) -> None:
    start = AnswerStart(kind, answer)
    assert start.take(ROLE, 1.0, last=False)
    assert (start.data, start.is_error) == (ROLE, False)


@pytest.mark.parametrize(
    ("kind", "first", "token", "computed"),
    [
        # vLLM sends them with the first output of the engine, of which the text may be held back.
        (RequestKind.CHAT, ROLE, TOKEN, 1.0),
        (RequestKind.COMPLETIONS, b'data: {"choices":[{"text":""}]}\n\n', TOKEN, 1.0),
        # And this one before the engine computes.
        (
            RequestKind.RESPONSES,
            b'data: {"type":"response.created"}\n\n',
            b'data: {"type":"response.output_text.delta","delta":"a"}\n\n',
            3.0,
        ),
    ],
)
def test_a_leg_lasts_until_the_engines_first_output(
    kind: RequestKind, first: bytes, token: bytes, computed: float
) -> None:
    start = AnswerStart(kind, STREAM)
    assert start.seconds_since(0.0) is None
    assert not start.take(first, 1.0, last=False)
    assert not start.take(first, 2.0, last=False)
    assert start.take(token, 3.0, last=False)
    assert start.seconds_since(0.0) == computed
