"""Server-sent events, however the network cuts them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.client.sse import MAX_EVENT, EventParser, EventTooLarge, StreamEvent

STREAM = (
    "\ufeff: a comment\n\ndata: one\n\ndata:two\r\ndata: lines\r\n\r\n"
    "event: error\rid: 7\rretry: 9\rdata: häßlich\r\rdata\n\nevent: lost\n\ndata: [DONE]\n\n"
    "\n\ndata: last\n\ndata: never ended\n"
).encode()
EVENTS = [
    StreamEvent(b"one"),
    StreamEvent(b"two\nlines"),
    StreamEvent("häßlich".encode(), b"error"),
    StreamEvent(b""),
    StreamEvent(b"[DONE]"),
    StreamEvent(b"last"),
]


def fed(chunks: list[bytes]) -> list[StreamEvent]:
    parser = EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def test_events_of_every_form_are_read() -> None:
    assert fed([STREAM]) == EVENTS


def test_events_cut_in_two_anywhere_are_the_same() -> None:
    for cut in range(len(STREAM) + 1):
        assert fed([STREAM[:cut], STREAM[cut:]]) == EVENTS, cut


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_chunk_boundaries_do_not_change_the_events(cuts: list[int]) -> None:
    ends = sorted({*cuts, len(STREAM)})
    assert fed([STREAM[i:j] for i, j in zip([0, *ends], ends, strict=False)]) == EVENTS


def test_single_bytes_do_not_change_the_events() -> None:
    assert fed([bytes([byte]) for byte in STREAM]) == EVENTS


LINES = st.sampled_from(["data: a", "data:b", "data", "event: e", "event", ": c", "id: 1", "x", ""])
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


@given(st.lists(st.tuples(LINES, ENDS), max_size=20), st.integers(0, 200))
def test_any_lines_are_read_as_the_specification_says(
    lines: list[tuple[str, str]], cut: int
) -> None:
    stream = "".join(line + end for line, end in lines).encode()
    assert fed([stream[:cut], stream[cut:]]) == specified(stream)


def specified(stream: bytes) -> list[StreamEvent]:
    """The algorithm of the specification, line by line."""
    # The last line has no end: it is not processed.
    lines = stream.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]
    events, data, name = [], [], ""
    for line in lines:
        if not line:
            if data:
                events.append(StreamEvent("\n".join(data).encode(), (name or "message").encode()))
            data, name = [], ""
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        elif field == "event":
            name = value.removeprefix(" ")
    return events


def test_a_name_does_not_outlive_its_event() -> None:
    events = fed([b"event: error\ndata: a\n\ndata: b\n\n"])
    assert [event.name for event in events] == [b"error", b"message"]


def test_an_event_without_end_is_refused() -> None:
    parser = EventParser()
    assert parser.feed(b"data: first\n\ndata: ") == [StreamEvent(b"first")]
    half = b"x" * (MAX_EVENT // 2)
    assert parser.feed(half) == []
    with pytest.raises(EventTooLarge, match="exceeds 8 MiB"):
        parser.feed(half)


def test_a_large_event_is_read() -> None:
    text = b"x" * (MAX_EVENT - 100)
    parts = [text[i : i + 65536] for i in range(0, len(text), 65536)]
    assert fed([b"data: ", *parts, b"\n\n"]) == [StreamEvent(text)]


def test_many_events_in_one_chunk_may_be_larger_than_one() -> None:
    event = b"data: " + b"x" * 1000 + b"\n\n"
    count = MAX_EVENT // 1000
    assert len(fed([b"data: a", b"\n\n" + event * count])) == count + 1
