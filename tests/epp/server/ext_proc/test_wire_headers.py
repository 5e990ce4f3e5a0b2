"""Headers read from bytes are those that protobuf reads; all else is left to protobuf."""

from collections.abc import Mapping

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract import headers as names
from tandem_epp.exchange import ResponseHeaders
from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.codec import read_message
from tandem_epp.server.ext_proc.messages import RequestHeaders
from tandem_epp.server.ext_proc.wire_headers import read_headers

pytestmark = pytest.mark.long

NAMES = st.sampled_from(
    [
        *(":method", ":path", "content-type", "x-request-id", "x" * 130),
        *(names.TIMING, names.PREFILL_BACKEND, names.ROUTING_PATH, names.RETRY_AFTER),
    ]
)
VALUES = (
    st.binary(max_size=20)
    | st.sampled_from([b"text/event-stream; charset=utf-8", b"\n\x0a\n\x07:status\x1a\x03500"])
    | st.sampled_from([b"x" * n for n in (127, 128, 600, 20_000)])
)
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=8)
MODES = st.none() | st.tuples(st.integers(0, 5), st.integers(0, 5))


def header_map(headers: list[tuple[str, bytes]]) -> pb.HeaderMap:
    return pb.HeaderMap(headers=[pb.HeaderValue(key=key, raw_value=raw) for key, raw in headers])


def add_attributes(message: pb.ProcessingRequest, attributes: Mapping[str, str]) -> None:
    if attributes:
        message.attributes["envoy.filters.http.ext_proc"].update(attributes)


@given(HEADERS, st.booleans(), MODES, st.none() | st.text(max_size=700))
def test_requests_as_gateways_send_them(
    headers: list[tuple[str, bytes]],
    end: bool,
    modes: tuple[int, int] | None,
    hint: str | None,
) -> None:
    content = pb.HttpHeaders(headers=header_map(headers), end_of_stream=end)
    message = pb.ProcessingRequest(request_headers=content)
    # An empty mode is sent too: that the field is there says something.
    message.request_headers.headers.SetInParent()
    if modes is not None:
        config = message.protocol_config
        config.SetInParent()
        config.request_body_mode, config.response_body_mode = modes
    if hint is not None:
        metadata = message.metadata_context.filter_metadata[names.SUBSET_NAMESPACE]
        metadata.update({names.SUBSET_KEY: hint})
    wire = message.SerializeToString()
    read = read_headers(wire)
    assert isinstance(read, RequestHeaders)
    assert read == read_message(pb.ProcessingRequest.FromString(wire))


@given(
    HEADERS,
    st.integers(100, 999),
    st.dictionaries(
        st.sampled_from([names.UPSTREAM_ADDRESS, names.CODE_DETAILS, "request.id"]),
        st.text(max_size=400),
    ),
)
def test_responses_as_gateways_send_them(
    headers: list[tuple[str, bytes]], status: int, attributes: dict[str, str]
) -> None:
    of_status = (":status", str(status).encode())
    content = pb.HttpHeaders(headers=header_map([of_status, *headers]))
    message = pb.ProcessingRequest(response_headers=content)
    add_attributes(message, attributes)
    wire = message.SerializeToString()
    read = read_headers(wire)
    assert isinstance(read, ResponseHeaders)
    assert read == read_message(pb.ProcessingRequest.FromString(wire))


PARTS = [
    *(b"\x12", b"\x1a", b"\x0a", b"\x1a\x03", b"\x0a\x03", b"\x18\x01", b"\x18\x00", b"\x22\x00"),
    *(b"\0", b"\x02", b"\x03", b"\x04", b"\x07", b"\x0a", b"\x80\x00", b"\x83\x00", b"\xff"),
    *(b"\x0a\x03abc", b"\x1a\x01x", b"\x12\x01y", b"\x0a\x0d\x0a\x07:status\x1a\x02200"),
    *(b"\x0a\x07:status\x1a\x03200", b"\x0a\x0f\x0a\x07:status\x1a\x03200"),
    *(b"\x42\x00", b"\x4a\x00", b"\x5a\x00", b"\x5a\x02\x08\x02", b"\x12\x00", b"\x1a\x00"),
]


@settings(max_examples=4000)
@given(st.sampled_from([b"\x12", b"\x1a"]), st.lists(st.sampled_from(PARTS), max_size=9))
def test_what_is_read_is_what_protobuf_reads(kind: bytes, parts: list[bytes]) -> None:
    content = b"".join(parts)
    for wire in (kind + content, kind + bytes((len(content),)) + content):
        if (read := read_headers(wire)) is None:
            continue
        try:
            expected = read_message(pb.ProcessingRequest.FromString(wire))
        except DecodeError:
            # Only a header that no response is read for is malformed.
            assert isinstance(read, ResponseHeaders)
            continue
        assert read == expected


@pytest.mark.parametrize(
    "message",
    [
        pb.ProcessingRequest(),
        pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x")),
        pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
        # A value that is text and not bytes, as old gateways send it.
        pb.ProcessingRequest(
            request_headers=pb.HttpHeaders(
                headers=pb.HeaderMap(headers=[pb.HeaderValue(key="a", value="b")])
            )
        ),
    ],
)
def test_other_messages_are_left_to_protobuf(message: pb.ProcessingRequest) -> None:
    assert read_headers(message.SerializeToString()) is None


def test_headers_behind_the_context_are_left_to_protobuf() -> None:
    first = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=header_map([(":path", b"/a")])),
        protocol_config=pb.ProtocolConfiguration(request_body_mode=2),
    )
    second = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=header_map([(":path", b"/b")]))
    )
    assert read_headers(first.SerializeToString()) is not None
    assert read_headers(first.SerializeToString() + second.SerializeToString()) is None
