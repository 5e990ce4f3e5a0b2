"""Requests to a program with flow control, whose only backend is full until it is released."""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from tandem_contract import headers as wire
from tandem_contract import metrics as names

from ..real import Backend, until

FULL = (
    f"{names.PROCESS_START_TIME} 1.0\n{names.ENGINE_RUNNING} 1.0\n{names.ENGINE_KV_USAGE} 1.0\n"
    f'{names.ENGINE_CACHE_CONFIG}{{block_size="16",num_gpu_blocks="1000"}} 1.0\n'
)
"""The page of an engine without free KV."""
Answer = tuple[int, dict[str, str]]
"""Status and headers."""


class FullStack:
    """Sends requests to `url`; `read_page` returns the program's metrics page."""

    def __init__(
        self,
        backend: Backend,
        http: aiohttp.ClientSession,
        url: str,
        read_page: Callable[[], Awaitable[str]],
    ) -> None:
        self.backend = backend
        self._http, self._url, self._read_page = http, url, read_page

    async def send(self, prompt: str = "hello", **headers: str) -> Answer:
        body = {"model": "m", "prompt": prompt}
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._http.post(self._url, json=body, headers=sent) as answer:
            await answer.read()
            return answer.status, {key.lower(): value for key, value in answer.headers.items()}

    async def start(self) -> asyncio.Task[Answer]:
        """Send a request that the backend answers when it is released."""
        task = asyncio.create_task(self.send("slow"))
        await self.gets_first()
        return task

    async def gets_first(self) -> None:
        """Wait until the backend has a request."""

        async def is_there() -> bool:
            return bool(self.backend.received)

        await until(is_there)

    async def holds(self, requests: int, priority: int = 0) -> None:
        """Wait until so many are held."""
        line = f'tandem_epp_flow_held{{priority="{priority}"}} {float(requests)}'

        async def held() -> bool:
            lines = (await self._read_page()).splitlines()
            is_counted = any(each.startswith("tandem_epp_flow_held{") for each in lines)
            return line in lines or not (requests or is_counted)

        await until(held)

    async def check_expiry(self) -> None:
        """A request that waits too long gets 429."""
        first = await self.start()
        status, headers = await self.send(x_llm_d_inference_ttl="500ms")
        assert (status, headers[wire.REQUEST_DROPPED_REASON]) == (429, "rejected-ttl-expired")
        assert int(headers[wire.RETRY_AFTER]) >= 1
        self.backend.release.set()
        await first

    async def check_leaving(self) -> None:
        """A client that leaves is forgotten."""
        first = await self.start()
        leaving = asyncio.create_task(self.send())
        await self.holds(1)
        leaving.cancel()
        await self.holds(0)
        self.backend.release.set()
        await first
        assert len(self.backend.received) == 1

    async def check_stop(self, stop: Callable[[], None]) -> None:
        """Who waits while the program ends gets an answer, and so does who is served."""
        first = await self.start()
        waiting = [asyncio.create_task(self.send()) for _ in range(3)]
        await self.holds(3)
        stop()
        for task in waiting:
            status, headers = await task
            dropped = headers[wire.REQUEST_DROPPED_REASON]
            assert (status, dropped) == (503, "rejected-shutting-down")
        self.backend.release.set()
        assert (await first)[0] == 200
