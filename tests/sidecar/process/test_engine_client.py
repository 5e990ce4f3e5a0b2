"""The sidecar's own requests to its decode engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tandem_http1.upstream import Pool
from tandem_sidecar.process.engine_client import LATE_CHECKS, EngineHealth, fetch_metrics
from tandem_sidecar.settings import HealthChecks

from ..peers import Peer, Turn


@pytest.fixture
async def engine() -> AsyncIterator[Peer]:
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(Peer())


async def test_the_page_is_fetched_from_the_engine(engine: Peer) -> None:
    async def script(turn: Turn) -> None:
        turn.answer(200, turn.request.target.encode())

    engine.metrics = script
    pool = Pool()
    assert await fetch_metrics(pool, engine.address) == b"/metrics"
    pool.close()


@pytest.mark.parametrize("failure", ["error", "hangs", "gone"])
async def test_an_engine_that_does_not_answer_has_no_page(engine: Peer, failure: str) -> None:
    async def script(turn: Turn) -> None:
        if failure == "error":
            turn.answer(500, b"")
        else:
            await turn.gone.wait()

    engine.metrics = script
    if failure == "gone":
        engine.close_port()
    pool = Pool()
    assert await fetch_metrics(pool, engine.address, timeout=0.1) is None
    pool.close()


async def test_health_is_what_the_path_answers(engine: Peer) -> None:
    status = 503

    async def script(turn: Turn) -> None:
        turn.answer(status if turn.request.target == "/own/health" else 404, b"")

    engine.script = script
    pool = Pool()
    health = EngineHealth(pool, engine.address, HealthChecks("/own/health", interval=0.02))
    following = asyncio.create_task(health.follow())
    async with asyncio.timeout(20), engine.arrived:
        await engine.arrived.wait_for(lambda: len(engine.requests) > 1)
        assert not health.healthy
        status = 200
        # It checks again while it waits for these, and what it saw is known by then.
        seen = len(engine.requests)
        await engine.arrived.wait_for(lambda: len(engine.requests) > seen + 2)
        assert health.healthy
        status = 503
        seen = len(engine.requests)
        await engine.arrived.wait_for(lambda: len(engine.requests) > seen + 2)
        assert not health.healthy
    following.cancel()
    pool.close()


async def test_only_late_answers_in_a_row_make_an_engine_unhealthy(engine: Peer) -> None:
    checks = 0

    async def script(turn: Turn) -> None:
        nonlocal checks
        checks += 1
        if checks == LATE_CHECKS - 1:
            turn.answer(200, b"")
        else:
            await turn.gone.wait()

    engine.health = script
    pool = Pool()
    health = EngineHealth(pool, engine.address, HealthChecks(interval=0.02, timeout=0.05))
    health.healthy = True
    following = asyncio.create_task(health.follow())
    async with asyncio.timeout(20):
        while health.healthy:
            await asyncio.sleep(0.01)
    assert checks >= 2 * LATE_CHECKS - 1
    following.cancel()
    pool.close()
