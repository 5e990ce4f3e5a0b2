"""Bounds of request bodies behind real Envoy: what all of them hold together, and their time."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import headers as wire
from tandem_operator.routing.envoy.http_filters import BodyMode

from ..real import until
from .test_with_envoy import COMPLETIONS, MODES, Stack, at_rest, post, running

pytestmark = pytest.mark.component

MIB = 1 << 20
HEADERS = {"content-type": "application/json"}
START = b'{"model": "m", "prompt": "'
PIECE = b"x" * 50_000


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
            assert headers[wire.REQUEST_DROPPED_REASON] == "rejected-saturated"
            assert json.loads(answer)["error"]["message"].endswith("try again")
            assert await figure(stack, "memory_full") == 1
            # Room that is kept for small bodies.
            assert (await post(stack, {"model": "m", "prompt": "small"}))[0] == 200
        await asyncio.gather(*uploads, return_exceptions=True)

        async def is_freed() -> bool:
            return (await stack.epp.figures())["tandem_epp_held_bytes"] == 0

        await until(is_freed)
        assert (await post(stack, body))[0] == 200


@pytest.mark.timeout(600)
async def test_two_hundred_stalled_uploads_of_15_mb_take_no_more_than_the_limit(
    tmp_path: Path,
) -> None:
    limit, size, count = 64 * MIB, 15_000_000, 200
    flags = ("--held-bytes", str(limit), "--max-body", str(16 * MIB), "--body-timeout", "600")
    async with (
        running(tmp_path, "FULL_DUPLEX_STREAMED", flags=flags) as stack,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        uploads = [StalledUpload(session, stack.url + COMPLETIONS, size) for _ in range(count)]
        before = peak_bytes(stack)

        async def is_settled() -> bool:
            """Whether all of the uploads that go on has come, and all others are refused."""
            waiting = [upload for upload in uploads if not upload.has_ended]
            figures = await stack.epp.figures()
            refused = figures['tandem_epp_decisions_total{path="refused",reason="memory_full"}']
            held = figures["tandem_epp_held_bytes"]
            return refused == count - len(waiting) and held >= size * len(waiting)

        async with AsyncExitStack() as end:
            for upload in uploads:
                end.callback(asyncio.create_task(upload.run()).cancel)
            async with asyncio.timeout(240):
                await asyncio.gather(*(upload.sent_or_ended.wait() for upload in uploads))
            await until(is_settled, within=120)
            assert {upload.status for upload in uploads} <= {503, None}
            assert (await stack.epp.figures())["tandem_epp_held_bytes"] <= limit
            # 3 GB are sent or wait to be. Buffers grow in steps, and freed memory has gaps.
            assert peak_bytes(stack) - before <= 2.5 * limit
            assert (await post(stack, {"model": "m", "prompt": "small"}))[0] == 200


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


class StalledUpload:
    """A request whose body does not end."""

    def __init__(self, session: aiohttp.ClientSession, url: str, size: int) -> None:
        self._session, self._url, self._size = session, url, size
        self.sent_or_ended = asyncio.Event()
        self.has_ended = False
        self.status: int | None = None
        """That of the answer. None if there is none yet, and if it was lost: Envoy closes the
        connection behind an answer to a request whose body is still coming."""

    async def run(self) -> None:
        """Upload until an answer comes or this task is cancelled."""
        try:
            async with self._session.post(
                self._url, data=self._pieces(), headers=HEADERS
            ) as answer:
                self.status = answer.status
        except aiohttp.ClientConnectionError:
            pass
        finally:
            self.has_ended = True
            self.sent_or_ended.set()

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield START
        for _ in range(len(START), self._size, len(PIECE)):
            yield PIECE
        self.sent_or_ended.set()
        await asyncio.Event().wait()


def peak_bytes(stack: Stack) -> int:
    """The largest resident memory that the EPP has had."""
    lines = Path(f"/proc/{stack.epp.process.pid}/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) * 1024


async def figure(stack: Stack, reason: str) -> float:
    """Requests that the EPP itself answered for this reason."""
    figures = await stack.epp.figures()
    return sum(v for k, v in figures.items() if f'reason="{reason}"' in k)
