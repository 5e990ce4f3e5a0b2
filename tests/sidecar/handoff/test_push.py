"""Pushed KV that never arrives: vLLM's decode engine waits for it without limit."""

import asyncio

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
        assert b"no first token within 0.3s of a pushed hand-off" in await answer.read()


async def given_up(harness: Harness) -> None:
    """Send another request and wait until its `push_timeout` passed."""
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")


async def test_the_push_timeout_ends_with_the_first_byte(harness: Harness) -> None:
    async def slow(turn: Turn) -> None:
        if b"stream" not in turn.request.body:
            await waits_for_kv(turn)
            return
        turn.stream()
        turn.event("1")
        await harness.go.wait()
        turn.event("[DONE]")
        turn.end()

    await harness.prefill()
    await harness.start(slow, **CONNECTOR)
    stream = BODY.replace(b"{", b'{"stream": true, ', 1)
    async with harness.http.post(harness.url(), data=stream, headers=harness.candidates) as answer:
        assert await answer.content.readline() == b"data: 1\n"
        await given_up(harness)
        harness.go.set()
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


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
