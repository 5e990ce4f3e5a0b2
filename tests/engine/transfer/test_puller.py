"""The puller against a real producer, and against ones that say what a test tells them to."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import torch
import xxhash

from tandem_engine.transfer import wire
from tandem_engine.transfer.producer import FreeReason, Producer
from tandem_engine.transfer.puller import Puller
from tandem_engine.types import KvBroken, KvRefused

from .support import (
    HASH,
    HOST,
    HURRIED,
    LAYOUT,
    Freed,
    Peer,
    cache,
    finish,
    params,
    playing_producer,
    until,
)

THERE, HERE = [4, 5, 2], [9, 3, 4]
TOKENS = 12
Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def pulling(
    layers: list[torch.Tensor],
    limits: wire.TransferLimits = wire.DEFAULT_LIMITS,
) -> AsyncIterator[Puller]:
    new_puller = Puller(layers, LAYOUT, limits=limits)
    try:
        yield new_puller
    finally:
        await new_puller.close()


async def identify(peer: Peer) -> None:
    """Take a reader's first frames and answer them."""
    assert isinstance(await peer.from_reader(), wire.Hello)
    await peer.from_reader()
    await peer.send(wire.Welcome(30.0))


def segment(layer: int, payload: bytes) -> bytes:
    head = wire.Segment(layer, 0, len(payload) // LAYOUT.block_bytes)
    return wire.pack(head) + payload + xxhash.xxh3_64_digest(payload)


async def test_a_pull_writes_the_prompts_blocks_and_no_other(
    producer: Producer, freed: Freed
) -> None:
    finish(producer, "r", THERE, LAYOUT)
    source, target = cache(1), cache(2)
    expected = [layer.clone() for layer in target]
    for source_layer, expected_layer in zip(source, expected, strict=True):
        expected_layer[HERE[1:]] = source_layer[THERE[1:]]
    async with pulling(target) as puller:
        pulled = await puller.pull(params(producer.address), HERE, 1, TOKENS)
    assert all(torch.equal(a, b) for a, b in zip(target, expected, strict=True))
    assert (pulled.tokens, pulled.bytes) == (8, 2 * 3 * LAYOUT.block_bytes)
    assert pulled.seconds > 0
    assert freed.log == [("r", FreeReason.READ)]


async def test_a_pull_may_start_before_the_prefill_has_ended(
    producer: Producer, freed: Freed
) -> None:
    target = cache(2)
    producer.open("r", HASH)
    async with pulling(target) as puller:
        pull = asyncio.create_task(puller.pull(params(producer.address), HERE, 0, 10))
        await until(lambda: producer.has_reader("r"))
        for tokens in (6, 10):
            for layers in (1, 2, 3):
                await asyncio.to_thread(producer.publish, "r", THERE, tokens, layers)
        assert not freed.log
        producer.complete("r", 10)
        assert (await pull).tokens == 10
    assert all(torch.equal(a[THERE], b[HERE]) for a, b in zip(cache(1), target, strict=True))
    assert freed.log == [("r", FreeReason.READ)]


async def test_a_pull_of_a_cached_prompt_only_frees_the_producer(
    producer: Producer, freed: Freed
) -> None:
    finish(producer, "r", THERE, LAYOUT)
    target = cache(2)
    async with pulling(target) as puller:
        pulled = await puller.pull(params(producer.address), HERE, 3, TOKENS)
    assert (pulled.tokens, pulled.bytes) == (0, 0)
    assert all(torch.equal(a, b) for a, b in zip(cache(2), target, strict=True))
    assert freed.log == [("r", FreeReason.READ)]


async def test_many_pulls_at_once_keep_their_blocks_apart(freed: Freed) -> None:
    producer = Producer(cache(1), LAYOUT, "engine-1", HOST, 0, 60.0, freed)
    await producer.start()
    target = cache(2)
    for block in range(16):
        finish(producer, f"r{block}", [block], LAYOUT)
    async with pulling(target) as puller:
        await asyncio.gather(
            *(
                puller.pull(params(producer.address, f"r{block}"), [15 - block], 0, 4)
                for block in range(16)
            )
        )
    await producer.close()
    assert all(torch.equal(a.flip(0), b) for a, b in zip(cache(1), target, strict=True))
    assert producer.hold_count == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "other"), ("dtype", "bfloat16"), ("block_size", 8), ("head_dim", 16)],
)
async def test_a_refusal_names_the_field_and_both_values(
    producer: Producer, field: str, value: object
) -> None:
    layout = replace(LAYOUT, **{field: value})
    puller = Puller(cache(2, layout), layout)
    with pytest.raises(
        KvRefused, match=rf"layout.{field}: .*{value!r}.*{getattr(LAYOUT, field)!r}"
    ):
        await puller.pull(params(producer.address), HERE, 0, 8)
    await puller.close()


async def test_another_engine_at_the_address_refuses(producer: Producer, puller: Puller) -> None:
    finish(producer, "r", THERE, LAYOUT)
    old = replace(params(producer.address), remote_engine_id="restarted-since")
    with pytest.raises(KvRefused, match=r"engine_id: .*'restarted-since'.*'engine-1'"):
        await puller.pull(old, HERE, 0, TOKENS)
    assert producer.hold_count == 1


async def test_a_request_is_read_once(producer: Producer, puller: Puller) -> None:
    finish(producer, "r", THERE, LAYOUT)
    await puller.pull(params(producer.address), HERE, 0, TOKENS)
    with pytest.raises(KvRefused, match="'r' is not held"):
        await puller.pull(params(producer.address), HERE, 0, TOKENS)


async def silence(peer: Peer) -> None:
    await peer.ended()


async def silence_after_welcome(peer: Peer) -> None:
    await identify(peer)
    await peer.ended()


async def silence_in_a_payload(peer: Peer) -> None:
    await identify(peer)
    await peer.send_bytes(segment(0, bytes(3 * LAYOUT.block_bytes))[:200])
    await peer.ended()


async def hang_up(peer: Peer) -> None:
    await identify(peer)


async def hang_up_in_a_payload(peer: Peer) -> None:
    await identify(peer)
    await peer.send_bytes(segment(0, bytes(3 * LAYOUT.block_bytes))[:200])


async def garbage(peer: Peer) -> None:
    await peer.send_bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await peer.ended()


async def wrong_checksum(peer: Peer) -> None:
    await identify(peer)
    data = bytearray(segment(0, bytes(3 * LAYOUT.block_bytes)))
    data[-1] ^= 1
    await peer.send_bytes(bytes(data))
    await peer.ended()


async def wrong_layer(peer: Peer) -> None:
    await identify(peer)
    await peer.send_bytes(segment(7, bytes(LAYOUT.block_bytes)))
    await peer.ended()


async def too_many_blocks(peer: Peer) -> None:
    await identify(peer)
    await peer.send_bytes(segment(0, bytes(4 * LAYOUT.block_bytes)))
    await peer.ended()


async def no_welcome(peer: Peer) -> None:
    await peer.send(wire.Ok())
    await peer.ended()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (silence, "silent for 0.2 s"),
        (silence_after_welcome, "silent for 0.2 s"),
        (silence_in_a_payload, "silent for 0.2 s"),
        (hang_up, "closed the connection"),
        (hang_up_in_a_payload, "closed the connection"),
        (garbage, "malformed frame"),
        (wrong_checksum, "the checksum is wrong"),
        (wrong_layer, "not due"),
        (too_many_blocks, "not due"),
        (no_welcome, "got the frame Ok, expected Welcome"),
    ],
)
async def test_a_pull_from_a_faulty_producer_fails(script: Script, message: str) -> None:
    async with playing_producer(script) as address, pulling(cache(2), HURRIED) as puller:
        with pytest.raises(KvBroken, match=rf"producer {HOST}:{address[1]}: .*{message}"):
            await puller.pull(params(address), HERE, 0, TOKENS)


async def test_a_pull_that_gets_only_waiting_frames_ends_at_its_limit() -> None:
    async def waiting(peer: Peer) -> None:
        await identify(peer)
        with suppress(OSError):
            while True:
                await peer.send(wire.Waiting())
                await asyncio.sleep(0)

    limits = wire.TransferLimits(pull=0.2)
    async with playing_producer(waiting) as address, pulling(cache(2), limits) as puller:
        with pytest.raises(KvBroken, match=r"the pull took longer than 0.2 s"):
            await puller.pull(params(address), HERE, 0, TOKENS)


async def test_a_pull_fails_when_no_producer_listens(puller: Puller) -> None:
    with socket.create_server((HOST, 0)) as unused:
        address = unused.getsockname()
    with pytest.raises(KvBroken, match="Connect call failed"):
        await puller.pull(params(address), HERE, 0, TOKENS)
    await puller.release(params(address))


async def test_a_pull_succeeds_without_the_producers_confirmation() -> None:
    async def gone_at_the_end(peer: Peer) -> None:
        await identify(peer)
        for layer in range(3):
            await peer.send_bytes(segment(layer, bytes(3 * LAYOUT.block_bytes)))
        assert await peer.from_reader() == wire.Done()

    async with playing_producer(gone_at_the_end) as address, pulling(cache(2)) as puller:
        assert (await puller.pull(params(address), HERE, 0, TOKENS)).tokens == TOKENS


async def test_nothing_writes_into_the_blocks_of_a_cancelled_pull() -> None:
    in_payload, cancelled = asyncio.Event(), asyncio.Event()

    async def half_then_the_rest(peer: Peer) -> None:
        await identify(peer)
        data = segment(0, bytes(3 * LAYOUT.block_bytes))
        await peer.send_bytes(data[:200])
        in_payload.set()
        await cancelled.wait()
        with suppress(OSError):
            await peer.send_bytes(data[200:])
        await peer.ended()

    target = cache(2)
    async with playing_producer(half_then_the_rest) as address, pulling(target) as puller:
        pull = asyncio.create_task(puller.pull(params(address), HERE, 0, TOKENS))
        await in_payload.wait()
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        for layer in target:
            layer.fill_(7.0)
        cancelled.set()
    assert all(bool((layer == 7.0).all()) for layer in target)


async def test_a_pull_is_cancelled_while_the_producer_waits(
    producer: Producer, puller: Puller, freed: Freed
) -> None:
    producer.open("r", HASH)
    for attempt in range(3):
        pull = asyncio.create_task(puller.pull(params(producer.address), HERE, 0, TOKENS))
        await until(lambda: producer.has_reader("r"))
        pull.cancel("enough")
        pull.cancel("and again")
        with pytest.raises(asyncio.CancelledError):
            await pull
        await until(lambda: not producer.has_reader("r"))
        assert producer.hold_count == 1, attempt


async def test_close_breaks_running_pulls_off(producer: Producer) -> None:
    producer.open("r", HASH)
    async with pulling(cache(2)) as puller:
        puller.renew_lease(params(producer.address))
        pull = asyncio.create_task(puller.pull(params(producer.address), HERE, 0, TOKENS))
        await until(lambda: producer.has_reader("r"))
        await puller.close()
        with pytest.raises(KvBroken):
            await pull
        with pytest.raises(KvBroken, match="closed"):
            await puller.pull(params(producer.address), HERE, 0, TOKENS)


async def test_a_lease_is_renewed_until_cancelled() -> None:
    renewed: list[str] = []

    async def count(peer: Peer) -> None:
        assert isinstance(await peer.from_reader(), wire.Hello)
        command = await peer.from_reader()
        assert isinstance(command, wire.Renew)
        renewed.append(command.request_id)
        await peer.send(wire.Welcome(0.06), wire.Ok())

    async with playing_producer(count) as address, pulling(cache(2)) as puller:
        handle = puller.renew_lease(params(address))
        await until(lambda: len(renewed) >= 3)
        handle.cancel()
        handle.cancel()
    assert set(renewed) == {"r"}


async def test_lease_renewal_survives_a_broken_connection_and_ends_with_a_refusal() -> None:
    connections: list[str] = []

    async def first_broken_then_refused(peer: Peer) -> None:
        connections.append("connection")
        if len(connections) > 1:
            await peer.from_reader()
            await peer.from_reader()
            await peer.send(wire.Refused("unknown"))

    limits = wire.TransferLimits(handshake=0.05)
    async with playing_producer(first_broken_then_refused) as address:
        puller = Puller(cache(2), LAYOUT, limits=limits)
        tasks = len(asyncio.all_tasks())
        puller.renew_lease(params(address))
        await until(lambda: len(connections) == 2 and len(asyncio.all_tasks()) == tasks)
        await puller.close()


@pytest.mark.parametrize(
    ("blocks", "skip", "tokens"), [(HERE, 0, 13), ([9, 16, 4], 0, 12), (HERE, 0, 0)]
)
async def test_blocks_that_do_not_fit_are_a_value_error(
    puller: Puller, blocks: list[int], skip: int, tokens: int
) -> None:
    with pytest.raises(ValueError, match="blocks"):
        await puller.pull(params((HOST, 1)), blocks, skip, tokens)


async def test_a_malformed_host_name_breaks_the_pull(puller: Puller) -> None:
    with pytest.raises(KvBroken, match="not an address"):
        await puller.pull(params(("a" * 300, 1)), HERE, 0, TOKENS)
