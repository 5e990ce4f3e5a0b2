"""Hand-offs through a sidecar by the connectors that are tested against protocol-true fakes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ..conftest import Harness
from ..peers import Received, Turn, hangs
from .fakes import LOCAL, params_of
from .fakes.lmcache import FakeLmcacheConsumer, FakeLmcacheProducer, FakeLmcacheStore
from .fakes.mooncake import FakeMooncakeConsumer, FakeMooncakeProducer
from .fakes.multi import FakeMultiConsumer, FakeMultiProducer
from .fakes.offloading import FakeOffloadingConsumer, FakeOffloadingProducer
from .fakes.push import FakePushConsumer, FakePushProducer

BODY = {"model": "m", "prompt": "Hi", "max_tokens": 5}
REMOTE = "decoded from kv of Hi"


async def ask(harness: Harness, **body: Any) -> tuple[str, str]:
    """The text of the answer, and the path it took."""
    async with harness.http.post(
        harness.url(), json=BODY | body, headers=harness.candidates
    ) as answer:
        assert answer.status == 200
        text = (await answer.json())["choices"][0]["text"]
        return text, answer.headers["X-Continuum-Routing-Path"]


def legs(harness: Harness) -> tuple[Received, Received]:
    """The newest prefill leg and the newest decode leg."""
    return harness.prefills[0].requests[-1], harness.decode.requests[-1]


@pytest.fixture
async def mooncake() -> AsyncIterator[FakeMooncakeProducer]:
    async with FakeMooncakeProducer() as producer:
        yield producer


async def start_mooncake(harness: Harness, producer: FakeMooncakeProducer) -> None:
    await harness.prefill(producer)
    port = producer.registry.address.port
    await harness.start(FakeMooncakeConsumer(), connector="mooncake", peer_port=port)


async def test_fake_mooncake_hands_over(harness: Harness, mooncake: FakeMooncakeProducer) -> None:
    await start_mooncake(harness, mooncake)
    assert await ask(harness) == (REMOTE, "prefill_then_decode")
    prefill, decode = legs(harness)
    assert params_of(prefill)["transfer_id"] == params_of(decode)["transfer_id"]
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]
    assert (prefill.json["max_tokens"], decode.json["max_tokens"]) == (1, 5)
    lookups = len(mooncake.registry.requests)
    assert await ask(harness) == (REMOTE, "prefill_then_decode")
    # For the second hand-off only the decode engine queries the bootstrap server.
    assert len(mooncake.registry.requests) == lookups + 1
    assert not mooncake.kept


async def test_fake_mooncake_reports_the_prefills_cached_tokens(
    harness: Harness, mooncake: FakeMooncakeProducer
) -> None:
    """The decode engine itself counts all received tokens as cached."""
    await start_mooncake(harness, mooncake)
    async with harness.http.post(harness.url(), json=BODY, headers=harness.candidates) as answer:
        usage = (await answer.json())["usage"]
    assert usage == {"prompt_tokens": 1500, "prompt_tokens_details": {"cached_tokens": 32}}


async def test_fake_mooncake_runs_both_legs_at_once(
    harness: Harness, mooncake: FakeMooncakeProducer
) -> None:
    mooncake.hold_until_pulled = True
    await start_mooncake(harness, mooncake)
    assert await ask(harness) == (REMOTE, "prefill_then_decode")


async def test_fake_mooncake_that_ended_early_is_not_waited_for(
    harness: Harness, mooncake: FakeMooncakeProducer
) -> None:
    mooncake.finish = "stop"
    await start_mooncake(harness, mooncake)
    assert await ask(harness) == (LOCAL, "fallback")


async def test_fake_mooncake_that_fails_is_not_waited_for(harness: Harness) -> None:
    class Failing(FakeMooncakeProducer):
        async def __call__(self, turn: Turn) -> None:
            await self.pulled.wait()
            turn.answer(500, b"{}")

    async with Failing() as producer:
        await start_mooncake(harness, producer)
        assert await ask(harness) == (LOCAL, "fallback")


async def test_fake_mooncake_without_a_registry_falls_back(
    harness: Harness, mooncake: FakeMooncakeProducer
) -> None:
    await start_mooncake(harness, mooncake)
    mooncake.registry.close_port()
    assert await ask(harness) == (LOCAL, "fallback")
    assert not harness.prefills[0].requests


async def test_fake_mooncake_frees_kv_on_release(
    harness: Harness, mooncake: FakeMooncakeProducer
) -> None:
    """The release carries the parameters of the KV that a refused request would have pulled."""
    await start_mooncake(harness, mooncake)
    await ask(harness)
    [decode] = harness.decode.requests
    params = params_of(decode)
    mooncake.kept[params["transfer_id"]].set_result("kv")
    await FakeMooncakeConsumer().rejected(params)
    assert not mooncake.kept


@pytest.fixture
async def offloading() -> AsyncIterator[FakeOffloadingProducer]:
    async with FakeOffloadingProducer() as producer:
        yield producer


async def start_offloading(
    harness: Harness, producer: FakeOffloadingProducer, consumer: FakeOffloadingConsumer
) -> None:
    port = producer.tier.address.port
    await harness.start(consumer, connector="offloading", peer_port=port)


async def test_fake_offloading_hands_over(
    harness: Harness, offloading: FakeOffloadingProducer
) -> None:
    await harness.prefill(offloading)
    await start_offloading(harness, offloading, FakeOffloadingConsumer())
    assert await ask(harness) == (REMOTE, "prefill_then_decode")
    prefill, decode = legs(harness)
    parked, fetched = params_of(prefill)["remote_decoder"], params_of(decode)["remote_prefiller"]
    assert parked["kv_request_id"] == fetched["kv_request_id"]
    assert fetched["remote_host"] == "127.0.0.1"


async def test_fake_offloading_without_a_prefill_falls_back(
    harness: Harness, offloading: FakeOffloadingProducer
) -> None:
    async def fails(turn: Turn) -> None:
        turn.answer(503, b"{}")

    await harness.prefill(fails)
    await start_offloading(harness, offloading, FakeOffloadingConsumer())
    assert await ask(harness) == (LOCAL, "fallback")


async def test_fake_multi_passes_on_the_params_of_every_connector(harness: Harness) -> None:
    producer = FakeMultiProducer()
    await harness.prefill(producer)
    await harness.start(FakeMultiConsumer(producer), connector="multi")
    assert await ask(harness) == (REMOTE, "prefill_then_decode")
    assert params_of(legs(harness)[1])["second_tier"] == {"hit": 3}


async def test_fake_push_writes_to_the_engine_registered_under_its_id(harness: Harness) -> None:
    producer = FakePushProducer()
    await harness.prefill(producer)
    await harness.start(FakePushConsumer(producer), connector="nixl-push")
    for _ in range(2):
        assert await ask(harness) == (REMOTE, "prefill_then_decode")
    assert not producer.kept


async def test_fake_push_is_released_by_running_the_request(harness: Harness) -> None:
    """The prefill's answer crosses the client's disconnect: no decode leg was sent."""
    producer = FakePushProducer()

    async def answers_too_late(turn: Turn) -> None:
        await turn.gone.wait()
        await producer(turn)

    prefill = await harness.prefill(answers_too_late)
    await harness.start(FakePushConsumer(producer), connector="nixl-push")
    asking = asyncio.create_task(ask(harness))
    await prefill.received(1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    [release] = await harness.decode.received(1)
    assert release.json["max_tokens"] == 1
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
    assert not producer.kept


async def test_fake_push_registers_once_under_an_id(harness: Harness) -> None:
    """A decode engine that has not answered may have registered; a second one would hang."""
    await harness.prefill(FakePushProducer())
    await harness.start(hangs, connector="nixl-push")
    asking = asyncio.create_task(ask(harness))
    await harness.decode.received(1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
    assert len(harness.decode.requests) == 1


@pytest.fixture
def store() -> FakeLmcacheStore:
    return FakeLmcacheStore()


@pytest.mark.parametrize("connector", ["lmcache", "lmcache-mp"])
async def test_fake_lmcache_hands_over(
    harness: Harness, store: FakeLmcacheStore, connector: str
) -> None:
    await harness.prefill(FakeLmcacheProducer(store))
    await harness.start(FakeLmcacheConsumer(store), connector=connector)
    assert await ask(harness) == (REMOTE, "prefill_then_decode")
    prefill, decode = legs(harness)
    assert (prefill.json["max_tokens"], decode.json) == (1, BODY)


async def test_fake_lmcache_that_stores_too_late_is_computed(
    harness: Harness, store: FakeLmcacheStore
) -> None:
    stores = asyncio.Event()
    await harness.prefill(FakeLmcacheProducer(store, stores=stores))
    await harness.start(FakeLmcacheConsumer(store), connector="lmcache")
    assert await ask(harness) == (LOCAL, "prefill_then_decode")
    stores.set()
    await asyncio.wait_for(store.has_stored.wait(), 10)
    assert await ask(harness) == (REMOTE, "prefill_then_decode")


@pytest.mark.parametrize(("has_stored", "text"), [(False, LOCAL), (True, REMOTE)])
async def test_fake_lmcache_prefill_that_dies_costs_no_answer(
    harness: Harness, store: FakeLmcacheStore, has_stored: bool, text: str
) -> None:
    """Whatever it had stored is complete, so it does no harm."""

    async def dies(turn: Turn) -> None:
        if has_stored:
            store.put(turn.request)
        turn.die()

    await harness.prefill(dies)
    await harness.start(FakeLmcacheConsumer(store), connector="lmcache")
    assert await ask(harness) == (text, "fallback")


async def test_fake_lmcache_is_retried_on_the_next_prefill_pod(
    harness: Harness, store: FakeLmcacheStore
) -> None:
    async def dies(turn: Turn) -> None:
        turn.die()

    await harness.prefill(dies)
    await harness.prefill(FakeLmcacheProducer(store))
    await harness.start(FakeLmcacheConsumer(store), connector="lmcache")
    assert await ask(harness) == (REMOTE, "prefill_then_decode")


async def test_fake_lmcache_load_that_fails_is_computed(
    harness: Harness, store: FakeLmcacheStore
) -> None:
    consumer = FakeLmcacheConsumer(store)

    async def fails_to_load(turn: Turn) -> None:
        if store.stored:
            store.stored.clear()
            turn.answer(500, b"{}")
        else:
            await consumer(turn)

    await harness.prefill(FakeLmcacheProducer(store))
    await harness.start(fails_to_load, connector="lmcache")
    assert await ask(harness) == (LOCAL, "fallback")


async def test_fake_lmcache_client_that_leaves_needs_no_release(
    harness: Harness, store: FakeLmcacheStore
) -> None:
    prefill = await harness.prefill(hangs)
    await harness.start(FakeLmcacheConsumer(store), connector="lmcache")
    asking = asyncio.create_task(ask(harness))
    await prefill.received(1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
    assert not harness.decode.requests
    assert not harness.decode.releases
