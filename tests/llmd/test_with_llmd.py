"""llm-d's own sidecar and EPP, with real Envoy and real engines."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import headers, metrics
from tandem_contract.commandline import HostPort
from tandem_contract.plan_keys import PlanKeys
from tandem_loadtest.calls import Call
from tandem_operator.routing.envoy.http_filters import BodyMode
from tandem_sidecar.process.run import start
from tandem_sidecar.settings import Settings

from ..epp.real import envoy, envoy_settings, epp
from ..sidecar.peers import FakeDecode, Turn, free_pair
from ..sidecar.processes import Sidecar, sidecar
from ..sidecar.real.client import ClientResult, ask
from ..sidecar.real.engine import SERVED, Engine
from ..sidecar.real.pair import call, expected_tokens
from .programs import llmd_epp, llmd_sidecar

pytestmark = pytest.mark.component


def router_yaml(decode: HostPort, prefill: HostPort) -> str:
    backends = [
        {"name": role, "role": role, "url": f"http://{address}", "models": [SERVED]}
        for role, address in (("decode", decode), ("prefill", prefill))
    ]
    # Every prompt is split: what the cost would choose does not matter here.
    plugins = [{"type": "max-score-picker"}, {"type": "always-disagg-pd-decider"}]
    serving = {"enabled": True, "fallback_to_unified": False}
    return json.dumps({"plugins": plugins, "disaggregated_serving": serving, "backends": backends})


async def send(url: str, request: Call) -> ClientResult:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        return await ask(http, url, request)


@asynccontextmanager
async def tandem_epp(
    directory: Path, decode: HostPort, prefill: HostPort, *flags: str, mode: BodyMode = "BUFFERED"
) -> AsyncIterator[str]:
    """The URL of Envoy, for which Tandem's EPP chooses."""
    config = directory / "router.yaml"
    config.write_text(router_yaml(decode, prefill))
    async with AsyncExitStack() as stack:
        picker = await stack.enter_async_context(epp(config, *flags))
        settings = envoy_settings(picker.grpc, (str(decode),), mode)
        yield await stack.enter_async_context(envoy(directory, settings))


@asynccontextmanager
async def via_llmd_epp(
    program: Path, directory: Path, decode: Engine, prefill: Engine, allow: str
) -> AsyncIterator[tuple[Sidecar, str]]:
    """Tandem's sidecar before `decode`, and the URL of Envoy, for which llm-d's EPP chooses. The
    sidecar hands over to prefill pods in the network `allow`."""
    flags = ("--engine", decode.url, "--prefill-allow", allow, "--pod-name", "decode-0")
    async with AsyncExitStack() as stack:
        before_decode = await stack.enter_async_context(sidecar(*flags))
        pods = [
            ("decode-0", "decode", before_decode.listen),
            ("prefill-0", "prefill", prefill.address),
        ]
        grpc = await stack.enter_async_context(llmd_epp(program, directory, pods))
        settings = envoy_settings(grpc, (str(before_decode.listen),), "FULL_DUPLEX_STREAMED")
        yield before_decode, await stack.enter_async_context(envoy(directory, settings))


@pytest.mark.parametrize("has_plan", [False, True])
@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_llm_d_s_sidecar_splits_what_tandem_s_epp_places(
    pd_sidecar: Path,
    tmp_path: Path,
    decode: Engine,
    prefill: Engine,
    has_plan: bool,
    mode: BodyMode,
) -> None:
    """With plan keys the request has a header more, which llm-d's sidecar passes on."""
    flags: tuple[str, ...] = ()
    if has_plan:
        (tmp_path / "keys").mkdir()
        (tmp_path / "keys" / "k1").write_bytes(b"0123456789abcdef")
        flags = ("--plan-key-dir", str(tmp_path / "keys"))
    async with (
        llmd_sidecar(pd_sidecar, tmp_path, decode.address) as before_decode,
        tandem_epp(tmp_path, before_decode, prefill.address, *flags, mode=mode) as url,
    ):
        prompts = await prefill.figure(metrics.ENGINE_PROMPT_TOKENS)
        seed = 100 + 10 * has_plan + (mode == "BUFFERED")
        for stream in (False, True):
            request = call(seed, stream=stream)
            result = await send(url, request)
            assert (result.status, result.error) == (200, "")
            assert result.tokens == expected_tokens(request)
        assert await prefill.figure(metrics.ENGINE_PROMPT_TOKENS) > prompts


async def test_tandem_s_sidecar_splits_what_llm_d_s_epp_places(
    epp_program: Path, tmp_path: Path, decode: Engine, prefill: Engine
) -> None:
    async with via_llmd_epp(epp_program, tmp_path, decode, prefill, "127.0.0.0/8") as (_, url):
        for stream in (False, True):
            request = call(200 + stream, stream=stream)
            result = await send(url, request)
            assert (result.status, result.error) == (200, "")
            assert result.path == "prefill_then_decode"
            assert result.prefill == str(prefill.address)
            assert result.tokens == expected_tokens(request)


async def test_tandem_s_sidecar_follows_only_allowed_pods_of_llm_d_s_epp(
    epp_program: Path, tmp_path: Path, decode: Engine, prefill: Engine
) -> None:
    async with via_llmd_epp(epp_program, tmp_path, decode, prefill, "10.0.0.0/8") as (before, url):
        request = call(300)
        result = await send(url, request)
        assert (result.status, result.path) == (200, "unified")
        assert result.tokens == expected_tokens(request)
        page = await _page(before.admin_url("/metrics"))
        assert "tandem_sidecar_ignored_candidates_total 1.0" in page
        assert headers.PREFILL_BACKEND not in page


async def test_ranks_that_llm_d_s_epp_names_are_served_by_their_engines(
    epp_program: Path, tmp_path: Path
) -> None:
    """Its data-parallel handler sends every request to rank 0's port and names the rank's."""
    async with AsyncExitStack() as stack:
        first, port = free_pair(), free_pair()
        engines = [FakeDecode(), FakeDecode()]
        for rank, engine in enumerate(engines):
            engine.port, engine.metrics = first + rank, idle
            await stack.enter_async_context(engine)
        settings = Settings(
            listen=HostPort("127.0.0.1", port),
            admin=HostPort("127.0.0.1", 0),
            engine=engines[0].address,
            ranks=2,
        )
        await stack.enter_async_context(start(settings, PlanKeys(None)))
        ranks = [(f"rank-{n}", "decode", HostPort("127.0.0.1", port + n)) for n in range(2)]
        plugins = {
            "types": {
                "data-parallel-profile-handler": {"primaryPort": port},
                "random-picker": {},
            },
            "profiles": {"default": ("random-picker",)},
        }
        grpc = await stack.enter_async_context(llmd_epp(epp_program, tmp_path, ranks, plugins))
        envoys = envoy_settings(grpc, (f"127.0.0.1:{port}",), "FULL_DUPLEX_STREAMED")
        url = await stack.enter_async_context(envoy(tmp_path, envoys))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        # A random choice among two: forty requests miss one of them once in 10^12 runs.
        for _ in range(40):
            body = {"model": "m", "prompt": "p", "max_tokens": 1}
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
        served = [len(engine.requests) for engine in engines]
        assert sum(served) == 40
        assert all(served)


async def idle(turn: Turn) -> None:
    """The metrics page of an idle engine."""
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    page = "".join(f"# TYPE vllm:{name} gauge\nvllm:{name} 0\n" for name in names)
    turn.answer(200, page.encode())


async def _page(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        return await answer.text()
