"""OpenAI's SDK between real engines: what it makes of failures that scripts only imitate."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

import openai
import pytest

from tandem_contract import headers
from tandem_contract.commandline import HostPort
from tandem_contract.request_kinds import RequestKind

from ..sdks import SDKS, Server
from .altering_proxy import Params, altering_proxy
from .engine import Engine
from .pair import LONG, TOKENS, Pair, start_pair, until

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

SERVED = {kind: SDKS[kind] for kind in (RequestKind.COMPLETIONS, RequestKind.CHAT)}
"""What the reference engine serves."""


def prompt(number: int) -> str:
    return f"{number}: how far is the harbour? " * 10


def server(pair: Pair, *prefills: HostPort) -> Server:
    return Server(pair.url, {headers.PREFILLER_HOST_PORT: ",".join(map(str, prefills))})


async def check_errors(
    pair: Pair, prefill: Engine, fail: Callable[[], Awaitable[None]], words: str
) -> None:
    """Each SDK raises its own error if `fail` runs while all answers are streamed."""
    asked = [
        asyncio.create_task(ask(server(pair, prefill.address), prompt(number), LONG, True))
        for number, ask in enumerate(SERVED.values())
    ]

    async def are_answering() -> bool:
        return await pair.phases() == ["answering"] * len(asked)

    await until(are_answering)
    await fail()
    for task in asked:
        with pytest.raises(openai.APIError, match=words):
            await task


async def test_a_decode_engine_killed_in_mid_stream(decode: Engine, prefill: Engine) -> None:
    async def fail() -> None:
        decode.kill()

    async with start_pair(decode) as pair:
        await check_errors(pair, prefill, fail, "decode failed")
        await pair.wait_until_idle(prefill)


async def test_a_decode_engine_that_stops_in_mid_stream(decode: Engine, prefill: Engine) -> None:
    async def fail() -> None:
        decode.stop()

    async with start_pair(decode, "--silence-timeout", "1s") as pair:
        await check_errors(pair, prefill, fail, "no sign of life")
        decode.signal(signal.SIGCONT)
        await pair.wait_until_idle(decode, prefill)


async def test_a_drain_that_expires(decode: Engine, prefill: Engine) -> None:
    async with start_pair(decode, "--drain-timeout", "200ms") as pair:

        async def fail() -> None:
            pair.sidecar.process.send_signal(signal.SIGTERM)

        await check_errors(pair, prefill, fail, "shutting down")


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_kv_that_cannot_be_read_costs_no_answer(
    decode: Engine, second_prefill: Engine, policy: str
) -> None:
    async def name_another_port(params: Params) -> Params:
        return params | {"remote_port": 1}

    before, decode.policy = decode.policy, policy
    if policy != before:
        decode.kill()
        await decode.up()
    try:
        async with (
            altering_proxy(second_prefill, name_another_port) as proxy,
            start_pair(decode) as pair,
        ):
            for number, ask in enumerate(SERVED.values()):
                for stream in (True, False):
                    text = prompt(10 + 2 * number + stream)
                    handed = await ask(server(pair, proxy.address), text, TOKENS, stream)
                    assert handed == await ask(Server(decode.url), text, TOKENS, False) != ""
            await pair.wait_until_idle(decode)
    finally:
        # The sidecar cannot tell where the KV is, and its lease may be longer than the tests.
        second_prefill.kill()
        if policy != before:
            decode.policy = before
            decode.kill()
