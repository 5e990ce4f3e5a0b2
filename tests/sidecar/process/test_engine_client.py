"""The sidecar's own requests to its decode engine."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tandem_sidecar.http.upstream import Pool
from tandem_sidecar.process.engine_client import fetch_metrics

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
