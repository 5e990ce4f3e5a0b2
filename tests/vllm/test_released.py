"""KV of clients that leave: back at the producer well before its lease would free it.

Processes are stopped and continued to hold requests at the moment their clients leave.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tandem_contract import metrics

from .asking import KINDS
from .engines import LEASE, Vllm, metric
from .pairs import Pair, page

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ASKED = KINDS["completions"]
LONG = 1500
"""Tokens of an answer that no client waits for."""
ROUND = 25
"""Clients that leave together."""


async def until(condition: Callable[[], Awaitable[bool]], within: float) -> float:
    """The seconds it took until `condition` held; fails after `within`."""
    start = time.monotonic()
    async with asyncio.timeout(within):
        while not await condition():
            await asyncio.sleep(0.02)
    return time.monotonic() - start


@asynccontextmanager
async def stopped(engine: Vllm) -> AsyncIterator[None]:
    """Within it the engine does nothing, but its kernel takes connections and bytes."""
    engine.process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.process.signal(signal.SIGCONT)


class Leavers:
    """Clients that ask, and leave together when told."""

    def __init__(self, pair: Pair, http: aiohttp.ClientSession) -> None:
        self._pair = pair
        self._http = http
        self._count = 0

    def ask(self, *, stream: bool) -> list[asyncio.Task[bytes]]:
        """A round of requests with prompts of their own."""
        prompts = [f"{self._count + i} is the number. " * 20 for i in range(ROUND)]
        self._count += ROUND
        bodies = [ASKED.body(prompt, stream=stream, max_tokens=LONG) for prompt in prompts]
        return [asyncio.create_task(self._first(body)) for body in bodies]

    async def _first(self, body: dict[str, Any]) -> bytes:
        """The first bytes of an answer; then the client leaves."""
        url, split = self._pair.url(ASKED.path), self._pair.split
        async with self._http.post(url, json=body, headers=split) as answer:
            return await answer.content.readany()

    async def phase(self, name: str) -> None:
        """Once all of a round are in it."""

        async def reached() -> bool:
            async with self._http.get(self._pair.admin("/state")) as answer:
                work = (await answer.json())["in_flight"]
            return [w["phase"] for w in work if w["phase"] != "release"] == [name] * ROUND

        await until(reached, 60)


async def leave(tasks: list[asyncio.Task[bytes]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def leavers(pair: Pair, http: aiohttp.ClientSession) -> Leavers:
    """On a pair that has shaken hands."""
    await pair.handed_off(http, ASKED, ASKED.body("warm up " * 20))
    return Leavers(pair, http)


async def during_prefill(pair: Pair, leavers: Leavers, *, stream: bool) -> None:
    async with stopped(pair.prefill):
        asked = leavers.ask(stream=stream)
        await leavers.phase("prefilling")
        await leave(asked)


async def between(pair: Pair, leavers: Leavers, *, stream: bool) -> None:
    async with stopped(pair.decode):
        asked = leavers.ask(stream=stream)
        await leavers.phase("decoding")
        await leave(asked)


async def after_admission(_pair: Pair, leavers: Leavers, *, stream: bool) -> None:
    asked = leavers.ask(stream=stream)
    await (asyncio.gather(*asked) if stream else leavers.phase("decoding"))
    await leave(asked)


@pytest.mark.parametrize("moment", [during_prefill, between, after_admission])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_kv_is_back_before_the_lease_ends(
    pair: Pair, http: aiohttp.ClientSession, leavers: Leavers, moment: Any, stream: bool
) -> None:
    before = metric(await page(http, pair.prefill.url("/metrics")), metrics.ENGINE_KV_EXPIRED)
    rounds = 2 if moment is between else 1
    for _ in range(rounds):
        await moment(pair, leavers, stream=stream)

    async def nothing_held() -> bool:
        pages = [await page(http, e.url("/metrics")) for e in (pair.prefill, pair.decode)]
        return sum(metric(text, metrics.ENGINE_KV_USAGE) for text in pages) == 0

    took = await until(nothing_held, LEASE / 2)
    print(f"\n{moment.__name__}: KV of {rounds * ROUND} back after {took:.2f} s")
    after = metric(await page(http, pair.prefill.url("/metrics")), metrics.ENGINE_KV_EXPIRED)
    assert after == before
