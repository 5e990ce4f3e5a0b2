"""What a watch's errors enqueue, against a scripted API server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tandem_kube.client import Api
from tandem_kube.resources import PODS
from tandem_operator.runtime.cache import ClusterCache, WorkKey
from tandem_operator.runtime.watches import Feed, Watch

from ..kube.apis import Script, listing, refusal, scripted, until

_OPTIONAL = Watch("Pod", PODS, "", ClusterCache.upsert_pod, optional=True)


class _Listener:
    def __init__(self) -> None:
        self.namespaces: list[str | None] = []

    def enqueue(self, keys: set[WorkKey]) -> None:
        pass

    def enqueue_namespace(self, namespace: str | None) -> None:
        self.namespaces.append(namespace)


@asynccontextmanager
async def _feeding(api: Api) -> AsyncIterator[tuple[Feed, _Listener]]:
    listener = _Listener()
    feed = Feed(api, _OPTIONAL, "n", ClusterCache(nodes=False), listener)
    task = asyncio.create_task(feed.run())
    try:
        yield feed, listener
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("broken", [(), refusal(410)], ids=["ended", "expired"])
async def test_one_broken_watch_of_an_optional_kind_enqueues_nothing(
    broken: tuple[()] | dict[str, object], tmp_path: Path
) -> None:
    """API servers send no bookmarks of a kind of which they saw no event, so such a watch breaks
    every 90 seconds."""
    script = Script([listing(5)], [broken, []])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, listener):
        await until(lambda: len(script.watched) == 2 and feed.connected)
        assert feed.failures == 1
        assert listener.namespaces == ["n"], "once, after the first list"


async def test_an_optional_kind_that_cannot_be_read_lets_the_others_go_on(tmp_path: Path) -> None:
    script = Script([refusal(403)], [[]])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, listener):
        await until(lambda: script.listed >= 3)
        assert feed.has_answer
        assert listener.namespaces == ["n"], "once, after the first error"
