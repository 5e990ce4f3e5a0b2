"""Flow control (RFC 9113, 5.2 and 6.9) in both directions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_epp.server.http2 import frames
from tandem_epp.server.http2.errors import ErrorCode
from tandem_epp.server.http2.frames import FrameType, Setting
from tandem_epp.server.http2.limits import DEFAULT_WINDOW, LARGEST_WINDOW, Limits
from tandem_epp.server.http2.stream import RequestReceived, Stream, StreamEnded

from .client import Frame, Peer, data, headers, ping

WINDOW = Setting.INITIAL_WINDOW_SIZE
SMALL = Limits(stream_window=1000, connection_window=100_000, stream_unsent=500)


def opened(peer: Peer, stream: int = 1) -> Stream:
    (event,) = peer.send(headers(stream))
    assert isinstance(event, RequestReceived)
    peer.connection.respond(event.stream, b"\x88")
    peer.received()
    return event.stream


def sizes(answers: list[Frame]) -> list[int]:
    return [len(f.payload) for f in answers if f.kind is FrameType.DATA]


# What we send


def test_6_9_1_data_waits_for_the_streams_window() -> None:
    peer = Peer().start({WINDOW: 10})
    stream = opened(peer)
    peer.connection.send(stream, b"0123456789abcdef")
    peer.connection.finish(stream, b"\x00\x01a\x01b")
    assert sizes(peer.received()) == [10]
    assert sizes(peer.answers(frames.window_update(1, 2))) == [2]
    *content, trailers, rst = peer.answers(frames.window_update(1, 100))
    assert [f.payload for f in content] == [b"cdef"]
    assert trailers.is_end
    assert rst.code is ErrorCode.NO_ERROR


def test_6_9_1_data_waits_for_the_connections_window() -> None:
    peer = Peer().start({WINDOW: 1 << 20, Setting.MAX_FRAME_SIZE: 1 << 20})
    first, second = opened(peer, 1), opened(peer, 3)
    for stream in (first, second):
        peer.connection.send(stream, bytes(40_000))
        peer.connection.finish(stream)
    sent = peer.received()
    assert sum(sizes(sent)) == DEFAULT_WINDOW
    rest = peer.answers(frames.window_update(0, 50_000))
    assert sum(sizes(rest)) == 80_000 - DEFAULT_WINDOW
    assert rest[-2].stream == 3
    assert rest[-2].is_end


def test_4_2_data_is_cut_into_frames_that_the_peer_accepts() -> None:
    peer = Peer().start({WINDOW: 1 << 20})
    stream = opened(peer)
    peer.connection.send(stream, bytes(40_000))
    assert sizes(peer.received()) == [16_384, 16_384, 40_000 - 2 * 16_384]


def test_6_9_2_a_smaller_initial_window_makes_windows_negative() -> None:
    peer = Peer().start({WINDOW: 100})
    stream = opened(peer)
    peer.connection.send(stream, bytes(150))
    assert sizes(peer.received()) == [100]
    assert sizes(peer.answers(frames.settings({WINDOW: 50}))) == []
    assert stream.send_window.size == -50
    assert sizes(peer.answers(frames.window_update(1, 50))) == []
    assert sizes(peer.answers(frames.window_update(1, 7))) == [7]
    assert sizes(peer.answers(frames.settings({WINDOW: 90}))) == [40]


def test_6_9_2_windows_of_streams_are_unlike_that_of_the_connection() -> None:
    peer = Peer().start({WINDOW: 1})
    assert peer.connection.sender.window.size == DEFAULT_WINDOW


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
        (frames.window_update(0, LARGEST_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
        (frames.settings({WINDOW: LARGEST_WINDOW}), ErrorCode.FLOW_CONTROL_ERROR),
    ],
)
def test_6_9_an_invalid_increment_ends_the_connection(frame: bytes, code: ErrorCode) -> None:
    # The stream's window is above the initial one, so that SETTINGS can exceed the maximum.
    assert Peer().start().goaway(headers(1), frames.window_update(1, 1), frame) is code


def test_6_9_an_invalid_increment_of_a_stream_resets_it() -> None:
    peer = Peer().start()
    zero, much = frames.window_update(1, 0), frames.window_update(3, LARGEST_WINDOW)
    assert peer.reset(headers(1), zero) == (1, ErrorCode.PROTOCOL_ERROR)
    assert peer.reset(headers(3), much) == (3, ErrorCode.FLOW_CONTROL_ERROR)


# What we receive


def test_6_9_1_a_peer_must_keep_within_the_streams_window() -> None:
    peer = Peer(SMALL).start()
    stream = opened(peer)
    peer.connection.pause(stream)
    assert peer.answers(data(1, bytes(1000))) == []
    assert peer.reset(data(1, b"x")) == (1, ErrorCode.FLOW_CONTROL_ERROR)


def test_6_9_1_a_peer_must_keep_within_the_connections_window() -> None:
    limits = Limits(stream_window=100_000, connection_window=DEFAULT_WINDOW + 1)
    peer = Peer(limits).start()
    opened(peer)
    # The window is given back at its half; a frame may not exceed what is left.
    peer.connection._window.size = 10
    assert peer.goaway(data(1, bytes(11))) is ErrorCode.FLOW_CONTROL_ERROR


def test_6_9_1_padding_counts() -> None:
    peer = Peer(SMALL).start()
    stream = opened(peer)
    peer.connection.pause(stream)
    padded = frames.frame(FrameType.DATA, frames.PADDED, 1, b"\xc8" + bytes(100 + 200))
    peer.send(padded)
    assert stream.receive_window.size == 1000 - 301


def updates(answers: list[Frame]) -> dict[int, int]:
    found: dict[int, int] = {}
    for answer in answers:
        if answer.kind is FrameType.WINDOW_UPDATE:
            found[answer.stream] = found.get(answer.stream, 0) + frames.read_id(answer.payload)
    return found


def test_windows_are_given_back_at_their_half() -> None:
    peer = Peer(SMALL).start()
    opened(peer)
    assert updates(peer.answers(data(1, bytes(499)))) == {}
    assert updates(peer.answers(data(1, b"x"))) == {1: 500}


def test_a_paused_stream_gets_its_window_back_when_it_is_read_again() -> None:
    peer = Peer(SMALL).start()
    stream = opened(peer)
    peer.connection.pause(stream)
    assert updates(peer.answers(data(1, bytes(900)))) == {}
    peer.connection.resume(stream)
    assert updates(peer.received()) == {1: 900}


def test_a_stream_whose_answers_wait_is_not_read() -> None:
    """A peer that does not read its answers cannot make the server collect more of them."""
    peer = Peer(SMALL).start({WINDOW: 0})
    stream = opened(peer)
    peer.connection.send(stream, bytes(501))
    assert updates(peer.answers(data(1, bytes(1000)))) == {}
    assert updates(peer.answers(frames.window_update(1, 1))) == {1: 1000}


def test_a_peer_that_reads_nothing_is_disconnected_before_much_waits() -> None:
    peer = Peer(Limits(connection_unsent=10_000)).start({WINDOW: 0})
    streams = [opened(peer, n) for n in (1, 3, 5)]
    for stream in streams:
        peer.connection.send(stream, bytes(4_000))
    assert peer.connection.fault is not None
    assert peer.connection.fault.code is ErrorCode.ENHANCE_YOUR_CALM
    ended = peer.connection.take_events()
    assert [type(event) for event in ended] == [StreamEnded] * 3
    assert peer.connection.sender._unsent == 0


@given(
    messages=st.lists(st.integers(1, 60_000), min_size=1, max_size=6),
    grants=st.lists(st.tuples(st.sampled_from([0, 1, 3]), st.integers(1, 40_000)), max_size=30),
    window=st.integers(0, 70_000),
)
def test_everything_arrives_in_order_within_all_windows(
    messages: list[int], grants: list[tuple[int, int]], window: int
) -> None:
    peer = Peer().start({WINDOW: window})
    streams = {n: opened(peer, n) for n in (1, 3)}
    room = {0: DEFAULT_WINDOW, 1: window, 3: window}
    sent = {1: b"", 3: b""}
    arrived = {1: b"", 3: b""}

    def account(answers: list[Frame]) -> None:
        for answer in answers:
            if answer.kind is FrameType.DATA:
                arrived[answer.stream] += answer.payload
                room[0] -= len(answer.payload)
                room[answer.stream] -= len(answer.payload)
        assert min(room.values()) >= 0

    for number, size in enumerate(messages):
        stream = 1 if number % 2 else 3
        content = bytes((number + 1,)) * size
        sent[stream] += content
        peer.connection.send(streams[stream], content)
    account(peer.received())
    for stream, increment in grants:
        room[stream] += increment
        account(peer.answers(frames.window_update(stream, increment)))
    for stream in (1, 3):
        assert sent[stream].startswith(arrived[stream])
        # Nothing waits that a window would let through.
        assert len(sent[stream]) == len(arrived[stream]) or 0 in (room[0], room[stream])
        waits = len(sent[stream]) - len(arrived[stream])
        assert streams[stream].unsent == waits
    assert peer.answers(ping())[-1].kind is FrameType.PING
