"""Clients that leave and engines that are killed: no KV stays, no request is lost."""

import asyncio
import signal
from pathlib import Path

import pytest

from tandem_contract import metrics

from ...sidecar.real.client import Stream, open_response
from ...sidecar.real.engine import Engine
from ...sidecar.real.pair import LONG, call, expected_tokens
from .conftest import Routed, routed

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]
ROLES = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}


async def backends(shared: dict[str, Engine], *names: str) -> dict[str, tuple[Engine, str]]:
    """These engines, running, and their roles."""
    for name in names:
        await shared[name].up()
    return {name: (shared[name], ROLES[name]) for name in names}


async def busy_backend(router: Routed, role: str) -> str:
    """The name of the backend of `role` that serves a request."""
    listed = (await router.state())["backends"]
    (name,) = [each["name"] for each in listed if each["role"] == role and each["in_flight"]]
    return str(name)


@pytest.mark.parametrize("phase", ["prefilling", "decoding", "answering"])
async def test_a_client_that_leaves_leaves_no_kv(
    shared: dict[str, Engine], tmp_path: Path, phase: str
) -> None:
    engines = await backends(shared, "prefill-0", "decode-0")
    prefill, decode = shared["prefill-0"], shared["decode-0"]
    async with routed(tmp_path / "router.yaml", engines) as router:
        stopped = {"prefilling": prefill, "decoding": decode}.get(phase)
        if stopped is not None:
            stopped.stop()
        client = asyncio.create_task(router.ask(call(40, tokens=LONG, stream=True)))
        await router.wait_for_phase(phase)
        client.cancel()
        await asyncio.wait([client])
        async with asyncio.timeout(20):
            while phase in [work["phase"] for work in (await router.state())["in_flight"]]:
                pass
        if stopped is not None:
            stopped.signal(signal.SIGCONT)
        await router.wait_until_idle(prefill, decode)
        assert await prefill.figure(metrics.ENGINE_KV_EXPIRED) == 0
        assert await router.figure("tandem_sidecar_outcomes_total", outcome="abandoned") == 1
        assert all(not each["in_flight"] for each in (await router.state())["backends"])


async def test_a_prefill_backend_killed_while_it_computes_is_replaced(
    shared: dict[str, Engine], tmp_path: Path
) -> None:
    engines = await backends(shared, "prefill-0", "prefill-1", "decode-0")
    async with routed(tmp_path / "router.yaml", engines) as router:
        request = call(50)
        shared["prefill-0"].stop()
        shared["prefill-1"].stop()
        client = asyncio.create_task(router.ask(request))
        await router.wait_for_phase("prefilling")
        name = await busy_backend(router, "prefill")
        other = "prefill-1" if name == "prefill-0" else "prefill-0"
        shared[name].kill()
        shared[other].signal(signal.SIGCONT)
        result = await client
        assert (result.status, result.path) == (200, "prefill_then_decode")
        assert (result.prefill, result.tokens) == (other, expected_tokens(request))
        await router.wait_until_idle(shared[other], shared["decode-0"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_backend_killed_before_the_first_byte_is_replaced(
    shared: dict[str, Engine], tmp_path: Path, stream: bool
) -> None:
    engines = await backends(shared, "prefill-0", "decode-0", "decode-1")
    async with routed(tmp_path / "router.yaml", engines) as router:
        request = call(60 + stream, stream=stream)
        shared["decode-0"].stop()
        shared["decode-1"].stop()
        client = asyncio.create_task(router.ask(request))
        await router.wait_for_phase("decoding")
        name = await busy_backend(router, "decode")
        other = "decode-1" if name == "decode-0" else "decode-0"
        shared[name].kill()
        shared[other].signal(signal.SIGCONT)
        result = await client
        assert (result.status, result.error) == (200, "")
        assert (result.path, result.tokens) == ("prefill_then_decode", expected_tokens(request))
        # The KV of the first attempt was released, not left to its lease of ten minutes.
        await router.wait_until_idle(shared["prefill-0"], shared[other])
        assert await shared["prefill-0"].figure(metrics.ENGINE_KV_EXPIRED) == 0


async def test_a_decode_backend_killed_within_a_stream_ends_it_with_an_error(
    shared: dict[str, Engine], tmp_path: Path
) -> None:
    engines = await backends(shared, "prefill-0", "decode-0")
    async with routed(tmp_path / "router.yaml", engines) as router:
        request = call(70, tokens=LONG, stream=True)
        async with open_response(router.http, router.url, request) as response:
            stream = Stream(response)
            await stream.wait_for_first_bytes()
            shared["decode-0"].kill()
            result = await stream.read_to_end()
        assert "decode" in result.error or "connection" in result.error


@pytest.mark.parametrize("workers", [1, 2])
async def test_engines_killed_under_load_lose_no_request(
    shared: dict[str, Engine], tmp_path: Path, workers: int
) -> None:
    engines = await backends(shared, *ROLES)
    flags = ("--workers", str(workers))
    async with routed(tmp_path / "router.yaml", engines, *flags) as router:
        first = 100 * workers
        requests = [call(first + number, tokens=20, length=60) for number in range(40)]
        waiting = [asyncio.create_task(router.ask(request)) for request in requests]
        await router.wait_for_phase("decoding")
        shared["decode-0"].kill()
        shared["prefill-0"].kill()
        results = await asyncio.gather(*waiting)
        for request, result in zip(requests, results, strict=True):
            assert (result.status, result.error) == (200, "")
            assert result.tokens == expected_tokens(request)
        assert await router.figure("tandem_sidecar_outcomes_total", outcome="answered") == 40
        await router.wait_until_idle(shared["prefill-1"], shared["decode-1"])


async def test_a_drain_finishes_what_runs(shared: dict[str, Engine], tmp_path: Path) -> None:
    engines = await backends(shared, "prefill-0", "decode-0")
    async with routed(tmp_path / "router.yaml", engines) as router:
        request = call(80, tokens=300)
        shared["decode-0"].stop()
        client = asyncio.create_task(router.ask(request))
        await router.wait_for_phase("decoding")
        router.process.process.send_signal(signal.SIGTERM)
        shared["decode-0"].signal(signal.SIGCONT)
        result = await client
        assert (result.status, result.tokens) == (200, expected_tokens(request))
        assert await router.process.exit_status() == 0
