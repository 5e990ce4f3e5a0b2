"""A client disconnects at each of three moments: the KV is freed long before its lease ends."""

import asyncio
import signal

import pytest

from tandem_contract import metrics

from .client import Stream
from .engine import Engine
from .pair import LONG, Pair, call, expected_tokens, start_pair

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]


async def disconnect_at(pair: Pair, phase: str, prefill: Engine, *, stream: bool) -> None:
    """Send a request and close the connection when it is in `phase`."""
    client = asyncio.create_task(
        pair.ask(call(30, tokens=LONG, stream=stream), prefill.address, request_id="left")
    )
    await pair.wait_for_phase(phase)
    client.cancel()
    await asyncio.wait([client])

    async with asyncio.timeout(20):
        while phase in await pair.phases():
            pass


async def check_nothing_kept(pair: Pair, prefill: Engine, decode: Engine, seed: int) -> None:
    """Both engines have all blocks free, no lease expired, and the pair still serves."""
    await pair.wait_until_idle(decode, prefill)
    assert await prefill.figure(metrics.ENGINE_KV_EXPIRED) == 0
    assert await pair.figure("tandem_sidecar_outcomes_total", outcome="abandoned") == 1
    next_request = call(seed)
    assert (await pair.ask(next_request, prefill.address)).tokens == expected_tokens(next_request)
    await pair.wait_until_idle(decode, prefill)


@pytest.mark.parametrize("stream", [True, False])
async def test_during_the_prefill(decode: Engine, prefill: Engine, stream: bool) -> None:
    async with start_pair(decode) as pair:
        prefill.stop()
        await disconnect_at(pair, "prefilling", prefill, stream=stream)
        prefill.signal(signal.SIGCONT)
        await check_nothing_kept(pair, prefill, decode, 31)


@pytest.mark.parametrize("stream", [True, False])
async def test_between_prefill_and_decode(decode: Engine, prefill: Engine, stream: bool) -> None:
    async with start_pair(decode) as pair:
        decode.stop()
        await disconnect_at(pair, "decoding", prefill, stream=stream)
        decode.signal(signal.SIGCONT)
        await check_nothing_kept(pair, prefill, decode, 32)


async def test_while_the_answer_is_streamed(decode: Engine, prefill: Engine) -> None:
    async with start_pair(decode) as pair:
        long_request = call(33, tokens=LONG, stream=True)
        async with pair.open_response(long_request, prefill.address) as response:
            await Stream(response).wait_for_first_bytes()
        await check_nothing_kept(pair, prefill, decode, 34)


async def test_while_a_whole_answer_is_computed(decode: Engine, prefill: Engine) -> None:
    async with start_pair(decode) as pair:
        generated = await decode.figure(metrics.ENGINE_GENERATION_TOKENS)
        client = asyncio.create_task(pair.ask(call(35, tokens=LONG), prefill.address))
        async with asyncio.timeout(20):
            while await decode.figure(metrics.ENGINE_GENERATION_TOKENS) < generated + 5:
                pass
        client.cancel()
        await check_nothing_kept(pair, prefill, decode, 36)
