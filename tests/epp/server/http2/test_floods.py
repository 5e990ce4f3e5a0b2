"""Peers that cause work without end are stopped, with bounded memory: one test for each attack."""

from collections.abc import Callable
from sys import getsizeof

import pytest

from tandem_epp.server.http2 import frames, grpc
from tandem_epp.server.http2.errors import ErrorCode
from tandem_epp.server.http2.frames import END_HEADERS, FrameType, Setting
from tandem_epp.server.http2.headers import encode
from tandem_epp.server.http2.limits import LARGEST_WINDOW, Limits

from .calls import Calls
from .client import BLOCK, Peer, data, headers, message, ping

pytestmark = pytest.mark.long

CALM = ErrorCode.ENHANCE_YOUR_CALM
ENOUGH = 20_000
"""Frames of a flood: far more than the budgets."""


def flood(
    make: Callable[[int], bytes],
    *,
    first: bytes = b"",
    now: float = 0.0,
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> Calls:
    """Send frames that `make` numbers until the server ends the connection."""
    calls = Calls(limits).start()
    calls.answers(first)
    for number in range(ENOUGH):
        calls.answers(make(number), now=now)
        if calls.connection.fault is not None:
            assert calls.connection.fault.code is CALM
            return calls
    pytest.fail("the flood is served without end")


def priority(stream: int, *, of: int) -> bytes:
    """PRIORITY that makes `stream` depend on another one."""
    return frames.frame(FrameType.PRIORITY, 0, stream, of.to_bytes(4, "big") + b"w")


@pytest.mark.parametrize(
    "frame",
    [
        frames.settings({Setting.MAX_FRAME_SIZE: 16_384}),
        frames.settings({}),
        frames.SETTINGS_ACK,
        ping(),
        ping(ack=True),
        frames.frame(FrameType.PRIORITY, 0, 1, bytes(5)),
        frames.frame(0xBE, 0, 0, b"unknown"),
        frames.window_update(0, 1),
        frames.window_update(1, 1),
        data(1),
        frames.rst_stream(1, 0) + frames.rst_stream(1, 0),
    ],
    ids=[
        "settings", "empty settings", "settings ack", "ping", "pong", "priority", "unknown",
        "connection window", "stream window", "empty data", "resets of a closed stream",
    ],
)  # fmt: skip
def test_frames_without_content(frame: bytes) -> None:
    calls = flood(lambda _: frame, first=headers(1))
    assert not calls.session.calls


def test_rapid_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2023-44487: streams that are opened and reset at once."""
    rst = [frames.rst_stream(1 + 2 * n, ErrorCode.CANCEL) for n in range(ENOUGH)]
    calls = flood(lambda n: headers(1 + 2 * n) + message(1 + 2 * n, b"hi") + rst[n])
    assert calls.handlers == [], "no request of the flood was served"
    assert len(calls.connection._closed) <= 1024


def test_resets_after_an_answer_are_free() -> None:
    calls = Calls().start()
    for n in range(ENOUGH):
        stream = 1 + 2 * n
        calls.answers(headers(stream), message(stream, b"hi"))
        calls.answers(frames.rst_stream(stream, ErrorCode.CANCEL))
    assert calls.connection.fault is None
    assert not calls.session.calls


def test_resets_by_many_clients_of_a_gateway_are_served() -> None:
    """All clients leave at once, before any had an answer, and again a while later."""
    limits = Limits()
    calls, stream = Calls().start(), 1
    for now in (0.0, 10.0):
        first, last = stream, stream + 2 * limits.streams
        calls.answers(*(headers(n) for n in range(first, last, 2)), now=now)
        assert len(calls.session.calls) == limits.streams
        calls.answers(*(frames.rst_stream(n, 8) for n in range(first, last, 2)), now=now)
        stream = last
    assert calls.connection.fault is None
    assert not calls.session.calls


def test_streams_that_the_server_resets_itself() -> None:
    """Malformed requests, each answered with RST_STREAM: rapid reset by the server's hand."""
    calls = flood(lambda n: headers(1 + 2 * n, BLOCK + b"\x00\x01A\x01b"))
    assert not calls.handlers


@pytest.mark.parametrize(
    "mistake",
    [
        lambda stream: frames.window_update(stream, 0),
        lambda stream: frames.window_update(stream, LARGEST_WINDOW),
        lambda stream: frames.frame(FrameType.PRIORITY, 0, stream, bytes(4)),
        lambda stream: priority(stream, of=stream),
        headers,
        lambda stream: data(stream, end=True) + headers(stream),
        lambda stream: data(stream, end=True) + data(stream, bytes(2000)),
    ],
    ids=[
        "window of 0", "window too large", "short priority", "priority", "trailers without end",
        "headers after the end", "data after the end",
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", [b"silent", bytes(2000)], ids=["unanswered", "answered"])
def test_streams_that_the_server_is_made_to_reset(
    mistake: Callable[[int], bytes], text: bytes
) -> None:
    """CVE-2025-8671: a request begins, and a mistake on its stream makes the server reset it.

    Neither a large message nor its answer pays for a reset."""
    full = frames.settings({Setting.INITIAL_WINDOW_SIZE: 100})

    def request(n: int) -> bytes:
        stream = 1 + 2 * n
        return headers(stream) + message(stream, text) + mistake(stream)

    calls = flood(request, first=full, limits=Limits(resets_burst=100))
    assert not calls.session.calls


def test_bodies_that_contradict_their_length() -> None:
    fields = BLOCK + encode(((b"content-length", b"1"),))
    flood(
        lambda n: headers(1 + 2 * n, fields) + data(1 + 2 * n, bytes(2000)),
        limits=Limits(resets_burst=100),
    )


@pytest.mark.parametrize("size", [1, 100])
def test_a_message_in_frames_of_few_bytes(size: int) -> None:
    frame = data(1, bytes(size))
    calls = flood(lambda _: frame, first=headers(1) + data(1, (1 << 22).to_bytes(5, "big")))
    assert not calls.session.calls


def test_data_under_way_to_a_stream_that_the_server_has_reset() -> None:
    frame = data(1, b"x")
    flood(lambda _: frame, first=headers(1) + frames.window_update(1, 0))


def test_small_messages_are_served_without_end() -> None:
    """As a gateway sends the chunks of a body: each in a frame, or in two where a window ends."""
    calls = Calls().start()
    calls.answers(headers(1))
    whole = grpc.framed(b"silent")
    for at in range(len(whole)):
        for _ in range(ENOUGH // 10):
            calls.answers(*(data(1, part) for part in (whole[:at], whole[at:]) if part))
    assert calls.connection.fault is None
    assert len(calls.handlers[0].messages) == ENOUGH // 10 * len(whole)


def test_header_sections_in_small_pieces() -> None:
    def pieces(n: int) -> bytes:
        stream, parts = 1 + 2 * n, [BLOCK[at : at + 8] for at in range(0, len(BLOCK), 8)]
        more = [frames.frame(FrameType.CONTINUATION, 0, stream, part) for part in parts[1:-1]]
        last = frames.frame(FrameType.CONTINUATION, END_HEADERS, stream, parts[-1])
        return headers(stream, parts[0], flags=0) + b"".join(more) + last

    flood(pieces)


def test_a_header_section_that_decodes_to_much_more() -> None:
    """An HPACK bomb: a field in the table, repeated by an index of one byte each."""
    field = b"\x40\x01a" + b"\x7f\x81\x1e" + bytes(b"x" * 4000)
    peer = Peer().start()
    bomb = BLOCK + field + b"\xbe" * 10_000
    assert peer.goaway(headers(1, bomb)) in (CALM, ErrorCode.COMPRESSION_ERROR)


def test_refused_streams() -> None:
    peer = Peer(Limits(streams=1)).start()
    peer.send(headers(1))
    for n in range(ENOUGH):
        peer.send(headers(3 + 2 * n))
        if peer.connection.fault is not None:
            break
    assert peer.connection.fault is not None
    assert peer.connection.fault.code is CALM


def test_data_on_closed_streams() -> None:
    rst = frames.rst_stream(1, ErrorCode.CANCEL)
    flood(lambda n: headers(3 + 2 * n, end=True) + data(3 + 2 * n, b"x"), first=headers(1) + rst)


def test_windows_that_are_opened_byte_by_byte() -> None:
    """Each update releases a frame of one byte."""
    calls = Calls().start()
    calls.answers(frames.settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    calls.answers(headers(1), message(1, bytes(60_000)))
    for _ in range(ENOUGH):
        calls.answers(frames.window_update(1, 1))
        if calls.connection.fault is not None:
            break
    assert calls.connection.fault is not None
    assert calls.connection.fault.code is CALM
    assert calls.connection.sender._unsent == 0


def test_windows_that_are_toggled_on_many_streams() -> None:
    """SETTINGS that change the windows of all streams cost by their number."""
    calls = Calls().start()
    calls.answers(*(headers(1 + 2 * n) for n in range(4000)))
    for n in range(100):
        calls.answers(frames.settings({Setting.INITIAL_WINDOW_SIZE: 1000 + n % 2}))
    assert calls.connection.fault is not None
    assert calls.connection.fault.code is CALM


def test_settings_with_many_entries() -> None:
    entry = b"\x00\x04\x00\x00\x00\x01"
    many = frames.frame(FrameType.SETTINGS, 0, 0, entry * 1000)
    assert Peer().start().goaway(many) is CALM


@pytest.mark.parametrize("part", [b"", b"x"], ids=["empty", "of a byte"])
def test_continuation_frames(part: bytes) -> None:
    """CVE-2024-27316: a header block without end."""
    peer = Peer().start()
    peer.send(headers(1, b"", flags=0))
    frame = frames.frame(FrameType.CONTINUATION, 0, 1, part)
    peer.send(*[frame] * Limits().continuations)
    assert peer.connection.fault is None
    assert peer.goaway(frame) is CALM


def test_large_continuation_frames() -> None:
    peer = Peer().start()
    peer.send(headers(1, b"", flags=0))
    part = frames.frame(FrameType.CONTINUATION, 0, 1, bytes(16_384))
    assert peer.goaway(*[part] * 5) is CALM


def test_a_slow_reader_holds_a_bounded_number_of_answers() -> None:
    """Windows of zero: the server stops taking requests whose answers it cannot send."""
    limits = Limits(stream_window=10_000, connection_window=70_000, stream_unsent=5_000)
    calls = Calls(limits).start()
    calls.answers(frames.settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    for stream in range(1, 200, 2):
        calls.answers(headers(stream))
        # A peer that keeps within the windows that it is given.
        while calls.connection.streams[stream].receive_window.size >= 1005:
            calls.answers(message(stream, bytes(1000)))
    most = limits.stream_unsent + limits.stream_window
    assert max(s.unsent for s in calls.connection.streams.values()) <= most
    assert calls.connection.fault is None


def test_frames_in_single_bytes_are_not_copied_for_each() -> None:
    peer = Peer().start()
    peer.send(headers(1))
    frame = data(1, bytes(60_000))
    for n in range(len(frame) - 1):
        assert peer.send(frame[n : n + 1]) == []
        assert len(peer.connection._pieces) == 1
    (event,) = peer.send(frame[-1:])
    assert len(event.data) == 60_000  # type: ignore[union-attr]
    assert not peer.connection._pieces


def test_a_message_in_tiny_frames_takes_little_more_memory_than_its_bytes() -> None:
    calls = Calls().start()
    calls.answers(headers(1), data(1, (1 << 20).to_bytes(5, "big")))
    (call,) = calls.session.calls
    sizes = [1, 2, 2000, 3, 500]
    sent = sum(sizes) * 200
    for _ in range(200):
        calls.answers(*(data(1, bytes(size)) for size in sizes))
    parts = call.reader._pieces._parts
    assert sum(map(len, parts)) == sent
    assert sum(map(getsizeof, parts)) <= 1.3 * sent


def test_the_budgets_recover_with_time_and_with_work() -> None:
    calls = Calls().start()
    calls.answers(headers(1))
    limits = Limits()
    for second in range(100):
        calls.answers(*[ping()] * int(limits.frames_per_second), now=float(second))
    assert calls.connection.fault is None
    for _ in range(ENOUGH):
        # As grpc clients do: two window updates and a ping for a message.
        updates = frames.window_update(1, 7) + frames.window_update(0, 7)
        calls.answers(message(1, b"hi"), updates, ping(), now=100.0)
    assert calls.connection.fault is None


def test_a_header_block_without_end_is_not_interrupted_by_others_streams() -> None:
    """Nothing else is served within a block, so that an unfinished one blocks only its connection,
    whose deadline the server keeps."""
    peer = Peer().start()
    assert peer.send(headers(1, BLOCK[:5], flags=0)) == []
    assert peer.goaway(headers(3, BLOCK, flags=END_HEADERS)) is ErrorCode.PROTOCOL_ERROR
