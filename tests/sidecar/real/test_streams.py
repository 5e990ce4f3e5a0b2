"""KV that the decode engine reads while the prefill engine computes it: real engines, real sidecar.

Each test first sends one request, from which the sidecar learns that both engines can.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tandem_contract import metrics
from tandem_contract.commandline import HostPort
from tandem_contract.concurrent_params import STREAM
from tandem_contract.paths import RoutingPath

from ..peers import Script, Turn
from .client import Stream
from .engine import Engine
from .forwarding import forwarding_pod
from .pair import FALLBACK, LONG, SPLIT, Pair, call, expected_tokens, start_pair, until
from .test_disconnects import check_nothing_kept, disconnect_at
from .test_prefill import drop_connection, respond_with

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]


@asynccontextmanager
async def streaming(
    decode: Engine, *prefills: HostPort, flags: tuple[str, ...] = ()
) -> AsyncIterator[Pair]:
    """A sidecar that has handed one request off to each of `prefills`."""
    async with start_pair(decode, "--stream-kv", *flags) as pair:
        for seed, prefill in enumerate(prefills):
            await check(pair, 900 + seed, SPLIT, prefill)
        yield pair


async def check(pair: Pair, seed: int, path: RoutingPath, *prefills: HostPort) -> None:
    """Send a request and check that the answer is right and took `path`."""
    request = call(seed, length=500)
    result = await pair.ask(request, *prefills)
    assert (result.status, result.path, result.error) == (200, path.value, "")
    assert result.tokens == expected_tokens(request)


async def send(_: Turn) -> bool:
    return True


async def test_kv_moves_before_the_prefill_answers(decode: Engine, prefill: Engine) -> None:
    """The decode engine has read everything when the prefill's answer is let through."""
    transfers = f"{metrics.ENGINE_XFER_SECONDS}_count"
    answered: list[float] = []

    async def is_read() -> bool:
        # The decode engine counts a transfer a moment after the prefill engine frees its KV.
        return await decode.figure(transfers) > before

    async def wait_for_read(turn: Turn) -> bool:
        if STREAM.encode() in turn.request.body:
            await until(is_read)
            answered.append(await decode.figure(transfers))
        return True

    async with (
        forwarding_pod(prefill, wait_for_read) as pod,
        streaming(decode, pod.address) as pair,
    ):
        before = await decode.figure(transfers)
        await check(pair, 1, SPLIT, pod.address)
        assert answered == [before + 1]
        assert await pair.errors() == {}
        await pair.wait_until_idle(decode, prefill)


async def test_without_the_flag_or_knowledge_the_legs_are_sequential(
    decode: Engine, prefill: Engine
) -> None:
    async with forwarding_pod(prefill, send) as pod:
        async with start_pair(decode, "--no-stream-kv") as pair:
            for seed in (1, 2):
                await check(pair, seed, SPLIT, pod.address)
        async with start_pair(decode, "--stream-kv") as pair:
            await check(pair, 3, SPLIT, pod.address)
        assert [STREAM.encode() in r.body for r in pod.requests] == [False] * 3


async def test_a_busy_pod_gets_the_next_decode_leg_after_its_answer(
    decode: Engine, prefill: Engine
) -> None:
    """A prompt in the pod's queue would only hold the decode engine's blocks."""
    async with forwarding_pod(prefill, send) as pod, streaming(decode, pod.address) as pair:
        prefill.stop()
        asked = []
        for seed in (1, 2, 3):
            asked.append(asyncio.create_task(check(pair, seed, SPLIT, pod.address)))
            await pod.received(1 + seed)
        prefill.signal(signal.SIGCONT)
        await asyncio.gather(*asked)
        streamed = [STREAM.encode() in request.body for request in pod.requests]
        assert streamed == [False, True, True, False]
        await pair.wait_until_idle(decode, prefill)


@pytest.mark.parametrize(
    "script", [respond_with(500), respond_with(429), respond_with(503), drop_connection]
)
async def test_a_prefill_that_fails_after_it_was_read(
    decode: Engine, prefill: Engine, second_prefill: Engine, script: Script
) -> None:
    """The client gets no answer from the KV of a prefill that failed."""

    async def fail(turn: Turn) -> bool:
        if STREAM.encode() not in turn.request.body:
            return True
        await script(turn)
        return False

    async with forwarding_pod(prefill, fail) as pod:
        async with streaming(decode, pod.address, second_prefill.address) as pair:
            await check(pair, 1, SPLIT, pod.address, second_prefill.address)
            assert len(pod.requests) == 2
            assert await pair.errors() == {"prefill": 1}
            await pair.wait_until_idle(decode, prefill, second_prefill)
        async with streaming(decode, pod.address) as pair:
            await check(pair, 2, FALLBACK, pod.address)
            await pair.wait_until_idle(decode, prefill)


async def test_a_prefill_that_refuses(decode: Engine, prefill: Engine) -> None:
    async def refuse(turn: Turn) -> bool:
        if STREAM.encode() not in turn.request.body:
            return True
        turn.answer(422, b'{"error": {"message": "scripted"}}')
        return False

    async with forwarding_pod(prefill, refuse) as pod, streaming(decode, pod.address) as pair:
        await check(pair, 1, FALLBACK, pod.address)
        assert await pair.errors() == {"prefill": 1}
        await pair.wait_until_idle(decode, prefill)


async def test_a_prefill_pod_that_dies_and_comes_back(
    decode: Engine, second_prefill: Engine
) -> None:
    """It is unreachable, then another engine at the same address: nothing is read of the old."""
    async with streaming(decode, second_prefill.address) as pair:
        second_prefill.kill()
        await check(pair, 1, FALLBACK, second_prefill.address)
        await second_prefill.up()
        for seed in (2, 3):
            await check(pair, seed, SPLIT, second_prefill.address)
        await pair.wait_until_idle(decode, second_prefill)


async def test_a_restart_that_the_sidecar_has_not_noticed(
    decode: Engine, second_prefill: Engine
) -> None:
    async with streaming(decode, second_prefill.address) as pair:
        second_prefill.kill()
        await second_prefill.up()
        failed = await decode.figure(metrics.ENGINE_XFER_FAILED)
        await check(pair, 1, SPLIT, second_prefill.address)
        assert await decode.figure(metrics.ENGINE_XFER_FAILED) == failed + 1
        await check(pair, 2, SPLIT, second_prefill.address)
        assert await decode.figure(metrics.ENGINE_XFER_FAILED) == failed + 1
        await pair.wait_until_idle(decode, second_prefill)


async def test_a_decode_engine_that_fails_what_it_cannot_read(
    decode: Engine, second_prefill: Engine
) -> None:
    """With vLLM's default policy the decode leg ends first: it computes the prompt, once."""
    decode.kill()
    decode.policy = "fail"
    await decode.up()
    try:
        async with streaming(decode, second_prefill.address) as pair:
            second_prefill.kill()
            await second_prefill.up()
            await check(pair, 1, FALLBACK, second_prefill.address)
            # The first of them is sequential, and the sidecar learns the new engine from it.
            for seed in (2, 3):
                await check(pair, seed, SPLIT, second_prefill.address)
            assert await pair.errors() == {"kv_transfer": 1}
            await pair.wait_until_idle(decode, second_prefill)
    finally:
        decode.kill()
        decode.policy = "recompute"


async def test_a_hung_prefill_is_given_up(decode: Engine, prefill: Engine) -> None:
    flags = ("--prefill-timeout", "2s")
    async with streaming(decode, prefill.address, flags=flags) as pair:
        prefill.stop()
        await check(pair, 1, FALLBACK, prefill.address)
        prefill.signal(signal.SIGCONT)
        await pair.wait_until_idle(decode, prefill)


async def test_a_prefill_dies_in_the_middle(decode: Engine, second_prefill: Engine) -> None:
    async with streaming(decode, second_prefill.address) as pair:
        second_prefill.stop()
        answer = asyncio.create_task(pair.ask(call(1, length=500), second_prefill.address))
        await pair.wait_for_phase("pairing")
        second_prefill.kill()
        result = await answer
        assert (result.status, result.path) == (200, FALLBACK.value)
        assert result.tokens == expected_tokens(call(1, length=500))
        await pair.wait_until_idle(decode)
        await second_prefill.up()


async def test_the_client_leaves(decode: Engine, prefill: Engine) -> None:
    async with streaming(decode, prefill.address) as pair:
        prefill.stop()
        await disconnect_at(pair, "pairing", prefill, stream=True)
        prefill.signal(signal.SIGCONT)
        await check_nothing_kept(pair, prefill, decode, 31)


async def test_the_client_leaves_while_decode_hangs(decode: Engine, prefill: Engine) -> None:
    async with streaming(decode, prefill.address) as pair:
        decode.stop()
        await disconnect_at(pair, "decoding", prefill, stream=True)
        decode.signal(signal.SIGCONT)
        await check_nothing_kept(pair, prefill, decode, 32)


async def test_decode_dies(decode: Engine, prefill: Engine) -> None:
    """The prefill, which has lost its reader, is aborted; the gateway may try another pod."""
    async with streaming(decode, prefill.address) as pair:
        prefill.stop()
        decode.kill()
        result = await pair.ask(call(1, length=500), prefill.address)
        assert result.status == 502
        prefill.signal(signal.SIGCONT)
        await pair.wait_until_idle(prefill)
        await decode.up()
        await check(pair, 2, SPLIT, prefill.address)


async def test_decode_dies_in_mid_stream(decode: Engine, prefill: Engine) -> None:
    """An answer that was started ends with an error event, never silently."""
    async with streaming(decode, prefill.address) as pair:
        request = call(1, tokens=LONG, length=500, stream=True)
        async with pair.open_response(request, prefill.address) as response:
            stream = Stream(response)
            await stream.wait_for_first_bytes()
            decode.kill()
            result = await stream.read_to_end()
        assert (result.status, result.path) == (200, SPLIT.value)
        assert result.error
        await pair.wait_until_idle(prefill)
        await decode.up()


async def test_a_prefill_answer_without_params(decode: Engine, prefill: Engine) -> None:
    """What the decode engine has read meanwhile counts for nothing."""

    async def answer_without(turn: Turn) -> bool:
        if STREAM.encode() not in turn.request.body:
            return True
        turn.answer(200, b'{"choices": [{"text": "x"}]}')
        return False

    async with (
        forwarding_pod(prefill, answer_without) as pod,
        streaming(decode, pod.address) as pair,
    ):
        await check(pair, 1, FALLBACK, pod.address)
        assert await pair.errors() == {"kv_transfer": 1}
        await pair.wait_until_idle(decode, prefill)


async def test_without_the_fallback_a_failed_prefill_is_an_error(
    decode: Engine, prefill: Engine
) -> None:
    flags = ("--no-fallback-to-unified", "--prefill-timeout", "2s")

    async def fail(turn: Turn) -> bool:
        if STREAM.encode() not in turn.request.body:
            return True
        turn.answer(500, b'{"error": {"message": "scripted"}}')
        return False

    async with (
        forwarding_pod(prefill, fail) as pod,
        streaming(decode, pod.address, flags=flags) as pair,
    ):
        assert (await pair.ask(call(1, length=500), pod.address)).status == 502
        await pair.wait_until_idle(decode, prefill)
    async with streaming(decode, prefill.address, flags=flags) as pair:
        prefill.stop()
        assert (await pair.ask(call(2, length=500), prefill.address)).status == 504
        prefill.signal(signal.SIGCONT)
        await pair.wait_until_idle(decode, prefill)


async def test_a_drain_finishes_both_legs(decode: Engine, prefill: Engine) -> None:
    async with streaming(decode, prefill.address) as pair:
        prefill.stop()
        checked = asyncio.create_task(check(pair, 1, SPLIT, prefill.address))
        await pair.wait_for_phase("pairing")
        pair.sidecar.process.send_signal(signal.SIGTERM)
        prefill.signal(signal.SIGCONT)
        await checked
        assert await pair.sidecar.exit_status() == 0


async def test_past_the_drain_timeout_both_legs_end(decode: Engine, prefill: Engine) -> None:
    async with streaming(decode, prefill.address, flags=("--drain-timeout", "200ms")) as pair:
        prefill.stop()
        asked = asyncio.create_task(pair.ask(call(1, length=500), prefill.address))
        await pair.wait_for_phase("pairing")
        pair.sidecar.process.send_signal(signal.SIGTERM)
        result = await asked
        assert (result.status, "shutting down" in result.error) == (503, True)
        assert await pair.sidecar.exit_status() == 0
        prefill.signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            while not (await decode.idle() and await prefill.idle()):
                pass


async def test_the_router_and_the_history_are_told(decode: Engine, prefill: Engine) -> None:
    async with streaming(decode, prefill.address) as pair:
        before = await pair.figure(metrics.STREAMED_HANDOFFS)
        result = await pair.ask(call(1, length=500), prefill.address, request_id="streamed-1")
        assert result.path == SPLIT.value
        async with pair.http.get(pair.sidecar.admin_url("/requests/streamed-1")) as answer:
            [record] = await answer.json()
        legs = {leg["phase"]: leg for leg in record["legs"]}
        assert legs["decode"]["streamed"]
        assert legs["decode"]["started"] < legs["prefill"]["ended"]
        assert record["timing"]["streamed"] == 1
        assert record["timing"]["waited"] >= 0
        assert await pair.figure(metrics.STREAMED_HANDOFFS) == before + 1
