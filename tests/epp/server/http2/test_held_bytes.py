"""What all connections hold together: counted, refused beyond the limit, and given back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.held_bytes import SMALL, STREAM_BYTES, HeldBytes
from tandem_epp.server.http2 import frames, grpc
from tandem_epp.server.http2.connection import Connection
from tandem_epp.server.http2.errors import ErrorCode
from tandem_epp.server.http2.frames import FrameType, Setting
from tandem_epp.server.http2.headers import BlockCache
from tandem_epp.server.http2.health import SERVICE, HealthService
from tandem_epp.server.http2.limits import Limits
from tandem_epp.server.http2.session import GrpcSession

from .calls import Calls
from .client import START, call_of, data, headers, message, parse
from .test_server import connected, serving
from .test_session import status

WINDOW = Setting.INITIAL_WINDOW_SIZE


def calls(held: HeldBytes, window: int = 65_535) -> Calls:
    """A connection that counts in `held`."""
    found = Calls()
    found.session.connection = Connection(Limits(), BlockCache(), held)
    found.start()
    found.answers(frames.settings({WINDOW: window}))
    return found


def test_an_eighth_is_kept_for_small_ones() -> None:
    held = HeldBytes(800)
    assert held.take(700, of=SMALL + 1)
    assert not held.take(1, of=SMALL + 1)
    assert held.take(100, of=SMALL)
    assert not held.take(1, of=1)
    held.give_back(1)
    assert held.take(1, of=1)
    assert held.size == 800


def test_streams_count_and_are_refused_when_there_is_no_room() -> None:
    held = HeldBytes(2 * STREAM_BYTES)
    ours = calls(held)
    ours.answers(headers(1), headers(3))
    (refused,) = ours.answers(headers(5))
    assert (refused.kind, refused.code) == (FrameType.RST_STREAM, ErrorCode.REFUSED_STREAM)
    ours.answers(frames.rst_stream(1, 8), headers(7))
    assert len(ours.session.calls) == 2
    ours.session.lost()
    assert held.size == 0


@given(
    st.lists(st.binary(max_size=3000), max_size=6),
    st.lists(st.integers(1, 3000), max_size=12),
    st.sampled_from(["client resets", "connection lost", "connection fails", "half close"]),
    st.sampled_from([0, 100, 65_535]),
)
def test_nothing_is_held_after_the_end(
    texts: list[bytes], cuts: list[int], end: str, window: int
) -> None:
    """A call that ends at any moment gives back its messages and its answers."""
    held = HeldBytes()
    ours = calls(held, window)
    ours.answers(headers(1))
    content = b"".join(map(grpc.framed, texts))
    for size in cuts:
        ours.answers(data(1, content[:size]))
        content = content[size:]
        assert held.size >= STREAM_BYTES
    match end:
        case "client resets":
            ours.answers(frames.rst_stream(1, 8))
        case "connection lost":
            ours.session.lost()
        case "connection fails":
            ours.answers(data(0))
        case _:
            ours.answers(data(1, content, end=True))
            ours.answers(frames.window_update(1, 1 << 20), frames.window_update(0, 1 << 20))
    assert not ours.session.calls
    assert held.size == 0


def test_waiting_answers_count_until_they_are_sent() -> None:
    held = HeldBytes()
    ours = calls(held, window=0)
    ours.answers(headers(1), message(1, bytes(1000)))
    assert held.size == STREAM_BYTES + 1005
    ours.answers(frames.window_update(1, 400))
    assert held.size == STREAM_BYTES + 605


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_a_health_request_for_which_there_is_no_room_is_refused(method: str) -> None:
    held, health = HeldBytes(STREAM_BYTES + 100), HealthService(bool, frozenset())
    errors: list[Exception] = []
    connection = Connection(Limits(), BlockCache(), held)
    session = GrpcSession(connection, health.methods, health.page, on_error=errors.append)
    begun = data(1, grpc.framed(bytes(1000))[:900])
    session.receive(START + headers(1, call_of(f"/{SERVICE}/{method}")) + begun, 0.0)
    assert status([f for f in parse(connection.take()) if f.stream == 1]) == "8"
    assert (held.size, errors) == (0, [])


def test_over_the_limit_the_connection_with_most_answers_ends() -> None:
    held = HeldBytes(100_000)
    greedy, modest = calls(held, window=0), calls(held, window=0)
    held.connections = 2
    modest.answers(headers(1))
    greedy.answers(headers(1))
    for _ in range(10):
        greedy.answers(message(1, bytes(10_000)))
        if greedy.connection.fault is not None:
            break
        modest.answers(message(1, bytes(100)))
    assert greedy.connection.fault is not None
    assert greedy.connection.fault.code is ErrorCode.ENHANCE_YOUR_CALM
    assert [handler.ends for handler in greedy.handlers] == [1]
    assert modest.connection.fault is None
    assert held.size < 100_000


@pytest.mark.component
async def test_a_peer_that_opens_no_window_is_cut() -> None:
    async with serving(Limits(stall_seconds=0.1)) as served, connected(served.port) as client:
        client.send(frames.settings({WINDOW: 0}), headers(1), message(1, bytes(1000)))
        end = await client.until(FrameType.GOAWAY)
        assert end.code is ErrorCode.ENHANCE_YOUR_CALM
        assert await client.ends()
        assert served.server.held.size == served.server.held.connections == 0


def test_a_message_reader_gives_back_what_is_complete() -> None:
    held = HeldBytes()
    reader = grpc.MessageReader(1 << 20, held)
    assert reader.feed(grpc.framed(bytes(10))) == [bytes(10)]
    assert held.size == 0
    for _ in range(2):
        reader.feed(grpc.framed(bytes(5000))[:3000])
        assert held.size == 3000 - grpc.PREFIX
        assert reader.feed(grpc.framed(bytes(5000))[3000:]) == [bytes(5000)]
        assert held.size == 0
