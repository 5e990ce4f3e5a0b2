"""The admin port: metrics, state, traces of both halves, and health."""

import asyncio
import json

import pytest
from click.testing import CliRunner

from tandem_cli.trace import trace

from ..sidecar.peers import Script, Turn
from .conftest import DECODE, Harness


async def test_the_documents_metrics_are_there_from_the_start(harness: Harness) -> None:
    await harness.prefill("p")
    await harness.decode("d")
    await harness.start()
    page = await harness.page("/metrics")
    for path in ("prefill_then_decode", "fast_decode", "unified", "fallback"):
        assert f'disaggregated_requests_total{{routing_path="{path}"}} 0.0' in page
    for phase in ("prefill", "decode", "kv_transfer", "orchestration"):
        assert f'disaggregated_errors_total{{phase="{phase}"}} 0.0' in page
    assert page.count("# TYPE disaggregated_fallback_total counter") == 1
    await harness.ask()
    for sample in (
        'disaggregated_requests_total{routing_path="prefill_then_decode"}',
        'disaggregated_prefill_duration_seconds_count{backend="p"}',
        'disaggregated_decode_duration_seconds_count{backend="d"}',
        "disaggregated_kv_transfer_duration_seconds_count",
    ):
        assert await harness.metric(sample) == 1, sample


async def fails(turn: Turn) -> None:
    turn.answer(500, b"{}")


async def hands_nothing_off(turn: Turn) -> None:
    turn.answer(200, b'{"choices": []}')


@pytest.mark.parametrize(
    ("prefill", "phase"), [(fails, "prefill"), (hands_nothing_off, "kv_transfer")]
)
async def test_each_failure_counts_in_its_phase(
    harness: Harness, prefill: Script, phase: str
) -> None:
    await harness.prefill("p", prefill)
    await harness.decode("d")
    await harness.start()
    await harness.ask()
    assert await harness.metric(f'disaggregated_errors_total{{phase="{phase}"}}') == 1
    assert await harness.metric("disaggregated_fallback_total") == 1


async def test_each_engine_that_fails_counts_once(harness: Harness) -> None:
    for name in ("d-0", "d-1"):
        await harness.decode(name, fails)
    await harness.start()
    response, _ = await harness.ask()
    assert response.status == 500
    assert await harness.metric('disaggregated_errors_total{phase="decode"}') == 2


async def test_transfer_times_are_those_of_every_decode_engine(harness: Harness) -> None:
    async def answers_as_vllm(turn: Turn) -> None:
        # Without `x-tandem-timing`.
        turn.answer(200, b'{"choices": [{"text": "hello"}]}')

    def page_with(*seconds: float) -> Script:
        name = "vllm:nixl_xfer_time_seconds"
        count = f'{name}_bucket{{le="+Inf"}} {len(seconds)}\n{name}_sum {sum(seconds)}\n'

        async def page(turn: Turn) -> None:
            turn.answer(200, count.encode())

        return page

    await harness.prefill("p")
    decodes = [await harness.decode(f"d-{n}", answers_as_vllm) for n in range(2)]
    await harness.start()
    counted = "disaggregated_kv_transfer_duration_seconds_count"
    assert await harness.metric(counted) == 0
    decodes[0].metrics, decodes[1].metrics = page_with(0.1), page_with(0.2, 0.3)
    await harness.ask()
    # A page is asked for again after a second.
    async with asyncio.timeout(20):
        while await harness.metric(counted) != 3:
            await asyncio.sleep(0.1)


async def test_the_state_lists_the_backends(harness: Harness) -> None:
    await harness.prefill("p")
    await harness.decode("d", weight=2)
    await harness.start()
    state = json.loads(await harness.page("/state"))
    assert state["draining"] is False
    assert state["in_flight"] == []
    assert state["backends"] == [
        {
            "name": listed["name"],
            "role": listed["role"],
            "url": listed["url"],
            "models": [],
            "ready": True,
            "in_flight": 0,
            "weight": listed.get("weight", 1),
        }
        for listed in harness.backends
    ]


async def test_a_request_is_traced_by_its_id(harness: Harness) -> None:
    await harness.prefill("p")
    await harness.decode("d")
    await harness.start()
    response, _ = await harness.ask(headers={"x-request-id": "r-1"})
    assert response.headers["x-request-id"] == "r-1"
    run = asyncio.to_thread(CliRunner().invoke, trace, ["r-1", "--router", harness.admin("")])
    result = await run
    assert result.exit_code == 0, result.output
    assert "prefill_then_decode" in result.output
    assert "prefill    on p: answered" in result.output
    assert "decode     on d: answered" in result.output
    assert result.output.count("Request r-1") == 1


async def test_health_follows_the_backends_and_the_drain(harness: Harness) -> None:
    await harness.unified("u")
    await harness.start()
    for url in (harness.url("/health"), harness.admin("/health"), harness.admin("/readyz")):
        async with harness.http.get(url) as answer:
            assert answer.status == 200
    harness.router.components.lifecycle.drain()
    for url in (harness.url("/health"), harness.admin("/health")):
        async with harness.http.get(url) as answer:
            assert answer.status == 503
    response, _ = await harness.ask()
    assert response.status == 503
    assert response.headers["retry-after"] == "1"


async def test_a_client_cannot_say_who_serves_it(harness: Harness) -> None:
    await harness.prefill("p")
    decode = await harness.decode("d")
    await harness.start()
    forged = {
        "x-prefiller-host-port": "10.0.0.1:80",
        "x-tandem-plan": "forged",
        "x-data-parallel-host-port": "10.0.0.1:80",
    }
    body = {"model": "m", "prompt": [1] * 50, "kv_transfer_params": {"remote_engine_id": "mine"}}
    response, _ = await harness.ask(body, headers=forged)
    assert response.headers[DECODE] == "d"
    (sent,) = decode.requests
    assert not forged.keys() & sent.headers.keys()
    assert sent.json["kv_transfer_params"]["remote_engine_id"] == "engine-p"


async def test_paths_that_are_none_of_the_apis_are_refused(harness: Harness) -> None:
    decode = await harness.unified("u")
    await harness.start()
    for path in ("/metrics", "/sleep", "/v1/load_lora_adapter", "/server_info"):
        async with harness.http.get(harness.url(path)) as answer:
            assert answer.status == 404
    assert not decode.requests
