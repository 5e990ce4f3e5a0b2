"""A drain with time left, and one past its timeout."""

import asyncio
import signal

import pytest

from tandem_contract import endpoints

from ..processes import drain
from .client import Stream, ask
from .engine import Engine
from .pair import LONG, call, expected_tokens, start_pair

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]


async def test_a_drain_finishes_running_requests(decode: Engine, prefill: Engine) -> None:
    async with start_pair(decode) as pair:
        request = call(50, tokens=60, stream=True)
        async with pair.open_response(request, prefill.address) as response:
            stream = Stream(response)
            await stream.wait_for_first_bytes()
            pair.sidecar.process.send_signal(signal.SIGTERM)
            result = await stream.read_to_end()
        assert (result.status, result.error, result.tokens) == (200, "", expected_tokens(request))
        assert await pair.sidecar.exit_status() == 0


async def test_a_drain_finishes_a_request_in_its_prefill(decode: Engine, prefill: Engine) -> None:
    async with start_pair(decode) as pair:
        request = call(51)
        prefill.stop()
        client = asyncio.create_task(pair.ask(request, prefill.address))
        await pair.wait_for_phase("prefilling")
        assert await drain(pair.sidecar.admin) == {"draining": True, "in_flight": 1}
        async with pair.http.get(pair.sidecar.admin_url(endpoints.READY)) as answer:
            assert answer.status == 503
        prefill.signal(signal.SIGCONT)
        result = await client
        assert (result.status, result.error, result.tokens) == (200, "", expected_tokens(request))
        await pair.wait_until_idle(decode, prefill)


@pytest.mark.parametrize("stream", [True, False])
async def test_past_the_drain_timeout_the_client_gets_an_error(
    decode: Engine, prefill: Engine, stream: bool
) -> None:
    async with start_pair(decode, "--drain-timeout", "200ms") as pair:
        request = call(52, tokens=LONG, stream=stream)
        client = asyncio.create_task(ask(pair.http, pair.url, request, [prefill.address]))
        await pair.wait_for_phase("answering" if stream else "decoding")
        pair.sidecar.process.send_signal(signal.SIGTERM)
        result = await client
        assert result.status == (200 if stream else 503)
        assert "shutting down" in result.error
        assert await pair.sidecar.exit_status() == 0
        async with asyncio.timeout(20):
            while not (await decode.idle() and await prefill.idle()):
                pass
