"""Answers written as bytes are the messages that protobuf writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_epp.exchange import HeaderChanges, Reply
from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.codec import write_answer
from tandem_epp.server.ext_proc.messages import Answer, Continue, Part, StreamedChunk
from tandem_epp.server.ext_proc.stream import CHUNK
from tandem_epp.server.ext_proc.wire_answers import encode_answer, encode_head
from tandem_epp.server.http2.grpc import MessageReader

NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=200)
VALUES = st.text(st.characters(max_codepoint=255), max_size=300)
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=5).map(tuple)
MUTATIONS = st.builds(
    HeaderChanges,
    HEADERS,
    st.lists(NAMES, max_size=12).map(tuple),
    st.none() | st.text(max_size=60),
)
BODIES = st.binary(max_size=300) | st.sampled_from([b"x" * n for n in (127, 128, 16_383, CHUNK)])
ANSWERS = st.one_of(
    st.builds(Continue, st.sampled_from(Part), st.none()),
    st.builds(
        Continue, st.sampled_from([part for part in Part if "TRAILERS" not in part.name]), MUTATIONS
    ),
    st.builds(StreamedChunk, st.sampled_from([Part.REQUEST_BODY, Part.RESPONSE_BODY]), BODIES,
              st.booleans()),
    st.builds(Reply, st.integers(100, 599), st.binary(max_size=300), HEADERS),
)  # fmt: skip


def decoded(wire: bytes) -> pb.ProcessingResponse:
    (message,) = MessageReader(1 << 20).feed(wire)
    return pb.ProcessingResponse.FromString(message)


@given(ANSWERS)
def test_the_bytes_mean_what_protobuf_would_write(answer: Answer) -> None:
    assert decoded(encode_answer(answer)) == write_answer(answer)
    # Again, from what the first call may have kept.
    assert decoded(encode_answer(answer)) == write_answer(answer)


@pytest.mark.parametrize("end", [False, True])
def test_chunks_of_every_length_of_length(end: bool) -> None:
    for size in (*range(140), *range(16_200, 16_400, 7), CHUNK - 1, CHUNK):
        answer = StreamedChunk(Part.RESPONSE_BODY, b"x" * size, end)
        assert decoded(encode_answer(answer)) == write_answer(answer), size


@given(st.sampled_from([Part.REQUEST_BODY, Part.RESPONSE_BODY]), st.none() | MUTATIONS, BODIES)
def test_a_body_behind_its_head(part: Part, mutation: HeaderChanges | None, body: bytes) -> None:
    answer = Continue(part, mutation, body)
    assert decoded(encode_head(answer, len(body)) + body) == write_answer(answer)
