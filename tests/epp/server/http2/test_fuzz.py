"""Random bytes and frames: no error but those of the tree, and nothing left behind."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_epp.server.http2 import frames
from tandem_epp.server.http2.frames import HEADER, FrameType, Setting

from .calls import Calls, check_invariants
from .client import BLOCK, GET, START, data, headers, message, parse, ping

KINDS = st.integers(0, 12)
STREAMS = st.sampled_from([0, 1, 1, 2, 3, 3, 5, 7, 0x7FFFFFFF])
PAYLOADS = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([BLOCK, GET, BLOCK[:10], b"\x20" + BLOCK, bytes(4), bytes(8), bytes(5)]),
)
FRAMES = st.builds(frames.frame, KINDS, st.integers(0, 255), STREAMS, PAYLOADS)


@settings(max_examples=300)
@given(st.lists(FRAMES, max_size=20), st.integers(1, 200))
def test_random_frames(sent: list[bytes], size: int) -> None:
    calls, wire = Calls().start(), b"".join(sent)
    for at in range(0, len(wire), size):
        calls.session.receive(wire[at : at + size], 0.0)
    parse(calls.connection.take())
    check_invariants(calls)


@given(st.binary(max_size=300))
def test_random_bytes(sent: bytes) -> None:
    for calls, before in ((Calls(), b""), (Calls(), frames.PREFACE), (Calls().start(), b"")):
        calls.session.receive(before + sent, 0.0)
        check_invariants(calls)


def valid(random: Random, stream: int) -> list[bytes]:
    """The frames of a client's call, in order."""
    sent = [headers(stream, random.choice([BLOCK, b"\x20" + BLOCK, GET]))]
    for _ in range(random.randrange(4)):
        text = random.choice([b"hi", b"", b"finish", b"refuse", b"silent", bytes(3000)])
        sent.append(message(stream, text))
    sent.append(random.choice([data(stream, end=True), frames.rst_stream(stream, 8), b""]))
    return sent


def mutated(random: Random, wire: bytes) -> bytes:
    """`wire` with a few bytes changed, removed, repeated or inserted."""
    content = bytearray(wire)
    for _ in range(random.randrange(1, 6)):
        at = random.randrange(len(content))
        match random.randrange(4):
            case 0:
                content[at] = random.randrange(256)
            case 1:
                del content[at : at + random.randrange(1, 30)]
            case 2:
                content[at:at] = content[at : at + random.randrange(1, 60)]
            case _:
                content[at:at] = random.randbytes(random.randrange(1, 12))
        if not content:
            break
    return bytes(content)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_conversations(seed: int) -> None:
    random = Random(seed)
    for _ in range(500):
        parts = [frames.settings({Setting.INITIAL_WINDOW_SIZE: random.choice([0, 100, 70_000])})]
        queues = [valid(random, 1 + 2 * n) for n in range(random.randrange(1, 6))]
        # Streams are opened in order; their other frames mix.
        parts += [queue.pop(0) for queue in queues]
        while any(queues):
            parts.append(random.choice([queue for queue in queues if queue]).pop(0))
            parts.append(random.choice([b"", b"", ping(), frames.window_update(0, 5)]))
        wire = mutated(random, b"".join(parts))
        calls, at = Calls().start(), 0
        while at < len(wire):
            size = random.choice([1, 9, 50, 1000])
            calls.session.receive(wire[at : at + size], 0.0)
            at += size
        parse(calls.connection.take())
        check_invariants(calls)


@given(st.integers(0, 2**24 - 1), KINDS, st.integers(0, 255), st.integers(0, 2**32 - 1))
def test_any_frame_header(size: int, kind: int, flags: int, stream: int) -> None:
    calls = Calls().start()
    calls.session.receive(HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream), 0.0)
    check_invariants(calls)


def test_a_preface_in_pieces() -> None:
    for cut in range(1, len(START)):
        calls = Calls()
        calls.session.receive(START[:cut], 0.0)
        calls.session.receive(START[cut:], 0.0)
        assert calls.connection.is_established
        assert parse(calls.connection.take())[-1].kind is FrameType.SETTINGS
