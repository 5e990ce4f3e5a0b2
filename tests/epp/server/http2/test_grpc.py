"""gRPC's framing, fields and status."""

from itertools import pairwise

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from tandem_epp.server.http2 import grpc
from tandem_epp.server.http2.errors import CallFault, Status


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(0, 500), max_size=12))
def test_messages_are_found_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(map(grpc.framed, messages))
    edges = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    reader, found = grpc.MessageReader(50), []
    for start, end in pairwise(edges):
        if start < end:
            found += reader.feed(wire[start:end])
    assert found == messages
    assert not reader.is_within_message


def test_a_message_that_is_too_large_is_refused_by_its_prefix() -> None:
    with pytest.raises(CallFault) as fault:
        grpc.MessageReader(10).feed(b"\0\0\0\0\x0b")
    assert fault.value.status is Status.RESOURCE_EXHAUSTED


def test_a_compressed_message_is_refused() -> None:
    with pytest.raises(CallFault) as fault:
        grpc.MessageReader(10).feed(b"\x01\0\0\0\x01x")
    assert fault.value.status is Status.UNIMPLEMENTED


def test_a_message_in_single_bytes_is_joined_once() -> None:
    reader, wire = grpc.MessageReader(1 << 20), grpc.framed(bytes(5000))
    for n in range(len(wire) - 1):
        assert reader.feed(wire[n : n + 1]) == []
        assert reader.is_within_message
    assert reader.feed(wire[-1:]) == [bytes(5000)]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1H", 3600),
        ("2M", 120),
        ("3S", 3),
        ("500m", 0.5),
        ("20u", 2e-5),
        ("99999999n", 0.099999999),
    ],
)
def test_timeouts(text: str, seconds: float) -> None:
    assert grpc.timeout({"grpc-timeout": text}) == pytest.approx(seconds)
    assert grpc.timeout({}) is None


@pytest.mark.parametrize("text", ["", "S", "1", "1s", "123456789S", "-1S", "1.5S", "٣S", "1 S"])
def test_malformed_timeouts(text: str) -> None:
    with pytest.raises(CallFault):
        grpc.timeout({"grpc-timeout": text})


@pytest.mark.parametrize(
    ("kind", "is_grpc"),
    [
        ("application/grpc", True),
        ("application/grpc+proto", True),
        ("application/grpc;x=y", True),
        ("application/grpc-web", False),
        ("application/json", False),
        ("", False),
    ],
)
def test_content_types(kind: str, is_grpc: bool) -> None:
    assert grpc.is_grpc({"content-type": kind}) is is_grpc


def fields(block: bytes) -> dict[str, str]:
    return {str(name): str(value) for name, value in Decoder().decode(block)}


def test_the_status_is_in_the_trailers() -> None:
    assert fields(grpc.trailers(Status.OK)) == {"grpc-status": "0"}
    assert fields(grpc.trailers(Status.NOT_FOUND, "100 % ü\n")) == {
        "grpc-status": "5",
        "grpc-message": "100 %25 %C3%BC%0A",
    }
    alone = fields(grpc.trailers_only(Status.UNIMPLEMENTED, "x"))
    assert (alone[":status"], alone["grpc-status"]) == ("200", "12")
    assert fields(grpc.RESPONSE) == {":status": "200", "content-type": "application/grpc"}
