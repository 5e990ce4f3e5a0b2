"""Pushed KV that never arrives: vLLM's decode engine waits for it without limit."""

import asyncio

import pytest

from tandem_sidecar.settings import Policy

from ..conftest import Harness
from ..peers import Turn
from ..wire import wire

BODY = b'{"model": "m", "prompt": "Hi"}'
PATH = "X-Continuum-Routing-Path"
CONNECTOR = {"connector": "nixl-push", "push_timeout": 0.3}


async def waits_for_kv(turn: Turn) -> None:
    if b"kv_transfer_params" in turn.request.body:
        await turn.gone.wait()
    else:
        turn.answer(200, b'{"mine": true}')


async def test_kv_that_never_arrives_falls_back(harness: Harness) -> None:
    await harness.prefill()
    await harness.start(waits_for_kv, **CONNECTOR)
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert (answer.status, await answer.read()) == (200, b'{"mine": true}')
        assert answer.headers[PATH] == "fallback"
    assert len(harness.decode.requests) == 2
    assert await harness.metric('disaggregated_errors_total{phase="kv_transfer"}') == 1
    legs = 'tandem_sidecar_legs_total{phase="decode",result="deadline"}'
    assert await harness.metric(legs) == 1


async def test_kv_that_never_arrives_is_an_error_without_fallback(harness: Harness) -> None:
    await harness.prefill()
    await harness.start(waits_for_kv, policy=Policy(fallback_to_unified=False), **CONNECTOR)
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert answer.status == 502
        assert b"no output within 0.3s of a pushed hand-off" in await answer.read()


async def given_up(harness: Harness) -> None:
    """Send another request and wait until its `push_timeout` passed."""
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")


@pytest.mark.parametrize(
    "first", ["1", '{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}']
)
async def test_the_push_timeout_ends_with_the_first_output(harness: Harness, first: str) -> None:
    """vLLM sends the role with its first output; a parser may hold back many tokens after it."""

    async def slow(turn: Turn) -> None:
        if b"stream" not in turn.request.body:
            await waits_for_kv(turn)
            return
        turn.stream()
        turn.event(first)
        await harness.go.wait()
        turn.event("[DONE]")
        turn.end()

    await harness.prefill()
    await harness.start(slow, **CONNECTOR)
    stream = BODY.replace(b"{", b'{"stream": true, ', 1)
    url, candidates = harness.url("/v1/chat/completions"), harness.candidates
    asked = asyncio.create_task(harness.http.post(url, data=stream, headers=candidates))
    await harness.decode.received(1)
    await given_up(harness)
    harness.go.set()
    async with await asked as answer:
        assert answer.headers[PATH] == "prefill_then_decode"
        assert await answer.read() == f"data: {first}\n\ndata: [DONE]\n\n".encode()


async def test_a_client_that_disconnects_first_cancels_the_push_timeout(harness: Harness) -> None:
    await harness.prefill()
    await harness.start(waits_for_kv, **CONNECTOR)
    lines = [f"{k}: {v}" for k, v in harness.candidates.items()]
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY, *lines)
        await harness.decode.received(1)
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
    await given_up(harness)
    assert len(harness.decode.requests) == 3
