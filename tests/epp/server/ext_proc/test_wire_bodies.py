"""Bodies read from bytes are those that protobuf reads; all else is left to protobuf."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.codec import read_message
from tandem_epp.server.ext_proc.messages import RequestBody, ResponseBody
from tandem_epp.server.ext_proc.wire_bodies import head_size, read_body, read_large_body
from tandem_epp.server.http2.pieces import LARGE, Pieces

BODIES = st.binary(max_size=300) | st.sampled_from([b"x" * n for n in (127, 128, 16_384, 70_000)])


@given(BODIES, st.booleans(), st.booleans(), st.booleans())
def test_bodies_as_envoy_sends_them(body: bytes, end: bool, response: bool, metadata: bool) -> None:
    content = pb.HttpBody(body=body, end_of_stream=end)
    message = (
        pb.ProcessingRequest(response_body=content)
        if response
        else pb.ProcessingRequest(request_body=content)
    )
    if metadata:
        message.metadata_context.filter_metadata["envoy.lb"].update({"x": "y" * 200})
    wire = message.SerializeToString()
    read = read_body(wire)
    assert read == (ResponseBody(body, end) if response else RequestBody(body, end))
    assert read == read_message(pb.ProcessingRequest.FromString(wire))
    assert read_body(wire + b"B\0") == (None if metadata else read)


PARTS = [
    *(
        b"\x22",
        b"\x2a",
        b"\x42",
        b"\x0a",
        b"\x10\x01",
        b"\x10\x00",
        b"\0",
        b"\x02",
        b"\x03",
        b"\x04",
    ),
    *(b"\x80\x00", b"\x82\x00", b"ab", b"\xff", b"\x22\x04\x0a\x02ab", b"\x12\x00"),
]


def in_two_parts(wire: bytes) -> RequestBody | ResponseBody | None:
    """What is read of `wire` as of a large message."""
    if not (size := head_size(wire)):
        return None
    rest = Pieces()
    rest.add(wire[size:])
    body = read_large_body(wire[:size], rest)
    assert rest.take() == (b"" if body else wire[size:])
    return body


@settings(max_examples=2000)
@given(st.lists(st.sampled_from(PARTS), max_size=9))
def test_what_is_read_is_what_protobuf_reads(parts: list[bytes]) -> None:
    wire = b"".join(parts)
    if head_size(wire):
        assert in_two_parts(wire) == read_body(wire)
    if (read := read_body(wire)) is None:
        return
    try:
        expected = read_message(pb.ProcessingRequest.FromString(wire))
    except DecodeError:
        # Only the metadata is malformed, which no body message is read for.
        size = wire.index(b"\x42")
        expected = read_message(pb.ProcessingRequest.FromString(wire[:size]))
    assert read == expected


@pytest.mark.parametrize(
    "message",
    [
        pb.ProcessingRequest(),
        pb.ProcessingRequest(response_headers=pb.HttpHeaders()),
        pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
        pb.ProcessingRequest(
            request_body=pb.HttpBody(), protocol_config={"request_body_mode": 2}  # type: ignore
        ),
    ],
)  # fmt: skip
def test_other_messages_are_left_to_protobuf(message: pb.ProcessingRequest) -> None:
    assert read_body(message.SerializeToString()) is None


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("metadata", [b"", b"\x42\x00", b"\x42\x02ab", b"\x42\x02a", b"\x42", b"x"])
def test_a_large_body_in_two_parts(end: bool, metadata: bytes) -> None:
    body = pb.HttpBody(body=b"0123456789" * (LARGE // 9), end_of_stream=end)
    wire = pb.ProcessingRequest(request_body=body).SerializeToString() + metadata
    assert in_two_parts(wire) == read_body(wire)
    for size in range(head_size(wire)):
        assert head_size(wire[:size]) == 0
