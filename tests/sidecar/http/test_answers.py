"""Which bytes of an event stream are released."""

import pytest

from tandem_http1.answers import CutPoint, EventChunks
from tandem_http1.framing import LAST_CHUNK, chunk
from tandem_http1.messages import ResponseHead

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
EVENTS = [b"data: one\n\n", b"data: two\r\n\r\n", b": nothing\n\n", b"data: [DONE]\n\n"]


def events(*, wire: bool = True) -> EventChunks:
    return EventChunks(ResponseHead(STREAM, b"POST"), wire=wire)


@pytest.mark.parametrize("size", range(1, 60))
def test_only_complete_events_are_released_and_none_is_lost(size: int) -> None:
    data, chunks, out = b"".join(map(chunk, EVENTS)) + LAST_CHUNK, events(), b""
    for at in range(0, len(data), size):
        out += chunks.take(data[at : at + size])
        assert chunks.between_events
        assert out == b"" or out.endswith(b"\n\r\n")
    assert out == data


def test_complete_events_are_released_at_once() -> None:
    chunks = events()
    for event in EVENTS:
        assert chunks.take(chunk(event)) == chunk(event)


def test_an_event_too_long_to_hold_is_released_in_parts() -> None:
    chunks, event = events(), chunk(b"data: " + b"x" * 200_000 + b"\n\n")
    assert chunks.take(event[:50_000]) == b""
    assert chunks.between_events
    assert chunks.take(event[50_000:100_000]) == event[:100_000]
    assert not chunks.between_events
    assert chunks.take(event[100_000:]) == event[100_000:]
    assert chunks.between_events


def test_a_body_that_is_not_a_chunked_stream_is_released_as_it_arrives() -> None:
    assert events(wire=False).take(b"data: on") == b"data: on"
    plain = ResponseHead(b"HTTP/1.1 200 OK\r\ncontent-length: 9", b"POST")
    assert EventChunks(plain, wire=True).take(b"data") == b"data"


@pytest.mark.parametrize(
    ("wire_bytes", "point"),
    [
        (b"", CutPoint.BETWEEN_CHUNKS),
        (chunk(EVENTS[0]), CutPoint.BETWEEN_CHUNKS),
        # Bytes of an unfinished event are unsent: a size line or payload, so it is not certain.
        (chunk(EVENTS[0]) + b"20\r\ndata: half an ev", CutPoint.BETWEEN_EVENTS),
        (chunk(EVENTS[0]) + b"2", CutPoint.BETWEEN_EVENTS),
        (b"400\r\ndata: one\r\n\r\nd", CutPoint.BETWEEN_EVENTS),
        (b"400\r\ndata: one\r\n\r\nda", CutPoint.BETWEEN_EVENTS),
        (b"400\r\nevent: x\r\n\r\ne", CutPoint.BETWEEN_EVENTS),
        # A whole line of payload that reads like a size line.
        (b"400\r\ndata: one\r\n\r\nda\r\n", CutPoint.BETWEEN_EVENTS),
        (b"400\r\ndata: one\r\n\r\nda\r\ndata: tw", CutPoint.BETWEEN_EVENTS),
        (b"20\r\ndata: one\r\n\r\nda\r\ndata: tw", CutPoint.BETWEEN_EVENTS),
        (chunk(EVENTS[0]) + b"9\r\ndata: two", CutPoint.BETWEEN_EVENTS),
        (chunk(EVENTS[0]) + b"9;a=b\r\ndata: t", CutPoint.BETWEEN_EVENTS),
        (chunk(EVENTS[0]) + b"9\r\ndata: two\r", CutPoint.BETWEEN_EVENTS),
        (chunk(EVENTS[0]) + b"7fffffff\r\ndata: two", CutPoint.BETWEEN_EVENTS),
        (b"400\r\ndata: one\r\n\r\n", CutPoint.BETWEEN_EVENTS),
        (b"400\r\ndata: one\r\n\r\ndata: tw", CutPoint.BETWEEN_EVENTS),
        (b"400\r\ndata: one\r\n\r\n: comment", CutPoint.BETWEEN_EVENTS),
        (b"20000\r\n" + b"x" * 70_000, CutPoint.WITHIN_EVENT),
    ],
)
def test_the_cut_point_of_a_stream(wire_bytes: bytes, point: CutPoint) -> None:
    head = ResponseHead(STREAM, b"POST")
    chunks = EventChunks(head, wire=True)
    if wire_bytes:
        head.framing.feed(wire_bytes, None)
    chunks.take(wire_bytes)
    assert chunks.cut_point() is point
