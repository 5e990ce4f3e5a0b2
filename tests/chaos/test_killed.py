"""Engines killed: while they prefill, between the answer and the pull, while they decode."""

import asyncio

import pytest

from tandem_contract import metrics

from ..sidecar.real.altering_proxy import Params, altering_proxy
from ..sidecar.real.client import Stream
from ..sidecar.real.engine import Engine
from ..sidecar.real.pair import FALLBACK, LONG, SPLIT, call, expected_tokens, start_pair

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

AFTER_DEATH = (SPLIT.value, FALLBACK.value)
"""A pooled connection that ends before a response may be stale: the sidecar retries without KV."""


async def test_a_prefill_engine_killed_during_prefill_and_then_unreachable(
    decode: Engine, prefill: Engine, second_prefill: Engine
) -> None:
    async with start_pair(decode) as pair:
        request = call(1)
        prefill.stop()
        client = asyncio.create_task(pair.ask(request, prefill.address, second_prefill.address))
        await pair.wait_for_phase("prefilling")
        prefill.kill()
        answer = await client
        assert (answer.status, answer.path, answer.tokens) == (
            200,
            SPLIT.value,
            expected_tokens(request),
        )
        assert answer.prefill == str(second_prefill.address)
        request = call(2)
        answer = await pair.ask(request, prefill.address)
        assert (answer.status, answer.path, answer.tokens) == (
            200,
            FALLBACK.value,
            expected_tokens(request),
        )
        assert await pair.errors() == {"prefill": 2}
        await pair.wait_until_idle(decode, second_prefill)


async def test_without_fallback_a_dead_prefill_engine_is_a_502(
    decode: Engine, prefill: Engine
) -> None:
    prefill.kill()
    async with start_pair(decode, "--no-fallback-to-unified") as pair:
        answer = await pair.ask(call(3), prefill.address)
        assert (answer.status, answer.path) == (502, SPLIT.value)
        assert str(prefill.address) in answer.error
        assert await pair.errors() == {"prefill": 1}
        await pair.wait_until_idle(decode)


async def test_a_prefill_engine_killed_between_its_answer_and_the_pull(
    decode: Engine, prefill: Engine
) -> None:
    request = call(4)
    failed = await decode.figure(metrics.ENGINE_XFER_FAILED)

    async def kill_prefill(params: Params) -> Params:
        prefill.kill()
        return params

    async with altering_proxy(prefill, kill_prefill) as proxy, start_pair(decode) as pair:
        assert await pair.errors() == {}
        answer = await pair.ask(request, proxy.address)
        assert (answer.status, answer.path, answer.tokens) == (
            200,
            SPLIT.value,
            expected_tokens(request),
        )
        assert await decode.figure(metrics.ENGINE_XFER_FAILED) == failed + 1
        await pair.wait_for_errors(kv_transfer=1)
        await pair.wait_until_idle(decode)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_failed_by_a_kv_load_is_retried_once_without_kv(
    prefill: Engine, strict: Engine, stream: bool
) -> None:
    """vLLM's default policy: the engine answers 500, or an error as the stream's first event."""
    request = call(5, stream=stream)

    async def kill_prefill(params: Params) -> Params:
        prefill.kill()
        return params

    async with altering_proxy(prefill, kill_prefill) as proxy, start_pair(strict) as pair:
        answer = await pair.ask(request, proxy.address)
        assert (answer.status, answer.path, answer.error) == (200, FALLBACK.value, "")
        assert answer.tokens == expected_tokens(request)
        assert await pair.errors() == {"kv_transfer": 1}
        await pair.wait_until_idle(strict)


@pytest.mark.parametrize("split", [True, False])
async def test_a_decode_engine_killed_before_the_first_byte_is_a_502(
    decode: Engine, second_prefill: Engine, split: bool
) -> None:
    async with start_pair(decode) as pair:
        decode.stop()
        client = asyncio.create_task(
            pair.ask(call(6), *([second_prefill.address] if split else []))
        )
        await pair.wait_for_phase("decoding")
        decode.kill()
        answer = await client
        assert (answer.status, answer.path in (AFTER_DEATH if split else ("unified",))) == (
            502,
            True,
        )
        assert "decode failed" in answer.error
        assert (await pair.errors())["decode"] == 1
        # The decode engine, which would notify the producer, is dead: the short lease frees the KV.
        await pair.wait_until_idle(second_prefill)


async def test_a_decode_engine_killed_in_mid_stream_is_an_error_event(
    decode: Engine, prefill: Engine
) -> None:
    async with start_pair(decode) as pair:
        async with pair.open_response(
            call(7, tokens=LONG, stream=True), prefill.address
        ) as response:
            stream = Stream(response)
            await stream.wait_for_first_bytes()
            decode.kill()
            answer = await stream.read_to_end()
        assert answer.status == 200
        assert "decode failed" in answer.error
        assert await pair.errors() == {"decode": 1}
        await pair.wait_until_idle(prefill)


async def test_a_decode_engine_killed_before_a_whole_answer_is_a_502(
    decode: Engine, prefill: Engine
) -> None:
    async with start_pair(decode) as pair:
        generated = await decode.figure(metrics.ENGINE_GENERATION_TOKENS)
        client = asyncio.create_task(pair.ask(call(8, tokens=LONG), prefill.address))
        async with asyncio.timeout(60):
            while await decode.figure(metrics.ENGINE_GENERATION_TOKENS) < generated + 5:
                pass
        decode.kill()
        answer = await client
        assert (answer.status, answer.path in AFTER_DEATH) == (502, True)
        assert "decode failed" in answer.error
        assert (await pair.errors())["decode"] == 1
        await pair.wait_until_idle(prefill)
