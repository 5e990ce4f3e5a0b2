import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.transfer import blockio, wire
from tandem_engine.transfer.blockio import HostMemory, StagedMemory, block_memory, block_plan
from tandem_engine.types import KvBroken

from .support import BIG, LAYOUT, cache

SEGMENT = wire.Segment(0, 0, 4)
BLOCKS = [5, 6, 1, 9]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@given(
    st.lists(st.integers(0, 4000), max_size=3000),
    st.sampled_from([64, 8192, blockio.BATCH_BYTES, 2 * blockio.BATCH_BYTES + 64]),
)
def test_a_plan_is_the_blocks_in_order_within_the_limits(blocks: list[int], size: int) -> None:
    plan = block_plan(blocks, size)
    flat = [
        start // size + i
        for batch in plan
        for start, stop in ((s.start, s.stop) for s in batch.slices)
        for i in range((stop - start) // size)
    ]
    assert flat == blocks == [block for batch in plan for block in batch.blocks]
    assert all(len(batch.slices) <= blockio.BATCH_VIEWS for batch in plan)
    assert all(
        len(batch.blocks) * size <= blockio.BATCH_BYTES or len(batch.blocks) == 1 for batch in plan
    )


def test_adjacent_blocks_become_one_view() -> None:
    (batch,) = block_plan([5, 6, 7, 1, 3, 4], 10)
    assert batch.slices == (slice(50, 80), slice(10, 20), slice(30, 50))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("staged", [False, True])
def test_blocks_go_out_and_come_in_as_they_lie(dtype: str, staged: bool) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    source, target = cache(1, layout), cache(2, layout)
    if not staged:
        source, target = [x.cpu() for x in source], [x.cpu() for x in target]
    before = [layer.clone() for layer in target]
    source_blocks, target_blocks = [5, 6, 1, 9], [2, 11, 12, 0]
    memory = StagedMemory(target, layout.block_bytes) if staged else HostMemory(target)
    sending = StagedMemory(source, layout.block_bytes) if staged else HostMemory(source)
    out = sending.outgoing(1, block_plan(source_blocks, layout.block_bytes))
    data = b"".join(view for views in out for view in views)
    for views in memory.incoming(1, block_plan(target_blocks, layout.block_bytes)):
        for view in views:
            view[:], data = data[: len(view)], data[len(view) :]
    assert data == b""
    before[1][target_blocks] = source[1][source_blocks]
    assert all(torch.equal(a, b) for a, b in zip(target, before, strict=True))


@pytest.mark.parametrize("count", [1, 4, 5, 23])
def test_many_blocks_pass_through_two_pieces_of_memory(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(blockio, "_PIECE_BYTES", 4 * LAYOUT.block_bytes)
    source, target = cache(1, blocks=32), cache(2, blocks=32)
    plan = block_plan(range(3, 3 + count), LAYOUT.block_bytes)
    incoming = StagedMemory(target, LAYOUT.block_bytes).incoming(0, plan)
    for sent, empty in zip(
        StagedMemory(source, LAYOUT.block_bytes).outgoing(0, plan), incoming, strict=True
    ):
        for view, place in zip(sent, empty, strict=True):
            place[:] = view
    assert torch.equal(source[0][3 : 3 + count], target[0][3 : 3 + count])
    assert not torch.equal(source[0][:3], target[0][:3])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (cache(1)[:2], "3 layers, the cache 2"),
        ([*cache(1)[:2], cache(1, blocks=3)[0]], "layer 2 of the cache"),
        (cache(1, replace(LAYOUT, dtype="float16")), "layer 0 of the cache"),
        ([layer.transpose(2, 3).contiguous().transpose(2, 3) for layer in cache(1)], "layer 0"),
    ],
)
def test_a_cache_must_be_as_the_layout_says(layers: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_memory(layers, LAYOUT)


def test_a_segment_larger_than_the_socket_buffers_arrives(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    source, target = cache(1, BIG), cache(2, BIG)
    plan = block_plan(range(16), BIG.block_bytes)
    moved: list[None] = []
    sender = threading.Thread(
        target=blockio.send_segment,
        args=(theirs, wire.Segment(0, 0, 16), block_memory(source, BIG).outgoing(0, plan),
              lambda: moved.append(None), lambda: True),
    )  # fmt: skip
    sender.start()
    assert wire.receive_frame(ours, wire.to_reader) == wire.Segment(0, 0, 16)
    blockio.receive_segment(ours, block_memory(target, BIG).incoming(0, plan))
    sender.join()
    assert torch.equal(source[0], target[0])
    assert moved


def test_a_wrong_digest_breaks(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    plan = block_plan(BLOCKS, LAYOUT.block_bytes)
    theirs.sendall(bytes(4 * LAYOUT.block_bytes + wire.DIGEST_BYTES))
    with pytest.raises(KvBroken, match="checksum"):
        blockio.receive_segment(ours, block_memory(cache(2), LAYOUT).incoming(0, plan))


def test_the_digest_is_withheld_when_the_blocks_are_lost_at_the_last_byte(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    plan = block_plan(BLOCKS, LAYOUT.block_bytes)
    batches = block_memory(cache(1), LAYOUT).outgoing(0, plan)
    with pytest.raises(KvBroken, match="blocks were freed during the read"):
        blockio.send_segment(theirs, SEGMENT, batches, lambda: None, lambda: False)
    theirs.close()
    assert wire.receive_frame(ours, wire.to_reader) == SEGMENT
    with pytest.raises(KvBroken, match="closed"):
        blockio.receive_segment(ours, block_memory(cache(2), LAYOUT).incoming(0, plan))
