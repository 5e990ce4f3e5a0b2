import socket
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.transfer import wire
from tandem_engine.types import KvBroken

from .support import ENGINE, HASH, LAYOUT, hello


def received(data: bytes) -> wire.ToProducer:
    """The first frame in what a peer sent before it closed."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(data)
        return wire.receive_frame(ours, wire.to_producer)


@pytest.mark.parametrize(
    "frame",
    [hello(), wire.Read("r", 1, 9, 2.5, HASH), wire.Renew("r"), wire.Release("r"), wire.Done()],
)
def test_frames_come_back_as_they_went(frame: wire.Frame) -> None:
    assert received(wire.pack(frame)) == frame


def test_the_longest_ids_fit_in_a_frame() -> None:
    widest = "\U0001f600" * wire.MAX_ID
    frame = hello(engine_id=widest, layout=replace(LAYOUT, model=widest))
    assert received(wire.pack(frame)) == frame


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(4),
        (wire.MAX_FRAME + 1).to_bytes(4, "big"),
        wire.pack(wire.Done())[:-1],
        b"",
        wire.pack(wire.Ok()),
        wire.pack(wire.Renew("")),
        wire.pack(wire.Renew("x" * (wire.MAX_ID + 1))),
        wire.pack(wire.Read("r", -1, 1, 1.0, HASH)),
        wire.pack(wire.Read("r", 0, 1, 0.0, HASH)),
    ],
)
def test_what_is_no_frame_breaks_the_connection(data: bytes) -> None:
    with pytest.raises(KvBroken):
        received(data)


@given(st.binary(max_size=64))
def test_no_bytes_do_more_than_break_the_connection(body: bytes) -> None:
    data = len(body).to_bytes(4, "big") + body
    with suppress(KvBroken):
        assert isinstance(received(data), wire.Frame)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (hello(engine_id="other"), "engine_id: the reader expects 'other', the producer has 'eng"),
        (wire.Hello(9, ENGINE, LAYOUT), "version: the reader expects 9, the producer has 2"),
        *(
            (
                hello(layout=replace(LAYOUT, **{name: value})),
                f"layout.{name}: the reader expects {value!r}, "
                f"the producer has {getattr(LAYOUT, name)!r}",
            )
            for name, value in {
                "model": "huge", "dtype": "bfloat16", "layers": 1, "kv_heads": 4,
                "head_dim": 16, "block_size": 32,
            }.items()
        ),
    ],
)  # fmt: skip
def test_a_disagreement_names_the_field_and_both_values(theirs: wire.Hello, message: str) -> None:
    difference = wire.disagreement(theirs, ENGINE, LAYOUT)
    assert difference is not None
    assert difference.startswith(message)


def test_equal_sides_agree() -> None:
    assert wire.disagreement(hello(), ENGINE, LAYOUT) is None


@given(st.lists(st.integers(1, 5), max_size=6), st.integers(0, 30))
def test_unfilled_is_what_comes_after_the_first_bytes(sizes: list[int], count: int) -> None:
    data = bytes(range(sum(sizes)))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    buffers = [memoryview(data)[a : a + n] for a, n in zip(starts, sizes, strict=True)]
    unfilled_views = wire.unfilled(buffers, min(count, len(data)))
    assert b"".join(unfilled_views) == data[min(count, len(data)) :]
    assert all(unfilled_views)
