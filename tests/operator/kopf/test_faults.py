import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from aiohttp import ClientSession, web
from kopf._cogs.aiokits.aiotoggles import ToggleSet
from kopf._cogs.clients import auth, watching
from kopf._cogs.structs.credentials import Vault
from kopf._cogs.structs.references import Resource

from ...kube.apis import until

PODS = Resource("", "v1", "pods", kind="Pod", namespaced=True)


async def test_a_cancellation_at_the_end_of_a_stream_is_swallowed() -> None:
    """Workaround: `Session._end` cancels until no task is left."""
    ended, went_on = asyncio.Event(), asyncio.Event()

    async def watcher() -> None:
        block = watching.streaming_block(
            resource=PODS, namespace=None, operator_paused=ToggleSet(any)
        )
        async with block:
            await ended.wait()
        went_on.set()

    task = asyncio.create_task(watcher())
    # Until the watcher waits for the end of its stream.
    for _ in range(5):
        await asyncio.sleep(0)
    ended.set()
    # It leaves the block, and waits in it for a task that it has cancelled.
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert went_on.is_set()
    assert not task.cancelled()


@asynccontextmanager
async def cluster(*events: Any) -> AsyncIterator[list[str]]:
    """An API server whose watches send `events` and end; yields the versions they began from.

    kopf's requests of this task go to it.
    """
    watched: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "5"}, "items": []})
        watched.append(request.query["resourceVersion"])
        return web.Response(text="".join(f"{json.dumps(event)}\n" for event in events))

    app = web.Application()
    app.router.add_get("/api/v1/pods", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with ClientSession() as session:
        info = kopf.AiohttpSession(server=server, aiohttp_session=session)
        vault = Vault({"login": info})
        token = auth.vault_var.set(vault)
        try:
            yield watched
        finally:
            auth.vault_var.reset(token)
            await vault.close()
            await runner.cleanup()


async def test_watches_that_end_at_once_are_opened_without_a_pause() -> None:
    """Workaround: `Feed.pause_before_watch`."""
    settings = kopf.OperatorSettings()
    settings.watching.reconnect_backoff = 3600.0
    async with cluster() as watched:
        stream = watching.infinite_watch(settings=settings, resource=PODS, namespace=None)
        reading = asyncio.create_task(first_event(stream))
        await until(lambda: len(watched) >= 20)
        reading.cancel()
        await asyncio.wait([reading])


async def first_event(stream: AsyncIterator[Any]) -> Any:
    """The first that is no note of kopf's own."""
    return await anext(event async for event in stream if isinstance(event, dict))


async def test_an_error_event_ends_the_watcher() -> None:
    """Workaround: `Feeds.run` starts the next session."""
    error = {"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "no leader"}}
    settings = kopf.OperatorSettings()
    async with cluster(error):
        stream = watching.infinite_watch(settings=settings, resource=PODS, namespace=None)
        with pytest.raises(watching.WatchingError):
            await first_event(stream)
