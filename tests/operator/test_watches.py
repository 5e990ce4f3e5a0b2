"""What kopf's lists and watches tell a feed, against a scripted API server: a session at a time."""

import asyncio
import base64
import math
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from tandem_contract import labels
from tandem_kube.client import Api
from tandem_kube.reflector import FIRST_PAUSE, MAX_PAUSE
from tandem_kube.resources import PODS, SERVICES
from tandem_operator.runtime import feeds, kopf_session
from tandem_operator.runtime.cache import ClusterCache, WorkKey
from tandem_operator.runtime.kopf_session import FeedFailed, Session
from tandem_operator.runtime.watches import Feed, Watch, next_pause

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
        self.keys: set[WorkKey] = set()

    def enqueue(self, keys: set[WorkKey]) -> None:
        self.keys |= keys

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
        assert not feed.restored.is_set()
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


async def test_after_an_outage_a_collection_is_listed_by_itself(tmp_path: Path) -> None:
    """The cluster may be older than the watch, which then would stay silent. The session goes on:
    one collection whose calls fail costs the others no list."""
    script = Script([listing(5), listing(5)], [refusal(503), refusal(503), []])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, _, task):
        await until(lambda: script.listed == 2 and len(script.watched) == 3)
        assert feed.failures == 2
        assert not feed.restored.is_set()
        assert not task.done()


async def test_after_an_outage_all_sets_are_reconciled() -> None:
    """Their reconciliations failed, too, and wait for up to a minute to be tried again."""
    pool = {
        "apiVersion": labels.API_VERSION,
        "kind": "PrefillPool",
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "3"},
        "spec": {},
    }
    listener, cache = _Listener(), ClusterCache(nodes=False)
    everything = cache.upsert_pool(pool)
    feed = Feed(_OPTIONAL, "n", cache, listener)
    feed.listed([], 5)
    listener.keys.clear()
    feed.failed("503", is_outage=True)
    feed.listed([], 6)
    assert listener.keys == set(), "one broken connection is none"
    for _ in range(2):
        feed.failed("503", is_outage=True)
    feed.listed([], 7)
    assert listener.keys == everything != set()
    listener.keys.clear()
    for _ in range(2):
        feed.failed("403", is_outage=False)
    feed.listed([], 8)
    assert listener.keys == set(), "a refusal is an answer of the cluster as it is"


async def test_what_may_be_listed_and_not_watched_is_listed_again_and_again(tmp_path: Path) -> None:
    script = Script([listing(5), listing(6), listing(7, pod("a", 7))], [refusal(403)])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, _, _):
        await until(lambda: "listed ['a'] at 7" in feed.told)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed at once."""
    monkeypatch.setattr(kopf_session, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(kopf_session, "SILENT_LISTS", 0.0)


@pytest.mark.usefixtures("impatient")
async def test_a_restored_cluster_is_noticed_though_no_call_failed(tmp_path: Path) -> None:
    """A load balancer in front of several API servers may hide that they restart."""
    script = Script([listing(5), listing(4)], [[]])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, _, _):
        await until(feed.restored.is_set)
        assert feed.failures == 0


@pytest.mark.usefixtures("impatient")
async def test_bookmarks_tell_how_far_the_cluster_is(tmp_path: Path) -> None:
    """The restored state is newer than the last list, and older than the watch."""
    script = Script([listing(5), listing(7)], [[bookmark(9)], []])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, _, _):
        await until(feed.restored.is_set)


async def test_silent_collections_are_listed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, however many kinds there are of which the cluster has nothing to tell."""
    silent = {name: _Recorded(_Listener()) for name in "abc"}
    session = Session(None, silent)  # type: ignore[arg-type]
    for feed in silent.values():
        feed.watching()
        feed.watching()
    assert not any(session._try_doubt(feed) for feed in silent.values()), "not before a minute"
    monkeypatch.setattr(kopf_session, "SILENT_LISTS", 0.0)
    order = []
    for _ in range(2):
        for name, feed in silent.items():
            if session._try_doubt(feed):
                order.append(name)
                Feed.listed(feed, [], 5)
                feed.watching()
                feed.watching()
    assert order == ["a", "b", "c", "a", "b", "c"]
    silent["a"].bookmarked(6)
    assert not session._try_doubt(silent["a"])


def test_pauses_grow_up_to_a_limit() -> None:
    pauses = [0.0]
    while pauses[-1] < MAX_PAUSE:
        pauses.append(next_pause(pauses[-1]))
    assert pauses[1:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert next_pause(MAX_PAUSE) == MAX_PAUSE


async def test_watches_that_end_at_once_are_opened_ever_later() -> None:
    feed = _Recorded(_Listener())
    assert feed.pause_before_watch() == 0.0
    pauses = []
    for _ in range(20):
        feed.watching()
        pauses.append(feed.pause_before_watch())
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE, MAX_PAUSE)
    assert feed.pause_before_watch() == 0.0, "after a failure kopf pauses"
    feed.watching()
    feed._opened_at -= MAX_PAUSE
    assert feed.pause_before_watch() == 0.0, "it ran its time"


async def test_a_server_that_closes_every_watch_gets_few(tmp_path: Path) -> None:
    script = Script([listing(5)], [()])
    async with scripted(script, tmp_path) as api, _feeding(api) as (feed, _, _):
        await until(lambda: feed._pause >= 8 * FIRST_PAUSE)
        assert feed.opened <= 4


async def test_short_sessions_begin_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    everything = feeds.Feeds(None, ClusterCache(nodes=False), ["n"], _Listener())  # type: ignore[arg-type]

    async def discover() -> list[Watch]:
        return []

    async def ends_at_once(_missing: object) -> None:
        raise OSError("cut")

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 9:
            raise asyncio.CancelledError

    monkeypatch.setattr(everything, "_discover", discover)
    monkeypatch.setattr(everything, "_session", ends_at_once)
    monkeypatch.setattr("tandem_operator.runtime.feeds.random.uniform", lambda *_: 1.0)
    monkeypatch.setattr("tandem_operator.runtime.feeds.asyncio.sleep", note)
    with suppress(asyncio.CancelledError):
        await everything.run()
    assert pauses[:2] == [FIRST_PAUSE, 2 * FIRST_PAUSE]
    assert pauses[-1] == MAX_PAUSE
    # A session that ran for long begins anew with the shortest pause.
    pauses.clear()
    monkeypatch.setattr(feeds, "STEADY", -math.inf)
    with suppress(asyncio.CancelledError):
        await everything.run()
    assert set(pauses) == {FIRST_PAUSE}


async def test_kopf_that_does_not_end_ends_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no session would ever begin again."""
    monkeypatch.setattr(kopf_session, "END_SECONDS", 0.1)
    let_go = threading.Event()

    async def stuck(_session: Session) -> None:
        let_go.wait()

    monkeypatch.setattr(Session, "_end", stuck)
    try:
        async with scripted(Script([listing(5)], [[]]), tmp_path) as api:
            async with _feeding(api) as (feed, _, task):
                await until(lambda: feed.opened == 1)
                task.cancel()
                await asyncio.wait([task])
                with pytest.raises(FeedFailed, match="has not ended"):
                    task.result()
            let_go.set()
    finally:
        let_go.set()


async def test_the_name_in_the_certificate_may_differ_from_the_address(tmp_path: Path) -> None:
    """kubeconfig's `tls-server-name`."""
    authority, tls = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("kubernetes.example").configure_cert(tls)

    def cluster(port: int) -> dict[str, str]:
        return {
            "server": f"https://127.0.0.1:{port}",
            "tls-server-name": "kubernetes.example",
            "certificate-authority-data": base64.b64encode(authority.cert_pem.bytes()).decode(),
        }

    script = Script([listing(5)], [[]])
    async with (
        scripted(script, tmp_path, cluster=cluster, tls=tls) as api,
        _feeding(api) as (feed, _, _),
    ):
        await until(lambda: feed.opened == 1)


async def test_the_api_server_may_be_behind_a_proxy(tmp_path: Path) -> None:
    """kubeconfig's `proxy-url`: the scripted server is the proxy, which is asked for all hosts."""

    def cluster(port: int) -> dict[str, str]:
        return {"server": "http://kubernetes.invalid", "proxy-url": f"http://127.0.0.1:{port}"}

    script = Script([listing(5)], [[]])
    async with (
        scripted(script, tmp_path, cluster=cluster) as api,
        _feeding(api) as (feed, _, _),
    ):
        await until(lambda: feed.opened == 1)


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
        for lists in range(1, 51):
            async with _feeding(api):
                wanted = script.listed + lists % 3
                await until(lambda wanted=wanted: script.listed >= wanted)
    assert threading.active_count() <= threads + 8, "only idle workers of the pool stay"
