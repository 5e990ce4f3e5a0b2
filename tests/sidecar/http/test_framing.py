"""Where a body ends, however its bytes are split into reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_http1.framing import LAST_CHUNK, BadFraming, Chunked, Sized, UntilClose, chunk


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.sampled_from([b"", b"x-a: b\r\n", b"x-a: b\r\nc: d\r\n"]),
    st.booleans(),
)
def test_the_end_of_a_chunked_body_is_found(
    parts: list[bytes], cuts: list[int], trailers: bytes, wanted: bool
) -> None:
    data = b"".join(map(chunk, parts)) + b"0;ext=1\r\n" + trailers + b"\r\n"
    framing, consumed = Chunked(), 0
    payload: list[bytes] | None = [] if wanted else None
    sizes = iter(cuts * len(data))
    while consumed < len(data):
        assert not framing.done
        assert not framing.complete_at_eof()
        consumed += framing.feed(data[consumed : consumed + next(sizes)], payload)
    assert framing.done
    assert framing.complete_at_eof()
    assert payload is None or b"".join(payload) == b"".join(parts)


@given(
    st.lists(st.lists(st.binary(min_size=1, max_size=2000), min_size=1, max_size=3), max_size=6),
    st.integers(0, 7),
    st.integers(1, 9),
    st.booleans(),
)
def test_reads_of_whole_chunks(
    reads: list[list[bytes]], split_read: int, at: int, wanted: bool
) -> None:
    """As engines write them, but for one read that ends anywhere."""
    pieces = [b"".join(map(chunk, parts)) for parts in reads] + [LAST_CHUNK]
    if split_read < len(pieces):
        whole = pieces[split_read]
        pieces[split_read : split_read + 1] = filter(None, (whole[:at], whole[at:]))
    framing = Chunked()
    payload: list[bytes] | None = [] if wanted else None
    for piece in pieces:
        assert not framing.done
        assert framing.feed(piece, payload) == len(piece)
    assert framing.done
    assert payload is None or b"".join(payload) == b"".join(map(b"".join, reads))


@pytest.mark.parametrize(
    ("data", "unsent", "between"),
    [
        (chunk(b"data: a\n\n"), b"", True),
        (chunk(b"data: a\n\n") + chunk(b"data: b"), chunk(b"data: b"), False),
        (chunk(b"data: a\n\n") + b"5", b"", False),
        (chunk(b"data: a\n\n") + b"5\r\ndata", b"", False),
    ],
)
def test_where_another_chunk_may_follow(data: bytes, unsent: bytes, between: bool) -> None:
    framing = Chunked()
    framing.feed(data, None)
    assert framing.ends_between_chunks(unsent) is between


@given(
    st.binary(max_size=20),
    st.sampled_from(
        [b"\n", b"\r", b"\r\n", b"\r\n\r\n", b"\r\n\r", b"x", b"HTTP/1.1 200 OK\r\n\r\n"]
    ),
    st.integers(0, 5),
)
def test_bytes_after_the_last_chunk_are_refused(part: bytes, surplus: bytes, cut: int) -> None:
    """They would be parsed as the next answer."""
    data = (chunk(part) if part else b"") + LAST_CHUNK
    framing = Chunked()
    framing.feed(data[: len(data) - cut - 1], None)
    with pytest.raises(BadFraming):
        framing.feed(data[len(data) - cut - 1 :] + surplus, None)


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\n",
        b"\r\n",
        b"-1\r\n",
        b"1_0\r\n",
        b"0x1\r\n",
        b"1\n",
        b"3\r\nabcdef",
        b"1" * 5000,
        b"f" * 100_000,
    ],
)
def test_broken_chunks_are_refused(data: bytes) -> None:
    with pytest.raises(BadFraming):
        Chunked().feed(data, None)


def test_sized() -> None:
    framing, payload = Sized(5), list[bytes]()
    assert framing.feed(b"abc", payload) == 3
    assert not framing.complete_at_eof()
    assert framing.feed(b"defg", payload) == 2
    assert framing.done
    assert payload == [b"abc", b"de"]
    assert Sized(0).done


def test_until_close() -> None:
    framing = UntilClose()
    assert framing.feed(b"abc", None) == 3
    assert not framing.done
    assert framing.complete_at_eof()


def test_last_chunk_ends_a_message() -> None:
    framing = Chunked()
    assert framing.feed(LAST_CHUNK, None) == len(LAST_CHUNK)
    assert framing.done
