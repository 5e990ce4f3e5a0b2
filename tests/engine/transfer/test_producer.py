"""The producer against readers whose frames each test writes."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
import xxhash

from tandem_engine.transfer import wire
from tandem_engine.transfer.producer import FreeReason, Producer
from tandem_engine.transfer.puller import Puller
from tandem_engine.types import KvBroken, KvLayout, KvRefused

from .support import (
    BIG,
    ENGINE,
    HASH,
    HOST,
    HURRIED,
    LAYOUT,
    Freed,
    Peer,
    cache,
    connected,
    finish,
    hello,
    params,
    read,
    until,
)

READ = ("r", FreeReason.READ)
RELEASED = ("r", FreeReason.RELEASED)
EXPIRED = ("r", FreeReason.EXPIRED)
BIG_BLOCKS = list(range(16))
"""Of BIG: 8 MiB per layer, more than a stalled connection takes in."""


@asynccontextmanager
async def producing(
    freed: Freed,
    *,
    layout: KvLayout = LAYOUT,
    lease: float = 60.0,
    limits: wire.TransferLimits = wire.DEFAULT_LIMITS,
) -> AsyncIterator[Producer]:
    new_producer = Producer(cache(1, layout), layout, ENGINE, HOST, 0, lease, freed, limits=limits)
    await new_producer.start()
    try:
        yield new_producer
    finally:
        await new_producer.close()


@asynccontextmanager
async def attached(producer: Producer, tokens: int) -> AsyncIterator[Peer]:
    async with connected(producer.address) as peer:
        await peer.send(hello(), read(tokens))
        assert isinstance(await peer.from_producer(), wire.Welcome)
        yield peer


@asynccontextmanager
async def stalled_in_a_segment(producer: Producer) -> AsyncIterator[Peer]:
    """A reader that has the head of BIG's first segment and takes no more."""
    async with connected(producer.address, receive_buffer=1 << 16) as peer:
        await peer.send(hello(BIG), read(len(BIG_BLOCKS) * BIG.block_size))
        assert isinstance(await peer.from_producer(), wire.Welcome)
        assert await peer.from_producer() == wire.Segment(0, 0, len(BIG_BLOCKS))
        yield peer


async def segment(peer: Peer) -> wire.Segment:
    """The next segment, whose digest is right."""
    while isinstance(frame := await peer.from_producer(), wire.Waiting):
        pass
    assert isinstance(frame, wire.Segment)
    payload = await peer.read(frame.blocks * LAYOUT.block_bytes)
    assert await peer.read(wire.DIGEST_BYTES) == xxhash.xxh3_64_digest(payload)
    return frame


async def refusal(peer: Peer) -> str:
    while not isinstance(frame := await peer.from_producer(), wire.Refused):
        assert isinstance(frame, wire.Welcome | wire.Waiting)
    return frame.reason


async def test_a_read_ends_with_freed_blocks(producer: Producer, freed: Freed) -> None:
    tokens = finish(producer, "r", [4, 5, 2], LAYOUT)
    async with attached(producer, tokens) as peer:
        assert [await segment(peer) for _ in range(3)] == [
            wire.Segment(layer, 0, 3) for layer in range(3)
        ]
        assert producer.has_reader("r")
        assert not freed.log
        await peer.send(wire.Done())
        assert await peer.from_producer() == wire.Ok()
        assert freed.log == [READ]
        assert producer.hold_count == 0


async def test_segments_go_as_the_prefill_publishes_them(producer: Producer, freed: Freed) -> None:
    blocks = [4, 5, 2]
    producer.open("r", HASH)
    async with attached(producer, tokens=10) as peer:
        await until(lambda: producer.has_reader("r"))
        assert await peer.from_producer() == wire.Waiting()
        producer.publish("r", blocks, tokens=6, layers=2)
        assert [await segment(peer) for _ in range(2)] == [
            wire.Segment(0, 0, 1), wire.Segment(1, 0, 1),
        ]  # fmt: skip
        await asyncio.to_thread(producer.publish, "r", blocks, 6, 3)
        assert await segment(peer) == wire.Segment(2, 0, 1)
        producer.publish("r", blocks, tokens=10, layers=1)
        assert await segment(peer) == wire.Segment(0, 1, 2)
        producer.complete("r", 10)
        assert [await segment(peer) for _ in range(2)] == [
            wire.Segment(1, 1, 2), wire.Segment(2, 1, 2),
        ]  # fmt: skip
        await peer.send(wire.Done())
        assert await peer.from_producer() == wire.Ok()
    assert freed.log == [READ]


async def test_a_read_that_ends_before_the_prefill_frees_at_complete(
    producer: Producer, freed: Freed
) -> None:
    producer.open("r", HASH)
    producer.publish("r", [4, 5], 8, 3)
    async with attached(producer, tokens=8) as peer:
        for _ in range(3):
            await segment(peer)
        await peer.send(wire.Done())
        assert await peer.from_producer() == wire.Ok()
    assert (freed.log, producer.hold_count) == ([], 1)
    producer.complete("r", 8)
    assert (freed.log, producer.hold_count) == ([READ], 0)


async def test_a_waiting_reader_gets_waiting_frames(producer: Producer) -> None:
    producer.open("r", HASH)
    async with connected(producer.address) as peer:
        await peer.send(hello(), wire.Read("r", 0, 4, 0.03, HASH))
        assert isinstance(await peer.from_producer(), wire.Welcome)
        assert [await peer.from_producer() for _ in range(3)] == [wire.Waiting()] * 3


async def test_a_lease_that_is_not_renewed_expires(freed: Freed) -> None:
    async with producing(freed, lease=0.02) as producer:
        finish(producer, "r", [1, 2], LAYOUT)
        await freed.was(EXPIRED)
        assert producer.hold_count == 0


async def test_an_open_request_has_no_lease_yet(freed: Freed) -> None:
    async with producing(freed, lease=0.02) as producer:
        producer.open("r", HASH)
        finish(producer, "other", [1], LAYOUT)
        await freed.was(("other", FreeReason.EXPIRED))
        assert producer.hold_count == 1
    assert len(freed.log) == 1


async def test_a_renewed_lease_outlives_one_that_is_not(freed: Freed) -> None:
    async with producing(freed, lease=0.6) as producer:
        puller = Puller(cache(2), LAYOUT)
        finish(producer, "r", [1], LAYOUT)
        finish(producer, "other", [2], LAYOUT)
        handle = puller.renew_lease(params(producer.address))
        await freed.was(("other", FreeReason.EXPIRED))
        handle.cancel()
        await freed.was(("other", FreeReason.EXPIRED), EXPIRED)
        await puller.close()


async def test_release_frees_without_a_read(producer: Producer, freed: Freed) -> None:
    finish(producer, "r", [1, 2], LAYOUT)
    async with connected(producer.address) as peer:
        await peer.send(hello(), wire.Release("r"))
        assert await peer.from_producer() == wire.Welcome(60.0)
        assert await peer.from_producer() == wire.Ok()
    assert freed.log == [RELEASED]


async def test_release_before_the_prefill_has_ended_frees_at_complete(
    producer: Producer, puller: Puller, freed: Freed
) -> None:
    producer.open("r", HASH)
    producer.publish("r", [1], 4, 3)
    await puller.release(params(producer.address))
    assert not freed.log
    with pytest.raises(KvRefused, match="not held"):
        await puller.pull(params(producer.address), [0], 0, 4)
    producer.complete("r", 4)
    assert freed.log == [RELEASED]


async def test_release_refuses_a_waiting_reader(
    producer: Producer, puller: Puller, freed: Freed
) -> None:
    producer.open("r", HASH)
    producer.publish("r", [1], 4, 1)
    async with attached(producer, tokens=4) as peer:
        await segment(peer)
        assert await peer.from_producer() == wire.Waiting()
        await puller.release(params(producer.address))
        assert "released" in await refusal(peer)
    producer.complete("r", 4)
    await freed.was(RELEASED)


async def test_a_dead_reader_leaves_the_blocks_for_the_next(
    producer: Producer, puller: Puller, freed: Freed
) -> None:
    finish(producer, "r", [1, 2], LAYOUT)
    async with attached(producer, tokens=8) as peer:
        await segment(peer)
    await until(lambda: not producer.has_reader("r"))
    assert (freed.log, producer.hold_count) == ([], 1)
    assert (await puller.pull(params(producer.address), [0, 1], 0, 8)).tokens == 8
    assert freed.log == [READ]


async def test_the_blocks_of_a_dead_reader_expire(freed: Freed) -> None:
    async with producing(freed, layout=BIG, lease=0.1) as producer:
        finish(producer, "r", BIG_BLOCKS, BIG)
        async with stalled_in_a_segment(producer):
            pass
        await freed.was(EXPIRED)


async def test_a_stalled_reader_is_disconnected_before_its_blocks_expire(freed: Freed) -> None:
    async with producing(freed, layout=BIG, lease=0.1) as producer:
        finish(producer, "r", BIG_BLOCKS, BIG)
        async with stalled_in_a_segment(producer) as peer:
            await freed.was(EXPIRED)
            await peer.ended()


async def test_release_disconnects_a_reader_in_the_middle_of_a_segment(freed: Freed) -> None:
    async with producing(freed, layout=BIG) as producer:
        finish(producer, "r", BIG_BLOCKS, BIG)
        async with stalled_in_a_segment(producer) as peer:
            puller = Puller(cache(2, BIG), BIG)
            await puller.release(params(producer.address))
            await puller.close()
            await freed.was(RELEASED)
            await peer.ended()


async def test_a_silent_reader_is_disconnected_and_its_blocks_stay_held(freed: Freed) -> None:
    async with producing(freed, limits=HURRIED) as producer:
        tokens = finish(producer, "r", [1], LAYOUT)
        async with attached(producer, tokens) as peer:
            for _ in range(3):
                await segment(peer)
            await peer.ended()
        await until(lambda: not producer.has_reader("r"))
        assert (freed.log, producer.hold_count) == ([], 1)


async def test_discard_refuses_a_waiting_reader_at_once(producer: Producer, freed: Freed) -> None:
    producer.open("r", HASH)
    async with attached(producer, tokens=4) as peer:
        producer.discard("r")
        assert producer.hold_count == 0
        assert "aborted" in await refusal(peer)
    producer.open("r", HASH)
    producer.discard("r")
    assert not freed.log


async def test_after_discard_no_digest_of_the_current_segment_is_sent(freed: Freed) -> None:
    async with producing(freed, layout=BIG) as producer:
        producer.open("r", HASH)
        producer.publish("r", BIG_BLOCKS, len(BIG_BLOCKS) * BIG.block_size, 1)
        async with stalled_in_a_segment(producer) as peer:
            producer.discard("r")
            whole = len(BIG_BLOCKS) * BIG.block_bytes + wire.DIGEST_BYTES
            with suppress(ConnectionResetError):
                assert len(await peer.read(whole)) < whole
        assert (freed.log, producer.hold_count) == ([], 0)


async def test_a_completed_request_is_not_discarded(producer: Producer, freed: Freed) -> None:
    finish(producer, "r", [1], LAYOUT)
    producer.discard("r")
    producer.discard("never opened")
    assert (freed.log, producer.hold_count) == ([], 1)


async def test_a_second_reader_is_refused_and_disturbs_nothing(
    producer: Producer, puller: Puller, freed: Freed
) -> None:
    producer.open("r", HASH)
    async with attached(producer, tokens=4) as peer:
        await until(lambda: producer.has_reader("r"))
        with pytest.raises(KvRefused, match="being read by another"):
            await puller.pull(params(producer.address), [0], 0, 4)
        producer.publish("r", [1], 4, 3)
        producer.complete("r", 4)
        for _ in range(3):
            await segment(peer)
        await peer.send(wire.Done())
        assert await peer.from_producer() == wire.Ok()
    assert freed.log == [READ]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ((hello(), wire.Renew("unknown")), "'unknown' is not held"),
        ((hello(), wire.Done()), "not Read, Renew or Release"),
        ((hello(), hello()), "not Read, Renew or Release"),
        ((wire.Done(), wire.Done()), "not Hello"),
        ((hello(BIG), wire.Renew("r")), "layout.layers: the reader expects 2, the producer has 3"),
        ((hello(engine_id="?"), wire.Renew("r")), "engine_id: the reader expects '?'"),
    ],
)
async def test_a_refusal_says_why(
    producer: Producer, frames: tuple[wire.Frame, ...], reason: str
) -> None:
    finish(producer, "r", [1], LAYOUT)
    async with connected(producer.address) as peer:
        await peer.send(*frames)
        assert reason in await refusal(peer)


async def test_a_reader_that_wants_more_than_the_prompt_is_refused_once_that_is_known(
    producer: Producer,
) -> None:
    producer.open("r", HASH)
    async with attached(producer, tokens=9) as peer:
        producer.publish("r", [1, 2], 8, 3)
        producer.complete("r", 8)
        while not isinstance(frame := await peer.from_producer(), wire.Refused):
            if isinstance(frame, wire.Segment):
                await peer.read(frame.blocks * LAYOUT.block_bytes + wire.DIGEST_BYTES)
        assert frame.reason == "tokens: the reader expects 9, the producer has 8"


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 64, wire.pack(hello())[:9]],
)
async def test_a_malformed_frame_disconnects_only_its_sender(
    producer: Producer, freed: Freed, data: bytes
) -> None:
    tokens = finish(producer, "r", [1, 2], LAYOUT)
    async with attached(producer, tokens) as peer, connected(producer.address) as garbage:
        await garbage.send_bytes(data)
        garbage.sock.shutdown(socket.SHUT_WR)
        await garbage.ended()
        for _ in range(3):
            await segment(peer)
        await peer.send(wire.Done())
        assert await peer.from_producer() == wire.Ok()


async def test_a_reader_that_sends_an_unexpected_frame_is_disconnected(
    producer: Producer, freed: Freed
) -> None:
    producer.open("r", HASH)
    async with attached(producer, tokens=4) as peer:
        await peer.send(wire.Done())
        await peer.ended()
    assert producer.hold_count == 1


async def test_a_silent_unidentified_connection_is_closed(freed: Freed) -> None:
    async with (
        producing(freed, limits=HURRIED) as producer,
        connected(producer.address) as peer,
    ):
        await peer.ended()


async def test_a_reader_replaces_an_unidentified_connection(freed: Freed) -> None:
    limits = wire.TransferLimits(handshake=60.0, connections=2)
    async with producing(freed, limits=limits) as producer, AsyncExitStack() as strangers:
        for _ in range(5):
            await strangers.enter_async_context(connected(producer.address))
        finish(producer, "r", [1], LAYOUT)
        puller = Puller(cache(2), LAYOUT)
        await puller.pull(params(producer.address), [0], 0, 4)
        await puller.close()
        assert freed.log == [READ]


async def test_at_the_connection_limit_another_reader_is_refused(
    freed: Freed, puller: Puller
) -> None:
    async with producing(freed, limits=wire.TransferLimits(connections=1)) as producer:
        producer.open("r", HASH)
        producer.open("other", HASH)
        async with attached(producer, tokens=4):
            with pytest.raises(KvBroken):
                await puller.pull(params(producer.address, "other"), [0], 0, 4)


async def test_close_ends_readers_and_frees(freed: Freed) -> None:
    async with producing(freed, layout=BIG) as producer:
        finish(producer, "r", BIG_BLOCKS, BIG)
        producer.open("other", HASH)
        async with stalled_in_a_segment(producer) as peer:
            await producer.close()
            await peer.ended()
        assert freed.log == [("r", FreeReason.ABORTED)]
        assert producer.hold_count == 0


async def test_a_port_in_use_is_an_os_error(producer: Producer, freed: Freed) -> None:
    second = Producer(cache(1), LAYOUT, ENGINE, *producer.address, 1.0, freed)
    with pytest.raises(OSError, match="in use"):
        await second.start()
    await second.close()


def test_wrong_arguments_raise_errors_that_name_them(freed: Freed) -> None:
    producer = Producer(cache(1), LAYOUT, ENGINE, HOST, 0, 1.0, freed)
    producer.open("r", HASH)
    with pytest.raises(ValueError, match="'r' is open"):
        producer.open("r", HASH)
    with pytest.raises(ValueError, match="too long"):
        producer.open("x" * (wire.MAX_ID + 1), HASH)
    with pytest.raises(ValueError, match="1 blocks do not hold 5 tokens"):
        producer.publish("r", [1], 5, 1)
    with pytest.raises(ValueError, match="has 16 blocks"):
        producer.publish("r", [16], 4, 1)
    with pytest.raises(ValueError, match="were never published"):
        producer.complete("r", 4)
    producer.publish("unknown", [1], 4, 1)
    with pytest.raises(ValueError, match="a lease of 0 s"):
        Producer(cache(1), LAYOUT, ENGINE, HOST, 0, 0, freed)
