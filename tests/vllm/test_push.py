"""NIXL push on real engines: the producer writes into blocks that the decode engine registered."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import headers, metrics
from tandem_contract.paths import RoutingPath

from .api_requests import KINDS
from .engines import metric
from .pairs import Moved, Pair, in_phase, page, running_pair, stopped, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LEASE = 10
"""Seconds; the producer does not answer a registration after the lease expired."""


@pytest.fixture(scope="module")
def push(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("push")
    settings = {"connector": "nixl-push", "leaseDuration": f"{LEASE}s"}
    with running_pair(model, directory, **settings) as running:
        yield running


@pytest.fixture
async def pair(push: Pair, http: aiohttp.ClientSession, request: pytest.FixtureRequest) -> Pair:
    await push.restore(http, request.session.testsfailed)
    return push


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_answer_is_that_of_one_engine(
    pair: Pair, http: aiohttp.ClientSession, kind: str, stream: bool
) -> None:
    request_kind = KINDS[kind]
    body = request_kind.body(f"{kind} {stream}: " + "how far is the harbour? " * 20, stream=stream)
    moved = await Moved(http, pair.decode.url("/metrics")).begin()
    handed = await pair.handed_off(http, request_kind, body)
    alone = await pair.alone(http, request_kind, body)
    assert request_kind.text(handed) == request_kind.text(alone) != ""
    assert handed.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE
    assert await moved.by(metrics.ENGINE_PROMPT_BY_SOURCE, source="external_kv_transfer") > 100


async def test_requests_side_by_side_get_their_own_kv(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    """Push matches legs by request id; here all clients send the same id."""
    request_kind = KINDS["completions"]
    bodies = [request_kind.body(f"{i} is what I say. " * 20) for i in range(8)]
    alone = [request_kind.text(await pair.alone(http, request_kind, body)) for body in bodies]
    handed = await asyncio.gather(
        *(
            pair.handed_off(http, request_kind, body, {headers.REQUEST_ID: "mine"})
            for body in bodies
        )
    )
    assert [request_kind.text(answer) for answer in handed] == alone


async def test_kv_of_clients_that_leave_comes_back(pair: Pair, http: aiohttp.ClientSession) -> None:
    request_kind = KINDS["completions"]
    async with stopped(pair.decode):
        tasks = [
            asyncio.create_task(
                pair.handed_off(http, request_kind, request_kind.body(f"{i} leaves. " * 20))
            )
            for i in range(10)
        ]
        await in_phase(pair, http, "decoding", len(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def nothing_held() -> bool:
        pages = [await page(http, e.url("/metrics")) for e in (pair.prefill, pair.decode)]
        return sum(metric(text, metrics.ENGINE_KV_USAGE) for text in pages) == 0

    took = await until(nothing_held, LEASE + 60)
    print(f"\npush, between: KV of {len(tasks)} back after {took:.2f} s (lease {LEASE} s)")
