"""Requests are parsed however the bytes are split; ambiguous ones are refused."""

import tracemalloc
from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_http1.messages import Request
from tandem_http1.reader import MAX_HEADERS, MAX_PIPELINED, PROGRESS, RequestReader

POST = b"POST /x HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


def read(data: bytes, cuts: list[int] | None = None) -> RequestReader:
    """A reader that was fed `data` in pieces of the sizes `cuts`, repeated."""
    reader, at = RequestReader(max_head=4096, max_body=1000), 0
    for size in (cuts or [len(data)]) * len(data):
        if at >= len(data):
            break
        reader.feed(data[at : at + size])
        at += size
    return reader


def only(reader: RequestReader) -> Request:
    assert reader.refusal is None
    [request] = reader.requests
    return request


SEVERAL = (
    POST + b"content-length: 5\r\n\r\nhello" + CHUNKED + b"2;a=b\r\nhi\r\n0\r\nx: trailer\r\n\r\n"
    b"GET /y?z HTTP/1.1\r\nHost: x\r\nX-Odd:  a: b \t\r\nx-odd: \xff\r\n\r\n"
    b"OPTIONS * HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"
    b"POST /up HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    b"content-length: 2\r\n\r\n{}"
)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_requests_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    reader = read(SEVERAL, cuts)
    assert reader.refusal is None
    assert not reader.started
    assert list(reader.requests) == list(read(SEVERAL).requests)
    assert [(r.method, r.target, r.body, r.http10, r.keep_alive) for r in reader.requests] == [
        (b"POST", b"/x", b"hello", False, True),
        (b"POST", b"/x", b"hi", False, True),
        (b"GET", b"/y?z", b"", False, True),
        (b"OPTIONS", b"*", b"", True, True),
        (b"POST", b"/up", b"{}", False, True),
    ]
    headers = reader.requests[2].headers
    assert headers == [(b"host", b"x"), (b"x-odd", b"a: b"), (b"x-odd", b"\xff")]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n", 400),
        (POST + b"content-length: 1\r\ncontent-length: 1\r\n\r\nx", 400),
        (POST + b"content-length: 1, 1\r\n\r\nx", 400),
        (POST + b"content-length: +1\r\n\r\nx", 400),
        (POST + b"content-length: 0x1\r\n\r\nx", 400),
        (POST + b"content-length : 1\r\n\r\nx", 400),
        (POST + b"content-length: 99999999999999999999999\r\n\r\nx", 400),
        (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"transfer-encoding: chunked, gzip\r\n\r\n", 400),
        (POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/2.0\r\nhost: x\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (CHUNKED + b"1\nx\r\n0\r\n\r\n", 400),
        (CHUNKED + b"1\r\nxy\r\n0\r\n\r\n", 400),
        (CHUNKED + b"-1\r\n\r\n", 400),
        (CHUNKED + b"fffffffffffffffff\r\n", 400),
        (CHUNKED + b"1;" + b"a" * 10_000 + b"\r\nx\r\n", 400),
        (CHUNKED + b"0\r\n" + b"trailer: x\r\n" * 1000, 400),
        (b"GET / HTTP/1.1\nhost: x\n\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: b\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: b\rc\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: \0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET /a#b HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET * HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET ftp://x/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 501),
        (b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * MAX_HEADERS + b"\r\n", 431),
        (b"GET /" + b"x" * 5000, 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 5000, 431),
        (POST + b"content-length: 1001\r\n\r\n", 413),
        (POST + b"content-encoding: gzip\r\ncontent-length: 1\r\n\r\nx", 415),
        (POST + b"Content-Encoding: x\r\ncontent-encoding: identity\r\n\r\n", 415),
        (POST + b"content-encoding: identity, br\r\n\r\n", 415),
        (CHUNKED + b"3e9\r\n" + b"x" * 1001, 413),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * (MAX_PIPELINED + 1), 429),
    ],
)
@pytest.mark.parametrize("cuts", [None, [1]])
def test_ambiguous_or_oversized_requests_are_refused(
    data: bytes, status: int, cuts: list[int] | None
) -> None:
    reader = read(data, cuts)
    assert reader.refusal is not None
    assert reader.refusal.status == status
    assert len(reader.requests) == (MAX_PIPELINED if status == 429 else 0)
    after = len(reader.requests)
    reader.feed(b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n")
    assert len(reader.requests) == after


@pytest.mark.parametrize("value", [b"", b"identity", b"IDENTITY, identity"])
def test_a_body_as_it_is_may_say_so(value: bytes) -> None:
    request = only(read(POST + b"content-encoding: %b\r\ncontent-length: 1\r\n\r\nx" % value))
    assert request.body == b"x"


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://other/v1/completions?a=b", b"/v1/completions?a=b"),
        (b"HTTPS://other:8000", b"/"),
        (b"http://other?a=b", b"/?a=b"),
        (b"/v1/%63ompletions", b"/v1/%63ompletions"),
        (b"//v1/http://x", b"//v1/http://x"),
    ],
)
def test_an_absolute_target_is_the_path_it_names(target: bytes, path: bytes) -> None:
    assert only(read(b"GET " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n")).target == path


def test_options_of_a_whole_server() -> None:
    assert only(read(b"OPTIONS http://x HTTP/1.1\r\nhost: x\r\n\r\n")).target == b"*"


def test_progress_of_a_body_extends_the_deadline() -> None:
    """Single bytes extend nothing: milestones are the head and each full piece of the body."""
    reader = RequestReader(max_head=4096, max_body=10 * PROGRESS)
    reader.feed(POST + b"content-length: %d\r\n\r\n" % (4 * PROGRESS))
    milestones = reader.milestones
    for piece, earned in ((b"x" * 1000, 0), (b"x" * PROGRESS, 1), (b"x" * 2 * PROGRESS, 3)):
        reader.feed(piece)
        assert reader.milestones == milestones + earned


@pytest.mark.parametrize("surplus", [b"", b"GET /n HTTP/1.1\r\nhost: x\r\n\r\n", b"\x81\x00"])
def test_bytes_after_an_upgrade_request_are_retained(surplus: bytes) -> None:
    ask = b"GET /w HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: h2c, websocket\r\n\r\n"
    reader = read(ask + surplus)
    assert only(reader).upgrade == b"websocket"
    reader.feed(b"more")
    assert reader.take_after_upgrade() == surplus + b"more"


def test_reading_resumes_after_a_refused_upgrade() -> None:
    ask = b"GET /w HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    reader = read(ask * 3)
    for _ in repeat(None, 3):
        assert only(reader).upgrade == b"websocket"
        reader.requests.clear()
        reader.resume()
    assert not reader.started
    assert reader.refusal is None


@given(st.binary(max_size=300), st.integers(0, len(SEVERAL)), st.integers(0, 40))
@settings(deadline=None, max_examples=150)
def test_no_bytes_raise(noise: bytes, at: int, overwritten: int) -> None:
    reader = read(SEVERAL[:at] + noise + SEVERAL[at + overwritten :], [7])
    reader.resume()
    assert len(reader.requests) <= MAX_PIPELINED


def test_a_head_is_bounded_wherever_it_begins_and_ends_in_a_read() -> None:
    reader, get = RequestReader(max_head=1000, max_body=1000), b"GET / HTTP/1.1\r\nhost: x\r\n"
    reader.feed(get + b"\r\n" + get + b"a: bbbb\r\n" * 80)
    reader.feed(b"c: " + b"x" * 700 + b"\r\n\r\n")
    assert len(reader.requests) == 1
    assert reader.refusal is not None
    assert reader.refusal.status == 431


@pytest.mark.parametrize("size", [1, 3, 16, 4096])
def test_a_body_in_chunks_takes_less_than_twice_its_memory(size: int) -> None:
    total = 1_000_000
    chunks = (b"%x\r\n%b\r\n" % (size, b"x" * size)) * (total // size)
    reader = RequestReader(max_head=65536, max_body=2 * total)
    reader.feed(CHUNKED)
    tracemalloc.start()
    try:
        for at in range(0, len(chunks), 65536):
            reader.feed(chunks[at : at + 65536])
        reader.feed(b"0\r\n\r\n")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    body = only(reader).body
    assert body == b"x" * (total // size * size)
    assert type(body) is bytes
    assert peak < 2 * len(body)
