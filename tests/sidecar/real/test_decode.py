"""The decode engine hangs: before the first byte, and in mid-stream."""

import signal

import pytest

from .client import Stream
from .engine import Engine
from .pair import LONG, SPLIT, call, expected_tokens, start_pair

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

SOON = ("--silence-timeout", "1s")


async def test_a_hang_before_the_first_byte_is_a_502(decode: Engine, prefill: Engine) -> None:
    async with start_pair(decode, *SOON) as pair:
        decode.stop()
        result = await pair.ask(call(40), prefill.address)
        assert (result.status, result.path) == (502, SPLIT.value)
        assert "no sign of life" in result.error
        assert await pair.errors() == {"decode": 1}
        decode.signal(signal.SIGCONT)
        await pair.wait_until_idle(decode, prefill)
        next_request = call(41)
        assert (await pair.ask(next_request, prefill.address)).tokens == expected_tokens(
            next_request
        )


async def test_a_hang_in_mid_stream_is_an_error_event(decode: Engine, prefill: Engine) -> None:
    async with start_pair(decode, *SOON) as pair:
        long_request = call(42, tokens=LONG, stream=True)
        async with pair.open_response(long_request, prefill.address) as response:
            stream = Stream(response)
            await stream.wait_for_first_bytes()
            decode.stop()
            result = await stream.read_to_end()
        assert result.status == 200
        assert "no sign of life" in result.error
        assert await pair.errors() == {"decode": 1}
        decode.signal(signal.SIGCONT)
        await pair.wait_until_idle(decode, prefill)
