"""Data-parallel ranks through real Envoy, EPP and sidecar, to engines that insist on a rank."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tandem_contract import endpoints
from tandem_contract import headers as wire

from ...sidecar.processes import sidecar
from ..real import envoy, envoy_settings, epp, serving_app, until
from .engine_pages import VllmPage

pytestmark = pytest.mark.component

RANKS = 2
REQUESTS = 4


@dataclass
class FakeRankedEngine:
    """vLLM's API with two data-parallel ranks, without a model. It refuses a request that names no
    rank, which vLLM would balance by itself."""

    name: str
    together: int = 1
    """Requests that must be under way before any is answered."""
    received: list[tuple[int, dict[str, object]]] = field(default_factory=list)
    """Rank and `kv_transfer_params` of each request."""
    everyone: asyncio.Event = field(default_factory=asyncio.Event)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=VllmPage(range(RANKS), model="m").body().decode())

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def generate(self, request: web.Request) -> web.Response:
        ranks = request.headers.getall(wire.DATA_PARALLEL_RANK, [])
        if len(ranks) != 1 or not 0 <= int(ranks[0]) < RANKS:
            return web.json_response({"error": {"message": f"rank {ranks}"}}, status=400)
        rank, body = int(ranks[0]), await request.json()
        params = body.get("kv_transfer_params") or {}
        self.received.append((rank, params))
        if len(self.received) >= self.together:
            self.everyone.set()
        await self.everyone.wait()
        answer: dict[str, object] = {"choices": [{"index": 0, "text": "x"}]}
        if params.get("do_remote_decode"):
            # The engine itself adds the rank to its id and to its port.
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": f"{self.name}_dp{rank}",
                "remote_block_ids": [[1, 2]],
                "remote_request_id": "r",
                "remote_host": "127.0.0.1",
                "remote_port": 5600 + rank,
                "tp_size": 1,
                "remote_num_tokens": 400,
            }
        return web.json_response(answer)


@asynccontextmanager
async def serving(engine: FakeRankedEngine) -> AsyncIterator[str]:
    """Serve the engine on a free port; yields `host:port`."""
    app = web.Application()
    app.router.add_get(endpoints.METRICS, engine.metrics)
    app.router.add_get("/health", engine.health)
    app.router.add_post("/v1/completions", engine.generate)
    async with serving_app(app) as url:
        try:
            yield url.removeprefix("http://")
        finally:
            engine.everyone.set()


async def post(session: aiohttp.ClientSession, url: str, prompt: str) -> dict[str, str]:
    headers = {wire.DATA_PARALLEL_RANK: "7"}
    body = {"model": "m", "prompt": prompt, "max_tokens": 1}
    async with session.post(url + "/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return {key.lower(): value for key, value in response.headers.items()}


async def test_each_leg_reaches_the_rank_that_was_chosen(tmp_path: Path) -> None:
    # Together, so that the requests are in flight at the same time and spread over the ranks.
    prefill, decode = FakeRankedEngine("p"), FakeRankedEngine("d", together=REQUESTS)
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "k1").write_bytes(b"0123456789abcdef")
    async with AsyncExitStack() as parts:
        p_address = await parts.enter_async_context(serving(prefill))
        d_address = await parts.enter_async_context(serving(decode))
        flags = ("--engine", f"http://{d_address}", "--plan-key-dir", str(keys))
        proxy = await parts.enter_async_context(sidecar(*flags))
        config = tmp_path / "router.yaml"
        backends = [
            {"name": "p", "url": f"http://{p_address}", "role": "prefill"},
            {"name": "d", "url": f"http://{proxy.listen}", "role": "decode"},
        ]
        plugins = [{"type": "active-request-scorer"}, {"type": "always-disagg-pd-decider"}]
        config.write_text(
            json.dumps(
                {
                    "disaggregated_serving": {"enabled": True},
                    "backends": backends,
                    "plugins": plugins,
                }
            )
        )
        picker = await parts.enter_async_context(epp(config, "--plan-key-dir", str(keys)))
        await until(lambda: picker.serves("p_dp0", "p_dp1", "d_dp0", "d_dp1"))
        settings = envoy_settings(picker.grpc, [str(proxy.listen)])
        url = await parts.enter_async_context(envoy(tmp_path, settings))
        session = await parts.enter_async_context(aiohttp.ClientSession())
        prompts = [f"{number} " + "word " * 200 for number in range(REQUESTS)]
        answers = await asyncio.gather(*(post(session, url, prompt) for prompt in prompts))
        figures = await picker.figures()
    assert {answer[wire.ROUTING_PATH] for answer in answers} == {"prefill_then_decode"}
    assert sorted(rank for rank, _ in decode.received) == [0, 0, 1, 1]
    sources = sorted(str(params["remote_engine_id"]) for _, params in decode.received)
    assert sources == sorted(f"p_dp{rank}" for rank, _ in prefill.received)
    named = sorted(answer[wire.PREFILL_BACKEND] for answer in answers)
    assert named == sources, "the plan's rank is the engine's"
    assert 'tandem_epp_in_flight{backend="d_dp1"}' in figures
