"""Several workers of one port, as their admin port tells of them, with streams that stay open."""

import asyncio
from typing import Any, Final

import aiohttp

from .peers import Turn
from .processes import Sidecar

STREAM: Final = b'{"model": "m", "prompt": "x", "stream": true}'


class StreamingWorkers:
    """A server with workers, and engines that stream until `go` is set."""

    server: Sidecar

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http, self.go = http, asyncio.Event()

    async def stream_until_go(self, turn: Turn) -> None:
        """The script of an engine: the first event, and the rest once `go` is set."""
        turn.stream()
        turn.event("first")
        await self.go.wait()
        turn.event("[DONE]")
        turn.end()

    async def start_stream(self) -> aiohttp.ClientResponse:
        """A request whose stream has begun."""
        answer = await self.http.post(self.server.url(), data=STREAM)
        assert answer.status == 200, await answer.text()
        assert await answer.content.readuntil(b"\n\n") == b"data: first\n\n"
        return answer

    async def state(self) -> dict[str, Any]:
        async with self.http.get(self.server.admin_url("/state")) as answer:
            state: dict[str, Any] = await answer.json()
        return state

    async def pids(self) -> dict[int, int]:
        """Process id of each worker, and its number of requests in flight."""
        return {worker["pid"]: worker["in_flight"] for worker in (await self.state())["workers"]}

    async def metric(self, sample: str) -> float:
        async with self.http.get(self.server.admin_url("/metrics")) as answer:
            page = await answer.text()
        lines = (line.rpartition(" ") for line in page.splitlines())
        return sum(float(value) for name, _, value in lines if name == sample)
