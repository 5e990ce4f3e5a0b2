"""A complete stack under load, while its prefill engine is killed and clients disconnect."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem_cli.demo import pools
from tandem_contract import metrics
from tandem_contract.paths import Role, RoutingPath
from tandem_engine.tiny import make_tiny_model
from tandem_loadtest.calls import Call, Result
from tandem_loadtest.client import Client, ClientSettings
from tandem_local.stack import Stack
from tandem_local.state import PodState
from tandem_operator.resources.pool_files import parse_pools

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

CONCURRENCY = 8
RESOURCE_GAUGES = frozenset(
    {
        metrics.ENGINE_RUNNING,
        metrics.ENGINE_WAITING,
        metrics.ENGINE_KV_USAGE,
        metrics.ENGINE_HELD,
        "tandem_sidecar_in_flight",
        "tandem_epp_in_flight",
    }
)
"""Gauges that are zero when no request runs; KV usage counts the blocks that requests hold."""


async def figures(url: str) -> list[tuple[str, float]]:
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        families = text_string_to_metric_families(await answer.text())
    return [(s.name, s.value) for family in families for s in family.samples]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(120):
        while not await condition():
            await asyncio.sleep(0.05)


def pod(stack: Stack, role: Role) -> PodState:
    return next(pod for pod in stack.pods if pod.role is role)


async def is_healthy(stack: Stack) -> bool:
    healthy = [v for n, v in await figures(stack.epp_metrics) if n == "tandem_epp_backend_healthy"]
    return all(pod.ready for pod in stack.pods) and min(healthy) == 1


async def is_idle(stack: Stack) -> bool:
    urls = [u for p in stack.pods for u in (p.engine_metrics, p.sidecar_metrics) if u]
    pages = await asyncio.gather(*map(figures, (*urls, stack.epp_metrics)))
    return not any(value for page in pages for name, value in page if name in RESOURCE_GAUGES)


def calls() -> Iterator[Call]:
    """Endless different prompts, streamed and not."""
    rng = random.Random(7)
    while True:
        prompt = tuple(rng.randrange(10, 500) for _ in range(rng.choice((30, 300, 900))))
        tokens = rng.choice((1, 8, 16))
        yield Call(prompt, max_tokens=tokens, stream=rng.random() < 0.5, ignore_eos=True)


def settings(url: str) -> ClientSettings:
    return ClientSettings(url=url, model=pools.SERVED, timeout=40)


async def send_all(
    client: Client, calls: Sequence[Call], after_each: Callable[[], None]
) -> list[Result]:
    limit = asyncio.Semaphore(CONCURRENCY)

    async def send(call: Call) -> Result:
        async with limit:
            result = await client.send(call)
        after_each()
        return result

    return await asyncio.gather(*map(send, calls))


async def disconnect(client: Client, victim: Call, other: Call) -> Result:
    """Send both; close the victim's connection when the other is answered."""
    disconnected = asyncio.create_task(client.send(victim))
    result = await client.send(other)
    disconnected.cancel()
    await asyncio.wait([disconnected])
    return result


async def test_no_answer_is_lost_when_prefill_engines_die_and_clients_disconnect(
    tmp_path: Path,
) -> None:
    make_tiny_model(tmp_path / "model", max_position=1024)
    documents = pools.pair(tmp_path / "model", 1024)
    # Beside other work the cost chooses one engine for most of these few prompts, rightly.
    plugins = [{"type": "active-request-scorer"}, {"type": "always-disagg-pd-decider"}]
    documents[1].data["spec"]["routing"] = {"epp": {"config": {"plugins": plugins}}}
    prompts = calls()
    results: list[Result] = []
    async with Stack(parse_pools(documents), port=0, run_dir=tmp_path / "run") as stack:
        async with Client(settings(stack.endpoint)) as client:
            for _ in range(2):
                await until(lambda: is_healthy(stack))
                engine = pod(stack, Role.PREFILL).pids["engine"]
                answered = iter(range(1, 100))

                def kill_after_the_fifth() -> None:
                    if next(answered) == 5:  # noqa: B023 - called within this turn of the loop
                        os.killpg(engine, signal.SIGKILL)  # noqa: B023

                batch = [next(prompts) for _ in range(16)]
                results += await send_all(client, batch, kill_after_the_fifth)
            await until(lambda: is_healthy(stack))
            pairs = [disconnect(client, next(prompts), next(prompts)) for _ in range(8)]
            results += await asyncio.gather(*pairs)
            await until(lambda: is_idle(stack))

        assert [result.error for result in results if not result.ok] == []
        paths = {result.routing_path for result in results}
        assert paths >= {RoutingPath.PREFILL_THEN_DECODE, RoutingPath.FALLBACK}
        # The prefill engine reads no KV of other engines: it computes its answers by itself.
        engine_url = pod(stack, Role.PREFILL).engine_metrics
        assert engine_url is not None
        async with Client(settings(engine_url.removesuffix("/metrics"))) as client:
            repeated = [replace(result.call, stream=False) for result in results]
            expected_results = await send_all(client, repeated, lambda: None)
    for result, expected in zip(results, expected_results, strict=True):
        assert expected.ok
        assert result.answer.token_ids == expected.answer.token_ids
        assert result.answer.finish_reason == expected.answer.finish_reason
