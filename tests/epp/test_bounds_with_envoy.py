"""Bounds of request bodies behind real Envoy: what all of them hold together, and their time."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tandem_contract import headers as wire
from tandem_operator.routing.envoy.http_filters import BodyMode

from .real import until
from .test_with_envoy import COMPLETIONS, MODES, Stack, at_rest, post, running

pytestmark = pytest.mark.component

MIB = 1 << 20
HEADERS = {"content-type": "application/json"}
START = b'{"model": "m", "prompt": "'


async def stalled(size: int, never: asyncio.Event) -> AsyncIterator[bytes]:
    """`size` bytes of a body whose rest does not come."""
    yield START + b"x" * (size - len(START))
    await never.wait()


async def test_a_body_past_the_sum_of_held_bytes_gets_503(tmp_path: Path) -> None:
    flags = ("--max-body", str(MIB), "--held-bytes", str(2 * MIB))
    never = asyncio.Event()
    async with running(tmp_path, "FULL_DUPLEX_STREAMED", flags=flags) as stack:

        async def holds(count: float) -> bool:
            return (await stack.epp.figures())["tandem_epp_held_bytes"] >= count

        async def upload() -> None:
            await stack.session.post(
                stack.url + COMPLETIONS, data=stalled(800_000, never), headers=HEADERS
            )

        uploads = []
        async with AsyncExitStack() as end:
            for count in (1, 2):
                uploads.append(asyncio.create_task(upload()))
                end.callback(uploads[-1].cancel)
                await until(lambda count=count: holds(count * 700_000))
            body = {"model": "m", "prompt": "y" * 800_000}
            status, answer, headers = await post(stack, body)
            assert status == 503
            assert headers["retry-after"] == "1"
            assert json.loads(answer)["error"]["message"].endswith("try again")
            assert await figure(stack, "memory_full") == 1
            # Room that is kept for small bodies.
            assert (await post(stack, {"model": "m", "prompt": "small"}))[0] == 200
        await asyncio.gather(*uploads, return_exceptions=True)

        async def is_freed() -> bool:
            return (await stack.epp.figures())["tandem_epp_held_bytes"] == 0

        await until(is_freed)
        assert (await post(stack, body))[0] == 200


@MODES
async def test_a_body_that_does_not_come_gets_408(tmp_path: Path, mode: BodyMode) -> None:
    never = asyncio.Event()
    async with running(tmp_path, mode, flags=("--body-timeout", "1")) as stack:
        async with stack.session.post(
            stack.url + COMPLETIONS, data=stalled(1000, never), headers=HEADERS
        ) as response:
            assert response.status == 408
            error = (await response.json())["error"]
            assert (error["code"], error["type"]) == (408, "RequestTimeoutError")
            assert wire.REQUEST_ID in response.headers
        assert await figure(stack, "body_timeout") == 1
        assert stack.received == 0
        # The EPP serves others meanwhile, and keeps nothing of the request.
        assert (await post(stack, {"model": "m", "prompt": "whole"}))[0] == 200
        await until(lambda: at_rest(stack))


async def figure(stack: Stack, reason: str) -> float:
    """Requests that the EPP itself answered for this reason."""
    figures = await stack.epp.figures()
    return sum(v for k, v in figures.items() if f'reason="{reason}"' in k)
