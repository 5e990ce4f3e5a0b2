"""Classification of engines' answers by their heads and first bytes."""

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.handoff.classify import decode_event, result_of, retry_after, starts_with_error
from tandem_sidecar.handoff.events_actions import (
    DecodeAdmitted,
    DecodeErrored,
    DecodeEvent,
    DecodeRefused,
)
from tandem_sidecar.http.messages import ResponseHead
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


@pytest.mark.parametrize(
    "data", [b'data: {"error": {}}\n\n', b'1f\r\ndata:{ "error"', b'data: {"e']
)
def test_a_stream_may_begin_with_an_error(data: bytes) -> None:
    stream = head("content-type: text/event-stream")
    assert starts_with_error(stream, data) is (b"error" in data)
    assert not starts_with_error(head("content-type: application/json"), data)
