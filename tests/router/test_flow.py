"""Flow control in the router: requests wait in it while no backend has room."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ..epp.flow.stack import FULL, FullStack
from ..epp.real import Backend, serving
from ..sidecar.processes import Sidecar
from .processes import router

pytestmark = pytest.mark.component


class Stack(FullStack):
    """A full backend behind a router."""

    process: Sidecar


@asynccontextmanager
async def started(
    tmp_path: Path, sections: dict[str, Any], *flags: str, page: str = FULL
) -> AsyncIterator[Stack]:
    """A router with these sections beside `backends`, and one backend with this metrics page."""
    backend = Backend("d", ranked_page=page)
    async with AsyncExitStack() as parts:
        await parts.enter_async_context(serving(backend))
        config = tmp_path / "router.yaml"
        listed = {"name": "d", "url": f"http://127.0.0.1:{backend.port}"}
        config.write_text(json.dumps({"backends": [listed], **sections}))
        process = await parts.enter_async_context(router(config, "--no-warm-up", *flags))
        http = await parts.enter_async_context(aiohttp.ClientSession())

        async def read_page() -> str:
            async with http.get(process.admin_url("/metrics")) as answer:
                return await answer.text()

        stack = Stack(backend, http, process.url(), read_page)
        stack.process = process
        yield stack


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with started(tmp_path, {"flow_control": {"enabled": True}}) as stack:
        yield stack


async def test_a_request_waits_until_there_is_room(stack: Stack) -> None:
    first = await stack.start()
    second = asyncio.create_task(stack.send())
    await stack.holds(1)
    assert len(stack.backend.received) == 1
    stack.backend.release.set()
    assert [(await task)[0] for task in (first, second)] == [200, 200]
    await stack.holds(0)


async def test_a_request_that_waited_too_long_gets_429(stack: Stack) -> None:
    await stack.check_expiry()


async def test_a_client_that_leaves_is_forgotten(stack: Stack) -> None:
    await stack.check_leaving()


async def test_what_waits_while_the_router_drains_is_answered(stack: Stack) -> None:
    await stack.check_stop(lambda: stack.process.process.send_signal(signal.SIGTERM))
    assert await stack.process.process.wait() == 0


async def test_with_api_keys_their_settings_say_who_goes_first(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    directory.mkdir()
    for client in ("web", "ci"):
        (directory / client).write_text(f"key-of-{client}")
    flow = {"enabled": True, "clients": [{"name": "web", "priority": 5}]}
    flags = ("--api-key-dir", str(directory))
    async with started(tmp_path, {"flow_control": flow}, *flags) as stack:
        web, ci = {"x_api_key": "key-of-web"}, {"x_api_key": "key-of-ci"}
        tasks = [asyncio.create_task(stack.send("slow", **ci))]
        await stack.gets_first()
        tasks.append(asyncio.create_task(stack.send("of ci", **ci, x_llm_d_inference_ttl="9s")))
        await stack.holds(1)
        named = {"x_llm_d_inference_objective": "least", "x_llm_d_inference_fairness_id": "x"}
        tasks.append(asyncio.create_task(stack.send("of web", **web, **named)))
        await stack.holds(1, priority=5)
        stack.backend.release.set()
        assert [(await task)[0] for task in tasks] == [200] * 3
        prompts = [json.loads(request.body)["prompt"] for request in stack.backend.received]
        assert prompts == ["slow", "of web", "of ci"]


async def test_llmds_feature_gate_and_detector_hold_requests(tmp_path: Path) -> None:
    sections = {
        "featureGates": ["flowControl"],
        "plugins": [{"type": "concurrency-detector", "parameters": {"maxConcurrency": 1}}],
        "flowControl": {"saturationDetector": {"pluginRef": "concurrency-detector"}},
    }
    async with started(tmp_path, sections, page="") as stack:
        first = await stack.start()
        second = asyncio.create_task(stack.send())
        await stack.holds(1)
        stack.backend.release.set()
        assert [(await task)[0] for task in (first, second)] == [200, 200]
