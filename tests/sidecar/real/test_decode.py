"""The decode engine hangs: before the first byte, and in mid-stream."""

import signal

import pytest

from .asking import Stream
from .engine import Engine
from .pair import LONG, SPLIT, alone, call, paired

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

SOON = ("--silence-timeout", "1s")


async def test_a_hang_before_the_first_byte_is_a_502(decode: Engine, prefill: Engine) -> None:
    async with paired(decode, *SOON) as pair:
        decode.stop()
        told = await pair.ask(call(40), prefill.address)
        assert (told.status, told.path) == (502, SPLIT.value)
        assert "no sign of life" in told.error
        assert await pair.errors() == {"decode": 1}
        decode.signal(signal.SIGCONT)
        await pair.at_rest(decode, prefill)
        again = call(41)
        assert (await pair.ask(again, prefill.address)).tokens == alone(again)


async def test_a_hang_in_mid_stream_is_an_error_event(decode: Engine, prefill: Engine) -> None:
    async with paired(decode, *SOON) as pair:
        long = call(42, tokens=LONG, stream=True)
        async with pair.asked(long, prefill.address) as response:
            stream = Stream(response)
            await stream.first()
            decode.stop()
            told = await stream.rest()
        assert told.status == 200
        assert "no sign of life" in told.error
        assert await pair.errors() == {"decode": 1}
        decode.signal(signal.SIGCONT)
        await pair.at_rest(decode, prefill)
