"""Flow control in the router: requests wait in it while no backend has room."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import headers as wire

from ..epp.envoy.test_flow_with_envoy import FULL
from ..epp.real import Backend, serving, until
from ..sidecar.processes import Sidecar
from .processes import router

pytestmark = pytest.mark.component


class Stack:
    """A full backend behind a router."""

    def __init__(self, process: Sidecar, backend: Backend, http: aiohttp.ClientSession) -> None:
        self.process, self.backend, self._http = process, backend, http

    async def send(self, prompt: str = "hello", **headers: str) -> tuple[int, dict[str, str]]:
        body = {"model": "m", "prompt": prompt}
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        url = self.process.url()
        async with self._http.post(url, json=body, headers=sent) as answer:
            await answer.read()
            return answer.status, {key.lower(): value for key, value in answer.headers.items()}

    async def start(self) -> asyncio.Task[tuple[int, dict[str, str]]]:
        """Send a request that the backend answers when it is released."""
        task = asyncio.create_task(self.send("slow"))

        async def is_there() -> bool:
            return bool(self.backend.received)

        await until(is_there)
        return task

    async def holds(self, requests: int) -> None:
        """Wait until the router holds so many."""

        async def held() -> bool:
            async with self._http.get(self.process.admin_url("/metrics")) as answer:
                page = await answer.text()
            line = 'tandem_epp_flow_held{priority="0"} '
            return any(each == f"{line}{float(requests)}" for each in page.splitlines())

        await until(held)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    backend = Backend("d", ranked_page=FULL)
    async with AsyncExitStack() as parts:
        await parts.enter_async_context(serving(backend))
        config = tmp_path / "router.yaml"
        listed = {"name": "d", "url": f"http://127.0.0.1:{backend.port}"}
        config.write_text(json.dumps({"backends": [listed], "flow_control": {"enabled": True}}))
        process = await parts.enter_async_context(router(config, "--no-warm-up"))
        http = await parts.enter_async_context(aiohttp.ClientSession())
        yield Stack(process, backend, http)


async def test_a_request_waits_until_there_is_room(stack: Stack) -> None:
    first = await stack.start()
    second = asyncio.create_task(stack.send())
    await stack.holds(1)
    assert len(stack.backend.received) == 1
    stack.backend.release.set()
    assert [(await task)[0] for task in (first, second)] == [200, 200]
    await stack.holds(0)


async def test_who_waited_too_long_gets_429(stack: Stack) -> None:
    first = await stack.start()
    status, headers = await stack.send(x_llm_d_inference_ttl="200ms")
    assert (status, headers[wire.REQUEST_DROPPED_REASON]) == (429, "rejected-ttl-expired")
    assert int(headers[wire.RETRY_AFTER]) >= 1
    stack.backend.release.set()
    await first


async def test_a_client_that_leaves_is_forgotten(stack: Stack) -> None:
    first = await stack.start()
    leaving = asyncio.create_task(stack.send())
    await stack.holds(1)
    leaving.cancel()
    await stack.holds(0)
    stack.backend.release.set()
    await first
    assert len(stack.backend.received) == 1


async def test_who_waits_while_the_router_drains_gets_an_answer(stack: Stack) -> None:
    first = await stack.start()
    waiting = [asyncio.create_task(stack.send()) for _ in range(3)]
    await stack.holds(3)
    stack.process.process.send_signal(signal.SIGTERM)
    for task in waiting:
        status, headers = await task
        assert (status, headers[wire.REQUEST_DROPPED_REASON]) == (503, "rejected-shutting-down")
    stack.backend.release.set()
    assert (await first)[0] == 200
    assert await stack.process.process.wait() == 0
