"""The stream's state machine: picks, bodies that pass unchanged, and the end of a request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract import headers as wire
from tandem_epp.exchange import HeaderChanges, HttpRequest, NotPlaced, Reply, ResponseHeaders
from tandem_epp.request.answered_model import AnsweredModel
from tandem_epp.server.ext_proc.messages import (
    Answer,
    BodyMode,
    Continue,
    Part,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseTrailers,
    StreamedChunk,
)
from tandem_epp.server.ext_proc.stream import CHUNK, ExtProcStream, shared_parts

DUPLEX, BUFFERED = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED
POST = HttpRequest("POST", "/v1/completions", {})
LIMIT = 1 << 20
TOO_LARGE = Reply(413, b"too large")
TOO_SLOW = Reply(408, b"too slow")
FULL = Reply(503, b"full")
IN_PIECES = Reply(400, b"in pieces")
REFUSAL = Reply(400, b"bad")


@dataclass
class Placement:
    mutation: HeaderChanges
    timings: list[str | None] = field(default_factory=list)
    ended: int = 0
    response_headers: tuple[tuple[str, str], ...] = ()
    answered_model: AnsweredModel | None = None
    body: bytes | None = None

    def take_body(self) -> bytes | None:
        return self.body

    def on_response_headers(self, response: ResponseHeaders, now: float) -> None:
        self.timings.append(response.timing)

    def end(self, now: float) -> None:
        assert now == 2.0
        self.ended += 1


@dataclass
class Placer:
    """Places every request, with the body in the mutation; refuses the body `bad`."""

    placements: list[Placement] = field(default_factory=list)

    def needs_body(self, request: HttpRequest) -> bool:
        return request.path == POST.path

    def place(self, request: HttpRequest, body: bytes | None, now: float) -> Placement:
        if body == b"bad":
            raise NotPlaced(REFUSAL)
        mutation = HeaderChanges((("picked", str(hash(body))),), (), f"{len(body or b'')}:{now}")
        self.placements.append(Placement(mutation))
        return self.placements[-1]

    def body_too_large(self, request: HttpRequest | None, limit: int) -> NotPlaced:
        return NotPlaced(TOO_LARGE)

    def body_too_slow(self, request: HttpRequest | None) -> NotPlaced:
        return NotPlaced(TOO_SLOW)

    def body_in_pieces(self, request: HttpRequest | None) -> NotPlaced:
        return NotPlaced(IN_PIECES)

    def memory_full(self, request: HttpRequest | None) -> NotPlaced:
        return NotPlaced(FULL)


def split_at(body: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(body) + 1) for c in cuts), len(body)]
    return [body[a:b] for a, b in pairwise(edges)]


def drive(stream: ExtProcStream, pieces: list[bytes], *, trailers: bool) -> list[Answer]:
    answers = [*stream.receive(RequestHeaders(POST, False, DUPLEX), 1.0)]
    for i, piece in enumerate(pieces):
        end = i == len(pieces) - 1 and not trailers
        answers += stream.receive(RequestBody(piece, end), 1.0)
    if trailers:
        answers += stream.receive(RequestTrailers(), 1.0)
    return answers


@given(
    st.binary(max_size=200).map(lambda seed: seed * 700),
    st.lists(st.integers(min_value=0), max_size=6),
    st.booleans(),
)
def test_chunk_sizes_change_neither_the_pick_nor_the_body(
    body: bytes, cuts: list[int], trailers: bool
) -> None:
    placer = Placer()
    stream = ExtProcStream(placer, LIMIT)
    first, *remaining = drive(stream, split_at(body, cuts), trailers=trailers)
    assert first == Continue(Part.REQUEST_HEADERS, placer.placements[0].mutation)
    assert placer.placements[0].mutation.destination == f"{len(body)}:1.0"
    if trailers:
        assert remaining.pop() == Continue(Part.REQUEST_TRAILERS)
    chunks = [answer for answer in remaining if isinstance(answer, StreamedChunk)]
    assert chunks == remaining
    assert b"".join(chunk.body for chunk in chunks) == body
    assert all(len(chunk.body) <= CHUNK for chunk in chunks)
    ends = [chunk.end_of_stream for chunk in chunks]
    assert ends == [*[False] * (len(ends) - 1), True][: len(ends)] or trailers
    assert not (trailers and any(ends))


def test_in_buffered_mode_headers_pass_and_the_body_decides() -> None:
    placer = Placer()
    stream = ExtProcStream(placer, LIMIT)
    headers = stream.receive(RequestHeaders(POST, False, BUFFERED), 1.0)
    assert headers == (Continue(Part.REQUEST_HEADERS),)
    body = stream.receive(RequestBody(b"whole", True), 1.0)
    assert body == (Continue(Part.REQUEST_BODY, placer.placements[0].mutation),)


@pytest.mark.parametrize("mode", list(BodyMode))
def test_a_request_without_a_body_is_answered_at_once(mode: BodyMode) -> None:
    placer = Placer()
    answers = ExtProcStream(placer, LIMIT).receive(RequestHeaders(POST, True, mode), 1.0)
    assert answers == (Continue(Part.REQUEST_HEADERS, placer.placements[0].mutation),)


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL])
def test_in_other_modes_the_headers_decide(mode: BodyMode) -> None:
    placer = Placer()
    stream = ExtProcStream(placer, LIMIT)
    assert stream.receive(RequestHeaders(POST, False, mode), 1.0)[0] == Continue(
        Part.REQUEST_HEADERS, placer.placements[0].mutation
    )
    assert stream.receive(RequestBody(b"x", True), 1.0) == (Continue(Part.REQUEST_BODY),)


def test_a_body_that_is_not_read_passes_through_whatever_its_size() -> None:
    stream = ExtProcStream(Placer(), 10)
    upload = HttpRequest("POST", "/upload", {})
    assert len(stream.receive(RequestHeaders(upload, False, DUPLEX), 1.0)) == 1
    assert stream.receive(RequestBody(b"x" * 50, False), 1.0) == (
        StreamedChunk(Part.REQUEST_BODY, b"x" * 50, False),
    )
    assert stream.receive(RequestBody(b"", True), 1.0) == (
        StreamedChunk(Part.REQUEST_BODY, b"", True),
    )


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
@pytest.mark.parametrize(("body", "answer"), [(b"bad", REFUSAL), (b"x" * 11, TOO_LARGE)])
def test_no_answer_follows_an_immediate_response(
    mode: BodyMode, body: bytes, answer: Reply
) -> None:
    placer = Placer()
    stream = ExtProcStream(placer, 10)
    stream.receive(RequestHeaders(POST, False, mode), 1.0)
    assert stream.receive(RequestBody(body, True), 1.0) == (answer,)
    assert stream.receive(RequestBody(b"more", True), 1.0) == ()
    stream.close(2.0)
    assert placer.placements == []


def test_a_body_is_refused_as_soon_as_it_is_too_large() -> None:
    stream = ExtProcStream(Placer(), 10)
    stream.receive(RequestHeaders(POST, False, DUPLEX), 1.0)
    assert stream.receive(RequestBody(b"x" * 10, False), 1.0) == ()
    assert stream.receive(RequestBody(b"x", False), 1.0) == (TOO_LARGE,)


@pytest.mark.parametrize(("size", "count"), [(1, 4162), (32, 8193), (64, None), (4096, None)])
def test_a_body_in_many_small_parts_is_refused(size: int, count: int | None) -> None:
    stream = ExtProcStream(Placer(), 32 << 20)
    stream.receive(RequestHeaders(POST, False, DUPLEX), 1.0)
    part, sent = RequestBody(b"x" * size, False), 1
    while not (answers := stream.receive(part, 1.0)) and sent * size < 20 << 20:
        sent += 1
    assert (answers, sent if answers else None) == ((IN_PIECES,) if count else (), count)


def test_bodies_in_small_parts_share_what_they_take() -> None:
    parts, taken = shared_parts(), []
    for _ in range(10):
        stream, sent = ExtProcStream(Placer(), LIMIT, parts=parts), 0
        stream.receive(RequestHeaders(POST, False, DUPLEX), 1.0)
        while sent < 4000 and not stream.receive(RequestBody(b"x", False), 1.0):
            sent += 1
        taken.append(sent)
        # A body of ordinary parts is taken meanwhile.
        ordinary = ExtProcStream(Placer(), 32 << 20, parts=parts)
        body = [b"x" * 1000] * 10_000 + [b"y"] * 60
        assert IN_PIECES not in drive(ordinary, body, trailers=False)
    assert taken[:3] == [4000] * 3
    assert taken[6:] == [65] * 4
    # A second allows five thousand more.
    stream = ExtProcStream(Placer(), LIMIT, parts=parts)
    stream.receive(RequestHeaders(POST, False, DUPLEX), 2.0)
    assert not any(stream.receive(RequestBody(b"x", False), 2.0) for _ in range(4000))


def test_the_client_gets_the_headers_of_the_placement() -> None:
    placer = Placer()
    stream = ExtProcStream(placer, LIMIT)
    stream.receive(RequestHeaders(POST, True, DUPLEX), 1.0)
    placer.placements[0].response_headers = (("x-session-token", "dA=="),)
    mutations = [
        answer.mutation
        for timing in (None, "queue=1")
        for answer in stream.receive(ResponseHeaders(timing), 1.0)
        if isinstance(answer, Continue)
    ]
    headers = (("x-session-token", "dA=="),)
    assert mutations == [
        HeaderChanges(headers),
        HeaderChanges(headers, remove=("x-tandem-timing",)),
    ]


def test_the_timing_header_is_read_and_removed() -> None:
    placer = Placer()
    stream = ExtProcStream(placer, LIMIT)
    stream.receive(RequestHeaders(POST, True, DUPLEX), 1.0)
    (answer,) = stream.receive(ResponseHeaders("queue=1"), 1.0)
    assert answer == Continue(Part.RESPONSE_HEADERS, HeaderChanges(remove=(wire.TIMING,)))
    assert stream.receive(ResponseHeaders(None), 1.0) == (Continue(Part.RESPONSE_HEADERS),)
    assert placer.placements[0].timings == ["queue=1", None]


def test_response_bodies_are_returned_unchanged() -> None:
    stream = ExtProcStream(Placer(), LIMIT)
    stream.receive(RequestHeaders(POST, True, DUPLEX, DUPLEX), 1.0)
    assert stream.receive(ResponseBody(b"token", False), 1.0) == (
        StreamedChunk(Part.RESPONSE_BODY, b"token", False),
    )
    assert stream.receive(ResponseTrailers(), 1.0) == (Continue(Part.RESPONSE_TRAILERS),)
    plain = ExtProcStream(Placer(), LIMIT)
    plain.receive(RequestHeaders(POST, True, BUFFERED, BodyMode.STREAMED), 1.0)
    assert plain.receive(ResponseBody(b"token", True), 1.0) == (Continue(Part.RESPONSE_BODY),)


def test_the_end_is_reported_once_and_only_for_placed_requests() -> None:
    placer = Placer()
    stream = ExtProcStream(placer, LIMIT)
    stream.receive(RequestHeaders(POST, False, DUPLEX), 1.0)
    stream.close(2.0)
    assert placer.placements == []
    stream = ExtProcStream(placer, LIMIT)
    stream.receive(RequestHeaders(POST, True, DUPLEX), 1.0)
    assert stream.is_placed
    stream.close(2.0)
    stream.close(2.0)
    assert placer.placements[0].ended == 1


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=3), st.booleans())
def test_the_body_is_known_before_the_message_that_completes_it(
    body: bytes, cuts: list[int], trailers: bool
) -> None:
    """What the EPP finds out about a body reaches the pick with the request."""
    stream, pieces = ExtProcStream(picker := _Preparing(), LIMIT), split_at(body, cuts)
    messages = [RequestBody(piece, False) for piece in pieces]
    messages += [RequestTrailers() if trailers else RequestBody(b"", True)]
    stream.receive(RequestHeaders(POST, False, DUPLEX), 1.0)
    for message in messages[:-1]:
        assert stream.complete_body(message) is None
        stream.receive(message, 1.0)
    assert stream.complete_body(messages[-1]) == (POST, body)
    stream.prepare("found")
    stream.receive(messages[-1], 1.0)
    assert picker.preparations == ["found"]
    assert stream.complete_body(messages[-1]) is None


def test_a_buffered_body_is_complete_at_once_and_one_too_large_never() -> None:
    stream = ExtProcStream(Placer(), 4)
    assert stream.complete_body(RequestHeaders(POST, False, BUFFERED)) is None
    stream.receive(RequestHeaders(POST, False, BUFFERED), 1.0)
    assert stream.complete_body(RequestBody(b"body", False)) == (POST, b"body")
    assert stream.complete_body(RequestBody(b"large", True)) is None
    assert stream.complete_body(ResponseHeaders(None)) is None


@dataclass
class _Preparing(Placer):
    """Records what the request was prepared with."""

    preparations: list[object] = field(default_factory=list)

    def place(self, request: HttpRequest, body: bytes | None, now: float) -> Placement:
        self.preparations.append(request.preparation)
        return super().place(request, body, now)


def changing(mode: BodyMode, response: BodyMode) -> tuple[ExtProcStream, Placement]:
    """A stream whose pick changed body and model."""
    placer = Placer()
    stream = ExtProcStream(placer, LIMIT)
    stream.receive(RequestHeaders(POST, False, mode, response), 1.0)
    stream.receive(RequestBody(b"{}", True), 1.0)
    (placement,) = placer.placements
    placement.answered_model = AnsweredModel("t", "asked")
    return stream, placement


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (
            BodyMode.FULL_DUPLEX_STREAMED,
            [
                StreamedChunk(Part.RESPONSE_BODY, b'{"model":"asked",', False),
                StreamedChunk(Part.RESPONSE_BODY, b'"model": "t', False),
                Continue(Part.RESPONSE_TRAILERS),
            ],
        ),
        (
            BodyMode.STREAMED,
            [
                Continue(Part.RESPONSE_BODY, body=b'{"model":"asked",'),
                Continue(Part.RESPONSE_BODY),
                Continue(Part.RESPONSE_BODY),
                Continue(Part.RESPONSE_TRAILERS),
            ],
        ),
    ],
)
def test_the_model_of_an_answer_is_changed(mode: BodyMode, expected: list[Answer]) -> None:
    stream, _ = changing(BodyMode.FULL_DUPLEX_STREAMED, mode)
    (headers,) = stream.receive(ResponseHeaders(None), 1.0)
    assert isinstance(headers, Continue)
    assert headers.mutation is not None
    assert "content-length" in headers.mutation.remove
    chunks = (b'{"model":"t",', b'"model":', b' "t')
    answers = [a for chunk in chunks for a in stream.receive(ResponseBody(chunk, False), 1.0)]
    assert [*answers, *stream.receive(ResponseTrailers(), 1.0)] == expected
    stream.close(2.0)


def test_an_answer_that_does_not_pass_keeps_its_length() -> None:
    stream, _ = changing(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE)
    assert stream.receive(ResponseHeaders(None), 1.0) == (Continue(Part.RESPONSE_HEADERS),)
    stream.close(2.0)


def test_a_gateway_that_sends_no_bodies_is_asked_for_those_that_change() -> None:
    stream, _ = changing(BodyMode.BUFFERED, BodyMode.NONE)
    (headers,) = stream.receive(ResponseHeaders(None), 1.0)
    assert isinstance(headers, Continue)
    assert headers.asks_for_body
    assert headers.mutation is not None
    assert "content-length" in headers.mutation.remove
    chunks = ((b'{"mod', False), (b'el": "t"', False), (b"}", True))
    sent = b""
    for body, end in chunks:
        (answer,) = stream.receive(ResponseBody(body, end), 1.0)
        assert isinstance(answer, Continue)
        sent += body if answer.body is None else answer.body
    assert sent == b'{"model": "asked"}'


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE])
def test_no_other_gateway_is_asked_for_a_body(mode: BodyMode) -> None:
    stream, _ = changing(mode, BodyMode.NONE)
    (headers,) = stream.receive(ResponseHeaders(None), 1.0)
    assert isinstance(headers, Continue)
    assert not headers.asks_for_body
