"""Several worker processes behind one listening socket."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ..peers import FakeDecode, Turn
from ..processes import Sidecar, sidecar

pytestmark = pytest.mark.component
STREAM = b'{"prompt": "x", "stream": true}'
REST = b"data: [DONE]\n\n"
LARGE = b'{"prompt": "%s"}' % (b"x" * 2000)


class Workers:
    """Two workers, an engine that streams until `go` is set, and an HTTP client."""

    def __init__(self, it: Sidecar, decode: FakeDecode, http: aiohttp.ClientSession) -> None:
        self.it, self.decode, self.http = it, decode, http
        self.go = asyncio.Event()
        self.served_meanwhile = 0
        decode.generate = self._held

    async def _held(self, turn: Turn) -> None:
        turn.stream()
        turn.event("first")
        await self.go.wait()
        turn.event("[DONE]")
        turn.end()

    async def state(self) -> dict[str, Any]:
        async with self.http.get(self.it.asked("/state")) as answer:
            state: dict[str, Any] = await answer.json()
        return state

    async def pids(self) -> dict[int, int]:
        """Process id of each worker, and its number of requests in flight."""
        return {worker["pid"]: worker["in_flight"] for worker in (await self.state())["workers"]}

    async def metric(self, sample: str) -> float:
        async with self.http.get(self.it.asked("/metrics")) as answer:
            page = await answer.text()
        lines = (line.rpartition(" ") for line in page.splitlines())
        return sum(float(value) for name, _, value in lines if name == sample)

    async def readiness(self) -> int:
        async with self.http.get(self.it.asked("/readyz")) as answer:
            return answer.status

    async def running(self) -> aiohttp.ClientResponse:
        """A request whose stream has begun."""
        answer = await self.http.post(self.it.url(), data=STREAM)
        assert await answer.content.readuntil(b"\n\n") == b"data: first\n\n"
        return answer

    async def until_always(self, status: int, body: bytes) -> aiohttp.ClientResponse:
        """The last of 20 answers in a row with that status: all workers gave some of them."""
        last, row = None, 0
        async with asyncio.timeout(60):
            while last is None or row < 20:
                async with self.http.post(self.it.url(), data=body) as last:
                    row = row + 1 if last.status == status else 0
                    self.served_meanwhile += last.status == 200
        return last

    async def on_both(self) -> list[aiohttp.ClientResponse]:
        """Requests that run, some on each worker."""
        answers = [await self.running()]
        async with asyncio.timeout(60):
            while 0 in (await self.pids()).values():
                answers.append(await self.running())
        return answers


@asynccontextmanager
async def two_workers(*arguments: str) -> AsyncIterator[Workers]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        FakeDecode() as decode,
        sidecar("--workers", "2", "--engine", f"http://{decode.address}", *arguments) as it,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        made = Workers(it, decode, http)
        async with asyncio.timeout(60):
            while await made.readiness() != 200:
                pass
        yield made


async def done(answers: list[aiohttp.ClientResponse]) -> None:
    for answer in answers:
        assert await answer.content.read() == REST


async def test_a_killed_worker_is_replaced_and_requests_of_the_other_go_on() -> None:
    async with two_workers() as it:
        answers = await it.on_both()
        before = await it.pids()
        victim = next(iter(before))
        os.kill(victim, signal.SIGKILL)
        assert f"pid {victim}" in await it.it.says("exited with status -9")
        async with asyncio.timeout(60):
            while len(after := await it.pids()) < 2:
                assert len(after) == 1
        assert victim not in after
        it.go.set()
        ends = await asyncio.gather(
            *(answer.content.read() for answer in answers), return_exceptions=True
        )
        assert ends.count(REST) == len(answers) - before[victim]
        async with it.http.post(it.it.url(), data=STREAM) as fresh:
            assert fresh.status == 200


async def test_all_workers_reload_and_a_drain_waits_for_all(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max-body: 1MiB\n")
    async with two_workers("--config", str(file)) as it:
        answers = await it.on_both()
        assert len((await it.state())["in_flight"]) == len(answers)

        file.write_text("max-body: 1KiB\n")
        it.it.process.send_signal(signal.SIGHUP)
        await it.it.says("settings reloaded: --max-body 1048576 -> 1024")
        await it.until_always(413, LARGE)

        waiting = asyncio.create_task(it.http.get(it.it.asked("/drain?wait=true")).__aenter__())
        async with asyncio.timeout(60):
            while await it.readiness() != 503:
                pass
        async with it.http.post(it.it.asked("/drain")) as again:
            assert await again.json() == {"draining": True, "in_flight": len(answers)}
        late = await it.until_always(503, STREAM)
        assert late.headers["connection"] == "close"
        assert not waiting.done()
        it.go.set()
        await done(answers)
        assert await (await waiting).json() == {"draining": True, "in_flight": 0}
        served = await it.metric('disaggregated_requests_total{routing_path="unified"}')
        assert served == len(answers) + it.served_meanwhile

        it.it.process.terminate()
        assert await it.it.ended() == 0
        assert "Traceback" not in await it.it.rest()


async def test_sigterm_drains_all_workers_and_a_second_one_exits_at_once() -> None:
    async with two_workers() as it:
        answers = await it.on_both()
        it.it.process.terminate()
        await it.until_always(503, STREAM)
        assert [answer.content.at_eof() for answer in answers] == [False] * len(answers)
        it.it.process.terminate()
        assert await it.it.ended() == 0
        for answer in answers:
            answer.close()


async def test_workers_drain_and_exit_after_their_supervisor_was_killed() -> None:
    async with two_workers() as it:
        answer = await it.running()
        it.it.process.kill()
        it.go.set()
        await done([answer])
        await it.it.rest()  # stderr is closed when the last worker has exited
