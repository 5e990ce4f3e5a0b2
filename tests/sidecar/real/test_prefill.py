"""The prefill pod fails, is busy, hangs or refuses: real engines, some with changed answers."""

import asyncio
import signal

import pytest

from tandem_contract import metrics
from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath

from ..peers import FakePrefill, Script, Turn
from .engine import Engine
from .pair import FALLBACK, SPLIT, Pair, call, expected_tokens, start_pair

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

COMPUTED = metrics.PromptSource.COMPUTED.value
NO_FALLBACK = "--no-fallback-to-unified"


def respond_with(status: int, *headers: str) -> Script:
    async def script(turn: Turn) -> None:
        turn.answer(status, b'{"error": {"message": "scripted"}}', *headers)

    return script


async def drop_connection(turn: Turn) -> None:
    turn.die()


async def check_answer(pair: Pair, seed: int, path: RoutingPath, *prefills: HostPort) -> None:
    """Send a request and check that the answer is right and took `path`."""
    request = call(seed)
    result = await pair.ask(request, *prefills)
    assert (result.status, result.path, result.error) == (200, path.value, "")
    assert result.tokens == expected_tokens(request)


@pytest.mark.parametrize(
    "script", [respond_with(500), respond_with(429), respond_with(503), drop_connection]
)
async def test_a_failing_pod_costs_an_attempt_and_no_answer(
    decode: Engine, prefill: Engine, script: Script
) -> None:
    async with FakePrefill(script) as bad, start_pair(decode) as pair:
        await check_answer(pair, 1, SPLIT, bad.address, prefill.address)
        await check_answer(pair, 2, FALLBACK, bad.address)
        assert len(bad.requests) == 2
        assert await pair.errors() == {"prefill": 2}
        assert (await pair.finished_on(SPLIT), await pair.finished_on(FALLBACK)) == (1, 1)
        assert await pair.figure(metrics.FALLBACKS) == 1
        await pair.wait_until_idle(decode, prefill)


async def test_a_retry_after_of_a_pod_is_honoured(decode: Engine, prefill: Engine) -> None:
    async with (
        FakePrefill(respond_with(503, "Retry-After: 30")) as busy,
        start_pair(decode) as pair,
    ):
        for seed in (3, 4):
            await check_answer(pair, seed, SPLIT, busy.address, prefill.address)
        assert len(busy.requests) == 1
        assert await pair.errors() == {"prefill": 1}
        await pair.wait_until_idle(decode, prefill)


async def test_without_fallback_the_error_has_a_retry_after(decode: Engine) -> None:
    script = respond_with(503, "Retry-After: 30")
    async with FakePrefill(script) as busy, start_pair(decode, NO_FALLBACK) as pair:
        first_result, second_result = [await pair.ask(call(seed), busy.address) for seed in (5, 6)]
        assert (first_result.status, second_result.status) == (503, 503)
        assert "busy (503)" in first_result.error
        assert "circuit breaker" in second_result.error
        assert first_result.retry_after == "30"
        assert 1 <= int(second_result.retry_after) <= 30
        assert await pair.errors() == {"prefill": 1}
        await pair.wait_until_idle(decode)


async def test_the_decode_engines_own_refusal_is_forwarded(decode: Engine, prefill: Engine) -> None:
    async with start_pair(decode) as pair:
        too_long = call(7, length=4000, tokens=200)
        direct_result = await pair.ask(too_long)
        result = await pair.ask(too_long, prefill.address, prefill.address)
        assert (result.status, result.path) == (400, SPLIT.value)
        assert result.error == direct_result.error
        assert await pair.figure("tandem_sidecar_legs_total", phase="prefill") == 1
        assert await pair.errors() == {}
        await pair.wait_until_idle(decode, prefill)


async def test_a_hung_pod_is_replaced_by_the_next_and_holds_no_kv(
    decode: Engine, prefill: Engine, second_prefill: Engine
) -> None:
    async with start_pair(decode, "--silence-timeout", "1s") as pair:
        prefill.stop()
        await check_answer(pair, 8, SPLIT, prefill.address, second_prefill.address)
        await check_answer(pair, 9, FALLBACK, prefill.address)
        assert await pair.errors() == {"prefill": 1}, "one hang opens the circuit"
        prefill.signal(signal.SIGCONT)
        # A late answer to the aborted prefill is released: the lease is longer than any test.
        await pair.wait_until_idle(decode, prefill, second_prefill)


async def test_a_pod_that_stays_hung_past_the_deadline_is_a_504(
    decode: Engine, prefill: Engine
) -> None:
    async with start_pair(decode, NO_FALLBACK, "--prefill-timeout", "500ms") as pair:
        prefill.stop()
        result = await pair.ask(call(10), prefill.address)
        assert (result.status, result.path) == (504, SPLIT.value)
        assert "no prefill within 0.5s" in result.error
        assert await pair.errors() == {"prefill": 1}
        prefill.signal(signal.SIGCONT)
        await pair.wait_until_idle(decode, prefill)


async def test_a_long_prefill_delays_no_tokens_of_other_requests(
    decode: Engine, prefill: Engine
) -> None:
    async with start_pair(decode) as pair:
        computed = await decode.figure(metrics.ENGINE_PROMPT_BY_SOURCE, source=COMPUTED)
        # A prefill that lasts as long as the test wants: its pod is stopped.
        prefill.stop()
        long_prompt = call(60, length=1500)
        handed = asyncio.create_task(pair.ask(long_prompt, prefill.address))
        await pair.wait_for_phase("prefilling")
        short = call(61, tokens=100, length=8)
        answered = await pair.ask(short)
        assert (answered.status, answered.tokens) == (200, expected_tokens(short))
        assert not handed.done()
        prefill.signal(signal.SIGCONT)
        result = await handed
        assert (result.path, result.tokens) == (SPLIT.value, expected_tokens(long_prompt))
        # Of the long prompt the decode engine computed no more than the last token, which counts as
        # transferred: no step of its batch had to wait for it.
        computed_here = await decode.figure(metrics.ENGINE_PROMPT_BY_SOURCE, source=COMPUTED)
        assert computed_here - computed == len(short.prompt)
        await pair.wait_until_idle(decode, prefill)
