"""A drain with time left, and one past its timeout."""

import asyncio
import signal

import pytest

from tandem_contract import endpoints

from .asking import Stream, ask
from .engine import Engine
from .pair import LONG, alone, call, paired

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]


async def test_a_drain_finishes_running_requests(decode: Engine, prefill: Engine) -> None:
    async with paired(decode) as pair:
        it = call(50, tokens=60, stream=True)
        async with pair.asked(it, prefill.address) as response:
            stream = Stream(response)
            await stream.first()
            pair.sidecar.process.send_signal(signal.SIGTERM)
            told = await stream.rest()
        assert (told.status, told.error, told.tokens) == (200, "", alone(it))
        assert await pair.sidecar.exit_status() == 0


async def test_a_drain_finishes_a_request_in_its_prefill(decode: Engine, prefill: Engine) -> None:
    async with paired(decode) as pair:
        it = call(51)
        prefill.stop()
        client = asyncio.create_task(pair.ask(it, prefill.address))
        await pair.reaches("prefilling")
        async with pair.http.post(pair.sidecar.admin_url(endpoints.DRAIN)) as answer:
            assert (await answer.json())["in_flight"] == 1
        async with pair.http.get(pair.sidecar.admin_url(endpoints.READY)) as answer:
            assert answer.status == 503
        prefill.signal(signal.SIGCONT)
        told = await client
        assert (told.status, told.error, told.tokens) == (200, "", alone(it))
        await pair.at_rest(decode, prefill)


@pytest.mark.parametrize("stream", [True, False])
async def test_past_the_drain_timeout_the_client_gets_an_error(
    decode: Engine, prefill: Engine, stream: bool
) -> None:
    async with paired(decode, "--drain-timeout", "200ms") as pair:
        it = call(52, tokens=LONG, stream=stream)
        client = asyncio.create_task(ask(pair.http, pair.url, it, [prefill.address]))
        await pair.reaches("answering" if stream else "decoding")
        pair.sidecar.process.send_signal(signal.SIGTERM)
        told = await client
        assert told.status == (200 if stream else 503)
        assert "shutting down" in told.error
        assert await pair.sidecar.exit_status() == 0
        async with asyncio.timeout(20):
            while not (await decode.idle() and await prefill.idle()):
                pass
