"""What kopf's lists and watches tell a feed, against a scripted API server: a session at a time."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_kube.client import Api
from tandem_kube.resources import PODS, SERVICES
from tandem_operator.runtime import feeds
from tandem_operator.runtime.cache import ClusterCache, WorkKey
from tandem_operator.runtime.kopf_session import FeedFailed, Session
from tandem_operator.runtime.watches import Feed, Watch

from ..kube import apis
from ..kube.apis import DEADLINE, Script, bookmark, event, listing, refusal, scripted, until

_OPTIONAL = Watch("Pod", PODS, "", ClusterCache.upsert_pod, optional=True)


def pod(name: str, version: int) -> dict[str, Any]:
    body = apis.pod(name, version)
    body["metadata"]["uid"] = name
    return body


class _Listener:
    def __init__(self) -> None:
        self.namespaces: list[str | None] = []

    def enqueue(self, keys: set[WorkKey]) -> None:
        pass

    def enqueue_namespace(self, namespace: str | None) -> None:
        self.namespaces.append(namespace)


class _Recorded(Feed):
    """A feed that remembers what it was told."""

    def __init__(self, listener: _Listener) -> None:
        super().__init__(_OPTIONAL, "n", ClusterCache(nodes=False), listener)
        self.told: list[str] = []
        self.opened = 0

    def listed(self, bodies: list[dict[str, Any]], version: int) -> None:
        self.told.append(f"listed {[body['metadata']['name'] for body in bodies]} at {version}")
        super().listed([], version)

    def applied(self, kind: str, body: dict[str, Any]) -> None:
        self.told.append(f"{kind} {body['metadata']['name']}")

    def watching(self) -> None:
        self.opened += 1
        super().watching()


@asynccontextmanager
async def _feeding(api: Api) -> AsyncIterator[tuple[_Recorded, _Listener, asyncio.Task[None]]]:
    listener = _Listener()
    feed = _Recorded(listener)
    task = asyncio.create_task(Session(api, {feed.path: feed}).run())
    try:
        yield feed, listener, task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


@pytest.mark.parametrize("broken", [(), refusal(503)], ids=["ended", "refused"])
async def test_one_broken_watch_of_an_optional_kind_enqueues_nothing(
    broken: tuple[()] | dict[str, object], tmp_path: Path
) -> None:
    """API servers send no bookmarks of a kind of which they saw no event, so such a watch breaks
    every 90 seconds."""
    script = Script([listing(5)], [broken, []])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, listener, _):
        await until(lambda: len(script.watched) == 2 and feed.opened > 0)
        assert feed.failures <= 1
        assert not feed.outdated.is_set()
        assert listener.namespaces == ["n"], "once, after the first list"


async def test_an_optional_kind_that_cannot_be_read_lets_the_others_go_on(tmp_path: Path) -> None:
    script = Script([refusal(403)], [[]])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, listener, _):
        await until(lambda: script.listed >= 3)
        assert feed.has_answer
        assert listener.namespaces == ["n"], "once, after the first error"


async def test_lists_come_whole_and_events_one_by_one(tmp_path: Path) -> None:
    pages = listing(0, pod("a", 1)), listing(5, pod("b", 2))
    pages[0]["metadata"]["continue"] = "more"
    events = [bookmark(6), event("ADDED", pod("c", 7)), event("DELETED", pod("a", 8))]
    script = Script(list(pages), [events])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, _, _):
        await until(lambda: len(feed.told) == 3)
        # kopf hands the events of different objects to different tasks.
        assert feed.told[0] == "listed ['a', 'b'] at 5"
        assert set(feed.told[1:]) == {"ADDED c", "DELETED a"}


async def test_after_an_expired_version_everything_is_listed_again(tmp_path: Path) -> None:
    expired = [event("ERROR", refusal(410))]
    script = Script([listing(5, pod("a", 1)), listing(9)], [expired, []])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, _, _):
        await until(lambda: script.watched == ["5", "9"])
        await until(lambda: feed.told == ["listed ['a'] at 5", "listed [] at 9"])


async def test_a_watch_that_goes_on_after_an_outage_asks_for_lists(tmp_path: Path) -> None:
    """The cluster may be older than the watch, which then would stay silent."""
    script = Script([listing(5)], [refusal(503), refusal(503), []])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, listener, _):
        await until(feed.outdated.is_set)
        assert listener.namespaces == ["n", "n"]


async def test_a_server_that_closes_every_watch_gets_few(tmp_path: Path) -> None:
    script = Script([listing(5)], [()])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, _, _):
        started = asyncio.get_running_loop().time()
        await until(lambda: feed.opened == 3)
        assert asyncio.get_running_loop().time() - started >= 2.0, "a second between two"


@pytest.mark.parametrize(
    "fatal",
    [[event("ERROR", refusal(500))], [{"cut": "off"}], refusal(404), refusal(400)],
    ids=["error event", "no event", "kind is gone", "refused"],
)
async def test_what_ends_kopf_ends_the_session_and_leaves_nothing(
    fatal: list[dict[str, Any]] | dict[str, Any], tmp_path: Path
) -> None:
    script = Script([listing(5)], [fatal])
    async with scripted(script, tmp_path) as api, _feeding(api) as (_, _, task):
        await asyncio.wait([task])
        assert task.exception() is not None


async def test_refused_credentials_are_asked_for_again(tmp_path: Path) -> None:
    refused = refusal(401)
    script = Script([refused, refused, listing(5)], [[]])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, _, task):
        await until(lambda: feed.opened == 1)
        assert not task.done()


async def test_what_the_cache_cannot_take_ends_the_operator(tmp_path: Path) -> None:
    """It starts again, and reads everything anew."""
    script = Script([listing(5)], [[event("ADDED", pod("a", 6))]])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, _, task):
        feed.applied = None  # type: ignore[assignment,method-assign]
        await asyncio.wait([task])
        with pytest.raises(FeedFailed, match="TypeError"):
            task.result()


async def test_the_finalizer_of_another_operator_stays(tmp_path: Path) -> None:
    """kopf's default is the same for all operators, and removing it would be a write."""
    marked = pod("a", 6)
    marked["metadata"]["finalizers"] = ["kopf.zalando.org/KopfFinalizerMarker"]
    events = [event("ADDED", marked), event("MODIFIED", marked), event("DELETED", marked)]
    script = Script([listing(5)], [events])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, _, _):
        await until(lambda: feed.told[1:] == ["ADDED a", "MODIFIED a", "DELETED a"])


def test_objects_of_a_kind_that_was_gone_come_back() -> None:
    listener, cache = _Listener(), ClusterCache(nodes=False)
    watch = Watch("Pod", PODS, labels.POOL, ClusterCache.upsert_pod)
    body = pod("a", 3)
    body |= {"apiVersion": "v1", "kind": "Pod", "spec": {}, "status": {}}
    body["metadata"] |= {"labels": {labels.POOL: "p", labels.ROLE: "prefill"}}

    async def run() -> None:
        feed = Feed(watch, "n", cache, listener)
        feed.listed([body], 5)
        feed.emptied()
        assert not len(cache.pods)
        feed.listed([body], 7)
        assert len(cache.pods) == 1

    asyncio.run(run())


async def test_a_served_kind_that_kopf_does_not_watch_ends_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """kopf looks by itself for what is served, and may not know of a kind just installed."""
    monkeypatch.setattr(feeds, "START", 0.1)
    listener, cache = _Listener(), ClusterCache(nodes=False)
    # The scripted server does not name it.
    unknown = Feed(Watch("Service", SERVICES, "", ClusterCache.upsert_child), "n", cache, listener)
    async with scripted(Script([listing(5)], [[]]), tmp_path) as api:
        everything = feeds.Feeds(api, cache, ["n"], listener)
        everything._feeds = {unknown.path: unknown}
        async with asyncio.timeout(DEADLINE):
            await everything._session([])
    assert "kopf does not watch it" in caplog.text


async def test_a_session_can_be_ended_at_any_moment(tmp_path: Path) -> None:
    """kopf's watchers may swallow a cancellation; its tasks end all the same."""
    expired = [event("ERROR", refusal(410))]
    script = Script([listing(5)], [expired])
    threads = threading.active_count()
    async with scripted(script, tmp_path) as api:
        for lists in range(1, 30):
            async with _feeding(api):
                wanted = script.listed + lists % 3
                await until(lambda wanted=wanted: script.listed >= wanted)
    assert threading.active_count() <= threads + 8, "only idle workers of the pool stay"
