"""Server-sent events, however the network cuts them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.sse import EventParser, ServerSentEvent

STREAM = (
    "\ufeff: a comment\n\ndata: one\n\ndata:two\r\ndata: lines\r\n\r\n"
    "event: error\rid: 7\rretry: 9\rdata: häßlich\r\rdata\n\nevent: lost\n\ndata: [DONE]\n\n"
    "data: never ended\n"
).encode()
EVENTS = [
    ServerSentEvent("one"),
    ServerSentEvent("two\nlines"),
    ServerSentEvent("häßlich", "error"),
    ServerSentEvent(""),
    ServerSentEvent("[DONE]"),
]


def test_events_of_every_form_are_read() -> None:
    assert EventParser().feed(STREAM) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_chunk_boundaries_do_not_change_the_events(cuts: list[int]) -> None:
    ends = sorted({*cuts, len(STREAM)})
    parser = EventParser()
    events = []
    for start, end in zip([0, *ends], ends, strict=False):
        events += parser.feed(STREAM[start:end])
    assert events == EVENTS


def test_single_bytes_do_not_change_the_events() -> None:
    parser = EventParser()
    assert [e for byte in STREAM for e in parser.feed(bytes([byte]))] == EVENTS


def test_a_name_does_not_outlive_its_event() -> None:
    events = EventParser().feed(b"event: error\ndata: a\n\ndata: b\n\n")
    assert [e.name for e in events] == ["error", "message"]


def test_bytes_that_are_not_utf8_are_an_error() -> None:
    with pytest.raises(UnicodeDecodeError):
        EventParser().feed(b"data: \xff\n\n")
