"""The prefill pod fails, is busy, hangs or refuses: real engines, some with changed answers."""

import signal

import pytest

from tandem_contract import metrics
from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath

from ..peers import FakePrefill, Script, Turn
from .engine import Engine
from .pair import FALLBACK, SPLIT, Pair, alone, call, paired

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

NO_FALLBACK = "--no-fallback-to-unified"


def says(status: int, *headers: str) -> Script:
    async def script(turn: Turn) -> None:
        turn.answer(status, b'{"error": {"message": "scripted"}}', *headers)

    return script


async def dies(turn: Turn) -> None:
    turn.die()


async def answered(pair: Pair, seed: int, path: RoutingPath, *prefills: HostPort) -> None:
    """Send a request and check that the answer is right and took `path`."""
    it = call(seed)
    told = await pair.ask(it, *prefills)
    assert (told.status, told.path, told.error) == (200, path.value, "")
    assert told.tokens == alone(it)


@pytest.mark.parametrize("script", [says(500), says(429), says(503), dies])
async def test_a_failing_pod_costs_an_attempt_and_no_answer(
    decode: Engine, prefill: Engine, script: Script
) -> None:
    async with FakePrefill(script) as bad, paired(decode) as pair:
        await answered(pair, 1, SPLIT, bad.address, prefill.address)
        await answered(pair, 2, FALLBACK, bad.address)
        assert len(bad.requests) == 2
        assert await pair.errors() == {"prefill": 2}
        assert (await pair.ended(SPLIT), await pair.ended(FALLBACK)) == (1, 1)
        assert await pair.figure(metrics.FALLBACKS) == 1
        await pair.at_rest(decode, prefill)


async def test_a_retry_after_of_a_pod_is_honoured(decode: Engine, prefill: Engine) -> None:
    async with FakePrefill(says(503, "Retry-After: 30")) as busy, paired(decode) as pair:
        for seed in (3, 4):
            await answered(pair, seed, SPLIT, busy.address, prefill.address)
        assert len(busy.requests) == 1
        assert await pair.errors() == {"prefill": 1}
        await pair.at_rest(decode, prefill)


async def test_without_fallback_the_error_has_a_retry_after(decode: Engine) -> None:
    script = says(503, "Retry-After: 30")
    async with FakePrefill(script) as busy, paired(decode, NO_FALLBACK) as pair:
        first, held = [await pair.ask(call(seed), busy.address) for seed in (5, 6)]
        assert (first.status, held.status) == (502, 503)
        assert "busy (503)" in first.error
        assert "circuit breaker" in held.error
        assert 1 <= int(held.retry_after) <= 30
        assert await pair.errors() == {"prefill": 1}
        await pair.at_rest(decode)


async def test_the_engines_own_refusal_is_forwarded(decode: Engine, prefill: Engine) -> None:
    async with paired(decode) as pair:
        too_long = call(7, length=4000, tokens=200)
        alone_told = await pair.ask(too_long)
        told = await pair.ask(too_long, prefill.address, prefill.address)
        assert (told.status, told.path) == (400, SPLIT.value)
        assert told.error == alone_told.error
        assert await pair.figure("tandem_sidecar_legs_total", phase="prefill") == 1
        assert await pair.errors() == {}
        await pair.at_rest(decode, prefill)


async def test_a_hung_pod_is_replaced_by_the_next_and_holds_no_kv(
    decode: Engine, prefill: Engine, second: Engine
) -> None:
    async with paired(decode, "--silence-timeout", "1s") as pair:
        prefill.stop()
        await answered(pair, 8, SPLIT, prefill.address, second.address)
        await answered(pair, 9, FALLBACK, prefill.address)
        assert await pair.errors() == {"prefill": 1}, "one hang opens the circuit"
        prefill.signal(signal.SIGCONT)
        # A late answer to the aborted prefill is released: the lease is longer than any test.
        await pair.at_rest(decode, prefill, second)


async def test_a_pod_that_stays_hung_past_the_deadline_is_a_504(
    decode: Engine, prefill: Engine
) -> None:
    async with paired(decode, NO_FALLBACK, "--prefill-timeout", "500ms") as pair:
        prefill.stop()
        told = await pair.ask(call(10), prefill.address)
        assert (told.status, told.path) == (504, SPLIT.value)
        assert "no prefill within 0.5s" in told.error
        assert await pair.errors() == {"prefill": 1}
        prefill.signal(signal.SIGCONT)
        await pair.at_rest(decode, prefill)
