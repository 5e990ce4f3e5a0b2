"""The state machine by the sections of RFC 9113, which the names of the tests cite."""

from collections.abc import Sequence

import pytest

from tandem_epp.server.http2 import frames
from tandem_epp.server.http2.errors import ErrorCode
from tandem_epp.server.http2.frames import (
    ACK,
    END_HEADERS,
    PADDED,
    PRIORITY_FLAG,
    FrameType,
    Setting,
)
from tandem_epp.server.http2.limits import DEFAULT_FRAME, LAST_STREAM, Limits
from tandem_epp.server.http2.stream import DataReceived, RequestReceived, StreamEnded

from .client import BLOCK, START, Peer, data, headers, message, ping

PROTOCOL, FRAME_SIZE = ErrorCode.PROTOCOL_ERROR, ErrorCode.FRAME_SIZE_ERROR


def raw(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return frames.frame(kind, flags, stream, payload)


def u32(number: int) -> bytes:
    return number.to_bytes(4, "big")


# 3.4: the preface


def test_3_4_both_sides_begin_with_settings() -> None:
    peer = Peer()
    first, window, ack = peer.answers(START)
    assert first.kind is FrameType.SETTINGS
    announced = dict(frames.read_settings(first.payload))
    assert announced[Setting.HEADER_TABLE_SIZE] == 0
    assert announced[Setting.MAX_CONCURRENT_STREAMS] == Limits().streams
    assert window.kind is FrameType.WINDOW_UPDATE
    assert (ack.kind, ack.flags) == (FrameType.SETTINGS, ACK)
    assert peer.connection.is_established


@pytest.mark.parametrize(
    "wrong", [b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", b"P?"]
)
def test_3_4_another_preface_ends_the_connection(wrong: bytes) -> None:
    assert Peer().goaway(wrong) is PROTOCOL


@pytest.mark.parametrize("first", [ping(), headers(1), raw(FrameType.SETTINGS, flags=ACK)])
def test_3_4_the_first_frame_must_be_settings(first: bytes) -> None:
    assert Peer().goaway(frames.PREFACE, first) is PROTOCOL


@pytest.mark.parametrize("size", [1, 2, 7, 33])
def test_4_1_frames_may_come_in_any_pieces(size: int) -> None:
    sent = START + headers(1) + message(1, b"hello") + data(1, end=True) + ping()
    peer, events = Peer(), []
    for at in range(0, len(sent), size):
        events += peer.send(sent[at : at + size])
    assert [type(event) for event in events] == [RequestReceived, DataReceived, DataReceived]
    assert peer.received()[-1].flags == ACK


# 4.2: frame size


def test_4_2_a_frame_above_the_announced_size_ends_the_connection() -> None:
    peer = Peer(Limits(frame=16_384)).start()
    assert peer.goaway(headers(1), data(1, bytes(16_385))[:9]) is FRAME_SIZE


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (raw(FrameType.PING, bytes(7)), FRAME_SIZE),
        (raw(FrameType.SETTINGS, bytes(5)), FRAME_SIZE),
        (raw(FrameType.SETTINGS, bytes(6), flags=ACK), FRAME_SIZE),
        (raw(FrameType.RST_STREAM, bytes(3), stream=1), FRAME_SIZE),
        (raw(FrameType.WINDOW_UPDATE, bytes(5)), FRAME_SIZE),
        (raw(FrameType.GOAWAY, bytes(7)), FRAME_SIZE),
        (raw(FrameType.HEADERS, bytes(4), flags=PRIORITY_FLAG, stream=3), FRAME_SIZE),
        (raw(FrameType.DATA, flags=PADDED, stream=1), FRAME_SIZE),
        (raw(FrameType.DATA, b"\x05abc", flags=PADDED, stream=1), PROTOCOL),
        (raw(FrameType.HEADERS, b"\x04abc", flags=PADDED, stream=3), PROTOCOL),
    ],
)
def test_4_2_and_6_frames_of_a_wrong_size_end_the_connection(frame: bytes, code: ErrorCode) -> None:
    assert Peer().start().goaway(headers(1), frame) is code


@pytest.mark.parametrize(
    "frame",
    [
        raw(FrameType.DATA, b"x"),
        raw(FrameType.HEADERS, BLOCK, flags=END_HEADERS),
        raw(FrameType.HEADERS, BLOCK, flags=END_HEADERS, stream=2),
        raw(FrameType.PRIORITY, bytes(5)),
        raw(FrameType.RST_STREAM, bytes(4)),
        raw(FrameType.SETTINGS, stream=1),
        raw(FrameType.PING, bytes(8), stream=1),
        raw(FrameType.GOAWAY, bytes(8), stream=1),
        raw(FrameType.CONTINUATION, BLOCK, flags=END_HEADERS, stream=1),
        raw(FrameType.PUSH_PROMISE, bytes(4) + BLOCK, flags=END_HEADERS, stream=1),
    ],
)
def test_5_1_and_6_frames_on_a_wrong_stream_end_the_connection(frame: bytes) -> None:
    assert Peer().start().goaway(headers(1), frame) is PROTOCOL


def test_4_1_the_reserved_bit_of_a_stream_id_is_ignored() -> None:
    peer = Peer().start()
    (event,) = peer.send(headers(1 | 1 << 31))
    assert event.stream.id == 1


# 4.3, 6.2, 6.10: header blocks


def test_6_10_a_header_block_may_be_continued() -> None:
    peer = Peer().start()
    parts = [headers(1, BLOCK[:10], flags=0)]
    parts += [raw(FrameType.CONTINUATION, BLOCK[at : at + 20], stream=1) for at in (10, 30)]
    assert peer.send(*parts) == []
    (event,) = peer.send(raw(FrameType.CONTINUATION, BLOCK[50:], flags=END_HEADERS, stream=1))
    assert isinstance(event, RequestReceived)
    assert event.head.fields["content-type"] == "application/grpc"


@pytest.mark.parametrize(
    "between",
    [
        ping(),
        raw(FrameType.DATA, b"x", stream=1),
        raw(FrameType.DATA, b"x", stream=3),
        raw(0xBE, b"unknown", stream=3),
        raw(FrameType.CONTINUATION, BLOCK, flags=END_HEADERS, stream=5),
        headers(5),
    ],
)
def test_6_10_nothing_may_come_within_a_header_block(between: bytes) -> None:
    begun = headers(1), headers(3, BLOCK[:10], flags=0)
    assert Peer().start().goaway(*begun, between) is PROTOCOL


def test_6_1_and_6_2_padding_and_priority_are_removed() -> None:
    peer = Peer().start()
    padded = b"\x02" + u32(0) + b"\x10" + BLOCK + bytes(2)
    flags = PADDED | PRIORITY_FLAG | END_HEADERS
    content = raw(FrameType.DATA, b"\x03abc" + bytes(3), flags=PADDED, stream=1)
    request, received = peer.send(raw(FrameType.HEADERS, padded, flags=flags, stream=1), content)
    assert isinstance(request, RequestReceived)
    assert isinstance(received, DataReceived)
    assert received.data == b"abc"


def test_5_3_a_stream_that_depends_on_itself_is_reset() -> None:
    peer = Peer().start()
    block = u32(1) + b"\x10" + BLOCK
    own = raw(FrameType.HEADERS, block, flags=PRIORITY_FLAG | END_HEADERS, stream=1)
    assert peer.reset(own) == (1, PROTOCOL)
    assert peer.reset(raw(FrameType.PRIORITY, u32(5) + b"\x10", stream=5)) == (5, PROTOCOL)


def test_6_3_priorities_are_ignored_on_any_stream() -> None:
    peer = Peer().start()
    assert peer.answers(raw(FrameType.PRIORITY, bytes(5), stream=9), ping())[-1].flags == ACK
    assert peer.reset(raw(FrameType.PRIORITY, bytes(4), stream=9)) == (9, FRAME_SIZE)


# 5.1: states of a stream


def test_5_1_data_after_the_end_resets_the_stream() -> None:
    peer = Peer().start()
    assert peer.reset(headers(1, end=True), data(1, b"x")) == (1, ErrorCode.STREAM_CLOSED)


def test_5_1_headers_after_the_end_reset_the_stream() -> None:
    peer = Peer().start()
    assert peer.reset(headers(1, end=True), headers(1)) == (1, ErrorCode.STREAM_CLOSED)


def test_5_1_frames_after_the_peers_reset_are_an_error() -> None:
    rst = frames.rst_stream(1, ErrorCode.CANCEL)
    peer = Peer().start()
    assert peer.reset(headers(1), rst, data(1, b"x")) == (1, ErrorCode.STREAM_CLOSED)
    # What was under way before our reset came is no further error.
    assert [f.kind for f in peer.answers(data(1, b"x"), ping())] == [FrameType.PING]
    assert Peer().start().goaway(headers(1), rst, headers(1)) is ErrorCode.STREAM_CLOSED
    peer = Peer().start()
    late = (rst, frames.window_update(1, 5), raw(FrameType.PRIORITY, bytes(5), stream=1))
    assert peer.answers(headers(1), rst, *late, ping())[-1].flags == ACK


def test_5_1_frames_under_way_when_we_reset_are_ignored() -> None:
    peer = Peer().start()
    assert peer.reset(headers(1), frames.window_update(1, 0)) == (1, PROTOCOL)
    trailers = headers(1, b"\x00\x01a\x01b", end=True)
    late = (data(1, b"x"), frames.window_update(1, 9), trailers)
    assert [f.kind for f in peer.answers(*late, ping())] == [FrameType.PING]


@pytest.mark.parametrize("frame", [data(3), frames.rst_stream(3, 0), frames.window_update(3, 1)])
def test_5_1_frames_on_an_idle_stream_end_the_connection(frame: bytes) -> None:
    assert Peer().start().goaway(headers(1), frame) is PROTOCOL


def test_5_1_1_stream_ids_must_rise() -> None:
    assert Peer().start().goaway(headers(5), headers(3)) is PROTOCOL


def test_5_1_2_streams_beyond_the_limit_are_refused_and_room_is_made_by_their_end() -> None:
    peer = Peer(Limits(streams=2)).start()
    refused = peer.reset(headers(1), headers(3), headers(5))
    assert refused == (5, ErrorCode.REFUSED_STREAM)
    events = peer.send(frames.rst_stream(1, ErrorCode.CANCEL), headers(7))
    assert [type(event) for event in events] == [StreamEnded, RequestReceived]


def test_5_5_unknown_frames_settings_and_flags_are_ignored() -> None:
    peer = Peer().start({Setting(1): 4096})
    unknown = raw(FrameType.SETTINGS, b"\x00\x99" + u32(7))
    answers = peer.answers(raw(0xFA, b"?", flags=0xFF, stream=7), unknown, ping())
    assert [f.kind for f in answers] == [FrameType.SETTINGS, FrameType.PING]


# 6.4 to 6.8


def test_6_4_a_reset_of_the_peer_ends_the_stream_and_is_not_answered() -> None:
    peer = Peer().start()
    (event,) = peer.send(headers(1))
    (ended,) = peer.send(frames.rst_stream(1, ErrorCode.CANCEL))
    assert isinstance(ended, StreamEnded)
    assert (ended.stream, ended.code) == (event.stream, ErrorCode.CANCEL)
    assert peer.connection.streams == {}
    assert peer.received() == []


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        (Setting.ENABLE_PUSH, 2, PROTOCOL),
        (Setting.INITIAL_WINDOW_SIZE, 1 << 31, ErrorCode.FLOW_CONTROL_ERROR),
        (Setting.MAX_FRAME_SIZE, 16_383, PROTOCOL),
        (Setting.MAX_FRAME_SIZE, 1 << 24, PROTOCOL),
    ],
)
def test_6_5_2_values_out_of_range_end_the_connection(
    setting: Setting, value: int, code: ErrorCode
) -> None:
    assert Peer().start().goaway(frames.settings({setting: value})) is code


def test_6_5_3_settings_are_acknowledged_after_the_values_before_them_hold() -> None:
    peer = Peer().start()
    (ack,) = peer.answers(frames.settings({Setting.MAX_FRAME_SIZE: 20_000}))
    assert (ack.kind, ack.flags) == (FrameType.SETTINGS, ACK)
    assert peer.connection.sender.largest_frame == 20_000


def test_6_7_a_ping_is_answered_with_its_data() -> None:
    peer = Peer().start()
    (answer,) = peer.answers(ping(b"abcdefgh"))
    assert (answer.flags, answer.payload) == (ACK, b"abcdefgh")
    assert peer.answers(ping(ack=True)) == []


def test_6_8_a_drained_connection_ends_with_its_last_stream() -> None:
    peer = Peer().start()
    peer.send(headers(1))
    peer.connection.drain()
    first, question = peer.received()
    assert (first.kind, frames.read_id(first.payload)) == (FrameType.GOAWAY, LAST_STREAM)
    # Opened before the peer could know: still served.
    (opened,) = peer.send(headers(3))
    assert isinstance(opened, RequestReceived)
    (last,) = peer.answers(ping(question.payload, ack=True))
    assert (frames.read_id(last.payload), last.code) == (3, ErrorCode.NO_ERROR)
    # Too late, and ignored: the peer sends it again on another connection.
    assert peer.send(headers(5), data(5, b"x"), data(5, end=True)) == []
    assert not peer.connection.is_done
    for stream in list(peer.connection.streams.values()):
        peer.connection.respond(stream, b"", end=True)
    assert peer.connection.is_done
    assert peer.connection.fault is None


def test_6_8_after_the_peers_goaway_its_streams_are_finished() -> None:
    peer = Peer().start()
    (event,) = peer.send(headers(1), frames.goaway(0, 0))
    assert not peer.connection.is_done
    peer.connection.respond(event.stream, b"", end=True)
    assert peer.connection.is_done


def test_5_4_1_an_error_ends_all_streams() -> None:
    peer = Peer().start()
    opened = peer.send(headers(1), headers(3))
    ended = peer.send(ping(b"short"))
    assert {event.stream.id for event in ended} == {event.stream.id for event in opened}
    assert all(isinstance(event, StreamEnded) for event in ended)
    assert peer.send(headers(5)) == []


# 8.1: requests and answers


def respond(peer: Peer, events: Sequence[object]) -> None:
    for event in events:
        if isinstance(event, RequestReceived):
            peer.connection.respond(event.stream, b"\x88")
            peer.connection.send(event.stream, b"hello")
            peer.connection.finish(event.stream, b"\x00\x01a\x01b")


def test_8_1_an_answer_is_headers_data_and_trailers() -> None:
    peer = Peer().start()
    respond(peer, peer.send(headers(1, end=True)))
    head, content, trailers = peer.received()
    assert [f.is_end for f in (head, content, trailers)] == [False, False, True]
    assert content.payload == b"hello"
    # The first block of the connection sets the size of the header table (RFC 7541, 4.2).
    assert head.payload == b"\x20\x88"
    respond(peer, peer.send(headers(3, end=True)))
    assert peer.received()[0].payload == b"\x88"


def test_8_1_an_answer_that_ends_before_the_request_resets_it_without_error() -> None:
    peer = Peer().start()
    respond(peer, peer.send(headers(1)))
    *_, trailers, rst = peer.received()
    assert trailers.is_end
    assert (rst.kind, rst.code) == (FrameType.RST_STREAM, ErrorCode.NO_ERROR)
    assert peer.connection.streams == {}


def test_8_1_trailers_end_a_request() -> None:
    peer = Peer().start()
    _, end = peer.send(headers(1), headers(1, b"\x00\x01a\x01b", end=True))
    assert isinstance(end, DataReceived)
    assert (end.data, end.is_end) == (b"", True)


@pytest.mark.parametrize(
    "second",
    [
        headers(1, b"\x00\x01a\x01b"),
        headers(1, b"\x00\x01A\x01b", end=True),
        headers(1, BLOCK, end=True),
    ],
    ids=["not the end", "upper case", "pseudo-header"],
)
def test_8_1_wrong_trailers_reset_the_stream(second: bytes) -> None:
    assert Peer().start().reset(headers(1), second) == (1, PROTOCOL)


@pytest.mark.parametrize(
    "rest",
    [(data(1, b"abc", end=True),), (data(1, b"abcdef"),), (headers(1, b"", end=True),)],
)
def test_8_1_1_content_length_must_be_that_of_the_data(rest: tuple[bytes, ...]) -> None:
    block = BLOCK + b"\x00\x0econtent-length\x015"
    assert Peer().start().reset(headers(1, block), *rest) == (1, PROTOCOL)
    whole = Peer().start().send(headers(1, block), data(1, b"abc"), data(1, b"de", end=True))
    assert len(whole) == 3


# With its first octet, the size update, a block of the second size fills its frames.
@pytest.mark.parametrize("size", [40_000, 3 * DEFAULT_FRAME - 1])
def test_a_large_header_block_of_ours_is_continued(size: int) -> None:
    peer = Peer().start()
    (event,) = peer.send(headers(1, end=True))
    peer.connection.respond(event.stream, bytes(size), end=True)
    first, *others = peer.received()
    assert first.kind is FrameType.HEADERS
    assert first.is_end
    assert [f.flags & END_HEADERS for f in (first, *others)] == [0, 0, END_HEADERS]
    # With the size update of the first block.
    assert len(first.payload + b"".join(f.payload for f in others)) == size + 1
