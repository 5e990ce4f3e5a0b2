"""The collector with engines that speak vLLM's protocol over real ZMQ sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tandem_epp.prefix.block_keys import TokenizedPrompt
from tandem_epp.prefix.blocks import CachedPrefix
from tandem_epp.prefix.kv_events import subscriber
from tandem_epp.prefix.kv_events.collector import EventCollector, PodEngine
from tandem_epp.prefix.kv_events.feed import Knowledge
from tandem_epp.prefix.pod_blocks import PodBlocks

from .fake_publisher import CLEARED, FakeVllmPublisher, removed, stored

POD = "pod-1"
PROMPT = TokenizedPrompt(range(1, 13))
pytestmark = pytest.mark.component


@pytest.fixture
async def collector() -> AsyncIterator[EventCollector]:
    new_collector = EventCollector(PodBlocks())
    yield new_collector
    await new_collector.close()


@pytest.fixture
async def engine() -> AsyncIterator[FakeVllmPublisher]:
    async with FakeVllmPublisher() as publisher:
        yield publisher


async def until(condition: Callable[[], bool]) -> None:
    """Return once `condition` holds; what it waits for comes over sockets."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def cached(collector: EventCollector, prompt: TokenizedPrompt = PROMPT) -> int | None:
    prefix = (await collector.match(prompt)).cached(POD)
    return prefix.total if prefix is not None else None


async def until_cached(
    collector: EventCollector, tokens: int | None, prompt: TokenizedPrompt = PROMPT
) -> None:
    """Return once `cached` is `tokens`."""
    async with asyncio.timeout(30):
        while await cached(collector, prompt) != tokens:
            await asyncio.sleep(0.005)


async def follow(collector: EventCollector, engine: FakeVllmPublisher, identity: int = 1) -> None:
    collector.sync([PodEngine(POD, identity, engine.address)])
    await until(lambda: collector.knowledge(POD) is not Knowledge.NOTHING)


async def test_stored_and_removed_blocks_are_known_at_once(
    collector: EventCollector, engine: FakeVllmPublisher
) -> None:
    await follow(collector, engine)
    assert collector.knowledge(POD) is Knowledge.WHOLE
    await engine.publish(stored([b"1" * 32, b"2" * 32], list(range(1, 9))))
    await engine.publish(stored([b"3" * 32], [9, 10, 11, 12], parent=b"2" * 32))
    await until_cached(collector, 12)
    await engine.publish(removed([b"3" * 32]))
    await until_cached(collector, 8)
    await engine.publish(stored([b"1" * 32], [1, 2, 3, 4], medium="CPU"))
    await engine.publish(removed([b"1" * 32]))
    async with asyncio.timeout(30):
        while (await collector.match(PROMPT)).cached(POD) != CachedPrefix(total=8, gpu=0):
            await asyncio.sleep(0.005)
    await engine.publish(CLEARED)
    await until_cached(collector, 0)
    assert collector.blocks.count(POD) == 0


async def test_what_was_cached_before_the_connection_is_replayed(
    collector: EventCollector, engine: FakeVllmPublisher
) -> None:
    await engine.publish(stored([1, 2], list(range(1, 9))))
    await engine.publish(stored([3], [9, 10, 11, 12], parent=2))
    await follow(collector, engine)
    assert await cached(collector) == 12
    assert collector.knowledge(POD) is Knowledge.WHOLE
    assert engine.replays_asked == [0]
    assert collector.replays == {"restarted": 1}


async def test_a_gap_is_filled_by_a_replay_from_the_last_batch(
    collector: EventCollector, engine: FakeVllmPublisher
) -> None:
    await engine.publish(stored([1], [1, 2, 3, 4]))
    await engine.publish(stored([2], [5, 6, 7, 8], parent=1))
    await follow(collector, engine)
    await engine.publish(removed([2]), is_lost=True)
    await engine.publish(stored([2], [5, 6, 7, 8], parent=1), is_lost=True)
    await engine.publish(stored([3], [9, 10, 11, 12], parent=2))
    await until_cached(collector, 12)
    assert engine.replays_asked == [0, 1]
    assert collector.replays == {"restarted": 1, "gap": 1, "continued": 1}
    assert collector.knowledge(POD) is Knowledge.WHOLE


async def test_until_a_gap_is_filled_nothing_is_known(
    collector: EventCollector, engine: FakeVllmPublisher
) -> None:
    await engine.publish(stored([1], [1, 2, 3, 4]))
    await follow(collector, engine)
    assert await cached(collector) == 4
    engine.has_replay = False
    await engine.publish(removed([1]), is_lost=True)
    await engine.publish(stored([7], [21, 22, 23, 24]))
    await until(lambda: engine.replays_asked == [0, 0])
    # The pod may have less than the index says, and more.
    assert await cached(collector) is None


async def test_a_gap_that_cannot_be_filled_drops_the_index(collector: EventCollector) -> None:
    async with FakeVllmPublisher(keeps=2) as engine:
        await engine.publish(stored([1], [1, 2, 3, 4]))
        await follow(collector, engine)
        assert await cached(collector) == 4
        for _ in range(3):
            await engine.publish(removed([1]), is_lost=True)
        await engine.publish(stored([7], [21, 22, 23, 24]))
        await until_cached(collector, 4, TokenizedPrompt(range(21, 25)))
        assert await cached(collector) == 0
        assert collector.knowledge(POD) is Knowledge.PARTIAL
        assert collector.replays["incomplete"] == 1
        # An empty cache is a whole one.
        await engine.publish(CLEARED)
        await until(lambda: collector.knowledge(POD) is Knowledge.WHOLE)


async def test_a_restarted_engine_has_an_empty_cache(
    collector: EventCollector, engine: FakeVllmPublisher
) -> None:
    for _ in range(3):
        await engine.publish(stored([1], [1, 2, 3, 4]))
    await follow(collector, engine)
    assert await cached(collector) == 4
    await engine.restart()
    await engine.publish(stored([5], [21, 22, 23, 24]))
    await until_cached(collector, 4, TokenizedPrompt(range(21, 25)))
    assert await cached(collector) == 0
    assert collector.knowledge(POD) is Knowledge.WHOLE


async def test_without_a_connection_nothing_is_known(
    collector: EventCollector, engine: FakeVllmPublisher
) -> None:
    await engine.publish(stored([1], [1, 2, 3, 4]))
    await follow(collector, engine)
    engine._pub.close()
    await until_cached(collector, None)


async def test_an_engine_without_replay_is_known_in_part(
    collector: EventCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "REPLAY_SECONDS", 0.05)
    async with FakeVllmPublisher(has_replay=False) as engine:
        await engine.publish(stored([1], [1, 2, 3, 4]), is_lost=True)
        await follow(collector, engine)
        assert collector.knowledge(POD) is Knowledge.PARTIAL
        await engine.publish(stored([2], [5, 6, 7, 8], parent=1))
        await engine.publish(stored([7], [21, 22, 23, 24]))
        await until_cached(collector, 4, TokenizedPrompt(range(21, 25)))
        # A block that follows an unknown one says nothing.
        assert collector.events["unplaced"] == 1
        await engine.publish(is_lost=True)
        await engine.publish(stored([8], [31, 32, 33, 34]))
        await until_cached(collector, 4, TokenizedPrompt(range(31, 35)))
        assert await cached(collector, TokenizedPrompt(range(21, 25))) == 0
        assert collector.replays == {"failed": 1, "gap": 2}


async def test_a_malformed_batch_drops_the_index(
    collector: EventCollector, engine: FakeVllmPublisher
) -> None:
    await engine.publish(stored([1], [1, 2, 3, 4]))
    await follow(collector, engine)
    await engine.publish_raw(b"\xc1 no msgpack")
    await until_cached(collector, 0)
    assert collector.knowledge(POD) is Knowledge.PARTIAL


async def test_a_pod_that_left_or_was_replaced_is_forgotten(
    collector: EventCollector, engine: FakeVllmPublisher
) -> None:
    await engine.publish(stored([1], [1, 2, 3, 4]))
    await follow(collector, engine)
    collector.sync([PodEngine(POD, 2, engine.address)])
    assert await cached(collector) is None
    assert collector.blocks.count(POD) == 0
    await until_cached(collector, 4)
    collector.sync([])
    assert await cached(collector) is None
    await until(lambda: collector.blocks.bytes == 0)


async def test_an_error_leaves_no_knowledge_and_the_engine_is_followed_again(
    collector: EventCollector,
    engine: FakeVllmPublisher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await follow(collector, engine)
    await engine.publish(stored([b"1" * 32], [1, 2, 3, 4]))
    await until_cached(collector, 4)
    known: list[Knowledge] = []

    def broken(*_: object) -> None:
        monkeypatch.undo()
        asyncio.get_running_loop().call_later(0.1, lambda: known.append(collector.knowledge(POD)))
        raise ArithmeticError("a bug")

    monkeypatch.setattr(subscriber, "judge", broken)
    await engine.publish(stored([b"2" * 32], [5, 6, 7, 8], parent=b"1" * 32))
    await until(lambda: bool(known))
    assert known == [Knowledge.NOTHING]
    await until_cached(collector, 8)
    assert collector.knowledge(POD) is Knowledge.WHOLE
    assert f"following the KV events of {POD} ended by an unexpected error" in caplog.text


async def test_other_tasks_run_while_a_long_prompt_is_looked_up(
    collector: EventCollector, engine: FakeVllmPublisher
) -> None:
    blocks = 1000
    prompt = TokenizedPrompt(range(4 * blocks))
    await follow(collector, engine)
    names = list(range(1, blocks + 1))
    await engine.publish(stored(names, list(prompt.token_ids)))
    await until_cached(collector, 4 * blocks, prompt)
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    assert await cached(collector, prompt) == 4 * blocks
    other.cancel()
    assert turns == blocks // 256


async def test_a_pod_that_restarts_while_a_prompt_is_looked_up_has_nothing_cached(
    collector: EventCollector, engine: FakeVllmPublisher
) -> None:
    blocks = 1000
    prompt = TokenizedPrompt(range(4 * blocks))
    await follow(collector, engine)
    await engine.publish(stored(list(range(1, blocks + 1)), list(prompt.token_ids)))
    await until_cached(collector, 4 * blocks, prompt)
    looking_up = asyncio.create_task(cached(collector, prompt))
    await asyncio.sleep(0)
    collector.blocks.drop(POD)
    assert await looking_up == 0
