"""When clients disconnect, the producer's KV is released, and not only by lease expiry.

Tests suspend engines (SIGSTOP) to hold requests in a phase while their clients disconnect.
"""

import asyncio
import random
import time
from functools import partial
from typing import Any

import aiohttp
import pytest

from tandem_contract import metrics

from .api_requests import KINDS
from .engines import LEASE, Vllm, metric
from .pairs import Pair, at_rest, in_phase, page, stopped, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ASKED = KINDS["completions"]
LONG = 1500
"""Tokens per response; long enough that clients disconnect before its end."""
ROUND = 25
"""Clients that disconnect together."""
ROUNDS = 8


class Leavers:
    """Clients that send requests and disconnect together."""

    def __init__(self, pair: Pair, http: aiohttp.ClientSession) -> None:
        self._pair = pair
        self._http = http
        self._count = 0
        self.rng = random.Random(1)

    def ask(self, *, stream: bool) -> list[asyncio.Task[bytes]]:
        """A round of requests with prompts of their own."""
        prompts = [f"{self._count + i} is the number. " * 20 for i in range(ROUND)]
        self._count += ROUND
        bodies = [ASKED.body(prompt, stream=stream, max_tokens=LONG) for prompt in prompts]
        return [asyncio.create_task(self._first(body)) for body in bodies]

    async def _first(self, body: dict[str, Any]) -> bytes:
        """Read the first bytes of a response, then disconnect."""
        url, split = self._pair.url(ASKED.path), self._pair.split
        async with self._http.post(url, json=body, headers=split) as answer:
            return await answer.content.readany()


async def leave(tasks: list[asyncio.Task[bytes]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def leavers(pair: Pair, http: aiohttp.ClientSession) -> Leavers:
    return Leavers(pair, http)


async def during_prefill(
    pair: Pair, http: aiohttp.ClientSession, leavers: Leavers, *, stream: bool
) -> None:
    async with stopped(pair.prefill):
        clients = leavers.ask(stream=stream)
        await in_phase(pair, http, "prefilling", ROUND)
        await leave(clients)


async def between(
    pair: Pair, http: aiohttp.ClientSession, leavers: Leavers, *, stream: bool
) -> None:
    async with stopped(pair.decode):
        clients = leavers.ask(stream=stream)
        await in_phase(pair, http, "decoding", ROUND)
        await leave(clients)


async def after_admission(
    pair: Pair, http: aiohttp.ClientSession, leavers: Leavers, *, stream: bool
) -> None:
    clients = leavers.ask(stream=stream)
    await (asyncio.gather(*clients) if stream else in_phase(pair, http, "decoding", ROUND))
    await leave(clients)


async def anywhere(
    pair: Pair, http: aiohttp.ClientSession, leavers: Leavers, *, stream: bool
) -> None:
    """Disconnect at random times; most are before the first token."""
    clients = leavers.ask(stream=stream)
    loop = asyncio.get_running_loop()
    for task in clients:
        loop.call_later(leavers.rng.uniform(0, 0.3), task.cancel)
    await asyncio.gather(*clients, return_exceptions=True)


@pytest.mark.parametrize("moment", [during_prefill, between, after_admission, anywhere])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_kv_is_back_and_no_lease_ran_out(
    pair: Pair, http: aiohttp.ClientSession, leavers: Leavers, moment: Any, stream: bool
) -> None:
    async def free(*engines: Vllm) -> bool:
        pages = [await page(http, engine.url("/metrics")) for engine in engines]
        return sum(metric(text, metrics.ENGINE_KV_USAGE) for text in pages) == 0

    everywhere = partial(free, pair.prefill, pair.decode)
    # The first steps of a large batch are slow and would end before an abort arrives: warm up.
    await asyncio.gather(*leavers.ask(stream=True))
    await until(everywhere, 2 * LEASE)
    before = metric(await page(http, pair.prefill.url("/metrics")), metrics.ENGINE_KV_EXPIRED)
    took = []
    for _ in range(ROUNDS):
        await moment(pair, http, leavers, stream=stream)
        begun = time.monotonic()
        await at_rest(pair, http)
        await until(partial(free, pair.prefill), 2 * LEASE)
        took.append(time.monotonic() - begun)
    await until(everywhere, 2 * LEASE)
    summary = f"\n{moment.__name__}: KV of {ROUNDS} times {ROUND} back at the producer"
    print(f"{summary} after {min(took):.2f} to {max(took):.2f} s")
    after = metric(await page(http, pair.prefill.url("/metrics")), metrics.ENGINE_KV_EXPIRED)
    assert after == before
