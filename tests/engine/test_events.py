"""KV events as a subscriber reads them, with real ZMQ sockets."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from tandem_engine.blocks import AllBlocksCleared, BlocksRemoved, BlocksStored
from tandem_engine.events import (
    BlockStored,
    EventsUnusable,
    KvEventPublisher,
    KvEventsConfig,
    parse_kv_events_config,
    wire_event,
)

STORED = BlocksStored((b"h1", b"h2"), b"h0", (1, 2, 3, 4), 2)
ANY_PORT = "tcp://127.0.0.1:*"


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    with zmq.asyncio.Context() as new_context:
        yield new_context
        new_context.destroy(linger=0)


@pytest.fixture
async def publisher() -> AsyncIterator[KvEventPublisher]:
    new_publisher = KvEventPublisher(
        KvEventsConfig(
            enable_kv_cache_events=True,
            endpoint=ANY_PORT,
            replay_endpoint=ANY_PORT,
            topic="kv@pod@model",
            buffer_steps=3,
        )
    )
    new_publisher.start()
    yield new_publisher
    await new_publisher.stop()


async def _subscribe(
    context: zmq.asyncio.Context, publisher: KvEventPublisher
) -> tuple[zmq.asyncio.Socket, int]:
    """A subscriber that is known to be connected, and the last sequence it saw."""
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"kv@")
    socket.connect(publisher.endpoint)
    published = 0
    while not await socket.poll(20):
        publisher.publish(AllBlocksCleared())
        published += 1
    last = -1
    while last < published - 1:
        _, sequence, _ = await socket.recv_multipart()
        last = int.from_bytes(sequence, "big")
    return socket, last


async def test_a_turns_events_are_one_batch_in_vllms_form(
    context: zmq.asyncio.Context, publisher: KvEventPublisher
) -> None:
    socket, last = await _subscribe(context, publisher)
    for event in (STORED, BlocksRemoved((b"h9",)), AllBlocksCleared()):
        publisher.publish(event)
    topic, sequence, payload = await socket.recv_multipart()
    assert topic == b"kv@pod@model"
    assert sequence == (last + 1).to_bytes(8, "big")
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(ts, float)
    assert rank == 0
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [b"h1", b"h2"],
            "parent_block_hash": b"h0",
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": None,
        },
        {"type": "BlockRemoved", "block_hashes": [b"h9"], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]


def test_a_prompts_first_block_names_its_salt() -> None:
    stored = BlocksStored((b"h1", b"h2"), None, (1, 2, 3, 4), 2, cache_salt="tenant")
    event = wire_event(stored)
    assert isinstance(event, BlockStored)
    assert event.extra_keys == (("tenant",), None)


async def _replay(context: zmq.asyncio.Context, endpoint: str, *frames: bytes) -> list[Any]:
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        await dealer.send_multipart(frames)
        answers = []
        while True:
            empty, topic, sequence, payload = await dealer.recv_multipart()
            assert empty == b""
            number = int.from_bytes(sequence, "big", signed=True)
            if number < 0:
                assert (topic, payload) == (b"", b"")
                return answers
            answers.append((number, topic, msgspec.msgpack.decode(payload)[1][0]["type"]))


async def test_missed_batches_are_replayed_while_they_are_kept(
    context: zmq.asyncio.Context, publisher: KvEventPublisher
) -> None:
    socket, last = await _subscribe(context, publisher)
    for event in (STORED, BlocksRemoved((b"h9",)), AllBlocksCleared(), STORED):
        publisher.publish(event)
        await socket.recv_multipart()
    endpoint = publisher.replay_endpoint
    assert endpoint is not None
    buffered = [
        (last + 2, b"kv@pod@model", "BlockRemoved"),
        (last + 3, b"kv@pod@model", "AllBlocksCleared"),
        (last + 4, b"kv@pod@model", "BlockStored"),
    ]
    assert await _replay(context, endpoint, b"", bytes(8)) == buffered
    assert await _replay(context, endpoint, b"", (last + 4).to_bytes(8, "big")) == buffered[2:]


async def test_a_malformed_replay_request_is_ignored(
    context: zmq.asyncio.Context, publisher: KvEventPublisher
) -> None:
    endpoint = publisher.replay_endpoint
    assert endpoint is not None
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        await dealer.send_multipart([b"what"])
    assert await _replay(context, endpoint, b"", bytes(8)) == []


async def test_an_endpoint_in_use_is_named(publisher: KvEventPublisher) -> None:
    bound_endpoint = publisher.endpoint.replace("127.0.0.1", "*")
    other = KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, endpoint=bound_endpoint))
    with pytest.raises(EventsUnusable, match=r"endpoint tcp://\*:\d+: Address already in use"):
        other.start()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "truncated"),
        ('{"endpoint": 5}', "endpoint"),
        ('{"topics": ""}', "topics"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"buffer_steps": 0}', "buffer_steps must be 1 to 2147483647"),
        ('{"hwm": 1000000000000}', "hwm must be 1 to 2147483647"),
    ],
)
def test_a_bad_configuration_is_one_line(text: str, message: str) -> None:
    with pytest.raises(EventsUnusable, match=message) as caught:
        parse_kv_events_config(text)
    assert str(caught.value).startswith("--kv-events-config: ")


def test_events_are_off_unless_enabled() -> None:
    assert not parse_kv_events_config("{}").is_active
    assert parse_kv_events_config('{"enable_kv_cache_events": true}').is_active
    assert not parse_kv_events_config(
        '{"enable_kv_cache_events": true, "publisher": "null"}'
    ).is_active


async def test_a_star_is_the_address_the_engine_listens_at(
    context: zmq.asyncio.Context,
) -> None:
    """Pods of one machine have an address each and the same ports."""
    free = KvEventPublisher(KvEventsConfig(endpoint="tcp://127.0.0.2:*"))
    free.start()
    port = free.endpoint.rsplit(":", 1)[1]
    await free.stop()
    config = KvEventsConfig(endpoint=f"tcp://*:{port}")
    first, second = (KvEventPublisher(config, host=f"127.0.0.{i}") for i in (2, 3))
    first.start()
    second.start()
    try:
        assert second.endpoint == f"tcp://127.0.0.3:{port}"
        with pytest.raises(EventsUnusable, match="Address already in use"):
            KvEventPublisher(config, host="127.0.0.2").start()
        await _subscribe_any(context, second)
    finally:
        await first.stop()
        await second.stop()


async def _subscribe_any(context: zmq.asyncio.Context, publisher: KvEventPublisher) -> None:
    """Return once a batch came through."""
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(publisher.endpoint)
    while not await socket.poll(20):
        publisher.publish(AllBlocksCleared())
