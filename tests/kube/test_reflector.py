"""The reflector against a scripted API server, for rare failures, and against a real one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tandem_kube.client import Api, connect
from tandem_kube.errors import Forbidden, Unreachable
from tandem_kube.reflector import Key, Reflector
from tandem_kube.resources import PODS

from ..cluster.control_plane import ControlPlane
from .apis import Script, bookmark, event, listing, pod, proxied, refusal, scripted, until

Labels = dict[str, str]


def labels_of(body: dict[str, Any]) -> Labels | None:
    """The value kept for a pod; None for a pod labelled `skip`."""
    labels: Labels = body["metadata"].get("labels") or {}
    return None if "skip" in labels else labels


class Watched:
    """A running reflector and the keys for which it called `changed`."""

    def __init__(self, api: Api, namespace: str, **options: Any) -> None:
        self.changed_keys: list[str] = []
        self.reflector: Reflector[Labels] = Reflector(
            api,
            PODS,
            namespace,
            parse=labels_of,
            changed=lambda key: self.changed_keys.append(key.name),
            **options,
        )

    @property
    def values(self) -> dict[str, Labels]:
        return {key.name: value for key, value in self.reflector.items.items()}


@asynccontextmanager
async def watching(api: Api, namespace: str = "n", **options: Any) -> AsyncIterator[Watched]:
    watched = Watched(api, namespace, **options)
    task = asyncio.create_task(watched.reflector.run())
    try:
        yield watched
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_changed_is_called_once_and_only_when_the_value_differs(tmp_path: Path) -> None:
    events = [
        event("MODIFIED", pod("a", 6, x="1")),
        event("MODIFIED", pod("a", 7, x="2")),
        event("ADDED", pod("b", 8)),
        event("ADDED", pod("c", 9, skip="")),
        event("DELETED", pod("c", 10, skip="")),
        event("MODIFIED", pod("b", 11, skip="")),
        bookmark(12),
    ]
    script = Script([listing(5, pod("a", 3, x="1"))], [events])
    async with scripted(script, tmp_path) as api, watching(api) as watched:
        await until(lambda: watched.changed_keys == ["a", "a", "b", "b"])
        assert watched.values == {"a": {"x": "2"}}
        assert watched.reflector.items[Key("n", "a")] == {"x": "2"}
        assert watched.reflector.synced.is_set()
        assert watched.reflector.connected
        assert script.watched == ["5"]


async def test_a_list_of_several_pages_is_applied_completely_or_not_at_all(tmp_path: Path) -> None:
    halves = listing(5, pod("lost", 1)), listing(6, pod("a", 2), pod("s", 3, skip=""))
    for half in halves:
        half["metadata"]["continue"] = "more"
    script = Script([halves[0], refusal(410), halves[1], listing(6, pod("b", 4))], [[]])
    async with scripted(script, tmp_path) as api, watching(api) as watched:
        await until(lambda: watched.reflector.connected)
        assert watched.values == {"a": {}, "b": {}}
        assert sorted(watched.changed_keys) == ["a", "b"]
        assert (script.listed, script.watched) == (4, ["6"])


async def test_a_page_is_freed_before_the_next_is_read(tmp_path: Path) -> None:
    first = listing(5, pod("a", 1))
    first["metadata"]["continue"] = "more"
    script = Script([first, listing(5, pod("b", 3))], [[]])
    async with scripted(script, tmp_path) as api:
        read = []
        async for page in api.pages(PODS, "n"):
            read.append(([body["metadata"]["name"] for body in page.items], script.listed))
    assert read == [(["a"], 1), (["b"], 2)]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param((event("ADDED", pod("b", 6)), bookmark(9)), id="ended"),
        pytest.param((event("ADDED", pod("b", 9)), event("ERROR", refusal(500))), id="failed"),
    ],
)
async def test_a_watch_resumes_from_the_last_version(tmp_path: Path, first: Any) -> None:
    script = Script([listing(5)], [first, [event("ADDED", pod("c", 10))]])
    async with scripted(script, tmp_path) as api, watching(api) as watched:
        await until(lambda: watched.changed_keys == ["b", "c"])
        assert script.watched == ["5", "9"]
        assert script.listed == 1


async def test_a_collection_is_listed_again_after_an_outage(tmp_path: Path) -> None:
    # The cluster was restored: a server does not refuse a watch from a future version, but sends
    # nothing.
    before, after = listing(500, pod("a", 400), pod("b", 3)), listing(70, pod("b", 3), pod("c", 5))
    script = Script([before, after], [[event("ERROR", refusal(500))], refusal(503), []])
    async with scripted(script, tmp_path) as api, watching(api) as watched:
        await until(lambda: len(script.watched) == 3)
        assert script.watched == ["500", "500", "70"]
        assert watched.values.keys() == {"b", "c"}


@pytest.mark.parametrize(
    "expired",
    [
        pytest.param(refusal(410), id="the watch is refused"),
        pytest.param([event("ERROR", refusal(410))], id="in the watch"),
    ],
)
async def test_an_expired_version_causes_a_relist_that_reports_differences(
    tmp_path: Path, expired: Any
) -> None:
    before = listing(5, pod("gone", 1), pod("same", 2), pod("moved", 3))
    after = listing(50, pod("same", 2), pod("moved", 30, x="1"), pod("new", 40))
    script = Script([before, after], [expired, []])
    async with scripted(script, tmp_path) as api, watching(api) as watched:
        await until(lambda: len(script.watched) == 2)
        assert script.watched == ["5", "50"]
        assert watched.values == {"same": {}, "moved": {"x": "1"}, "new": {}}
        assert sorted(watched.changed_keys[:3]) == ["gone", "moved", "same"]
        assert sorted(watched.changed_keys[3:]) == ["gone", "moved", "new"]


async def test_a_forbidden_watch_is_logged_once_and_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script([*[refusal(403, "pods is forbidden")] * 3, listing(1, pod("a", 1))], [[]])
    async with scripted(script, tmp_path) as api, watching(api) as watched:
        await until(lambda: watched.reflector.last_error is not None)
        assert isinstance(watched.reflector.last_error, Forbidden)
        assert not watched.reflector.synced.is_set()
        await until(lambda: watched.reflector.connected)
        assert watched.values == {"a": {}}
        assert watched.reflector.failures == 3
    assert caplog.text.count("pods in n: watch failed") == 1
    assert "pods is forbidden" in caplog.text


async def test_a_server_that_ends_every_watch_is_retried_with_backoff(tmp_path: Path) -> None:
    script = Script([listing(1)], [()])
    async with scripted(script, tmp_path) as api, watching(api) as watched:
        await until(lambda: isinstance(watched.reflector.last_error, Unreachable))
        assert len(script.watched) == watched.reflector.failures == 2


def body(name: str, **labels: str) -> dict[str, Any]:
    spec = {"containers": [{"name": "c", "image": "x"}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


class Cluster:
    """Pods of one namespace of a real cluster, which the tests change directly."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._namespace = api, namespace

    async def create(self, name: str, **labels: str) -> None:
        pod = body(name, **labels)
        pod["metadata"]["namespace"] = self._namespace
        await self._api.create(PODS, pod)

    async def label(self, name: str, **labels: str | None) -> None:
        await self._api.patch(PODS, name, {"metadata": {"labels": labels}}, self._namespace)

    async def delete(self, name: str) -> None:
        await self._api.delete(PODS, name, self._namespace, grace=0)


@pytest.mark.control_plane
async def test_a_real_server_is_watched_by_label(
    control_plane: ControlPlane, namespace: str
) -> None:
    async with await connect(control_plane.kubeconfig) as api:
        cluster = Cluster(api, namespace)
        await cluster.create("a", app="x")
        await cluster.create("other", app="y")
        async with watching(api, namespace, labels="app=x") as watched:
            await until(lambda: watched.changed_keys == ["a"])
            await cluster.create("b", app="x")
            await cluster.label("a", app="x", more="1")
            await cluster.label("other", app="x")
            await cluster.label("b", app=None)
            await cluster.delete("a")
            await until(lambda: watched.changed_keys == ["a", "b", "a", "other", "b", "a"])
            assert watched.values == {"other": {"app": "x"}}


@pytest.mark.control_plane
async def test_broken_stalled_and_refused_connections_are_survived(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with await connect(control_plane.kubeconfig) as direct:
        cluster = Cluster(direct, namespace)
        await cluster.create("a")
        async with (
            proxied(control_plane.kubeconfig, tmp_path) as (proxy, kubeconfig),
            await connect(kubeconfig) as api,
            watching(api, namespace, quiet=0.5) as watched,
        ):
            await until(lambda: watched.reflector.connected)
            await proxy.drop()
            await cluster.create("b")
            await until(lambda: "b" in watched.values)

            proxy.stalled = True
            await cluster.create("c")
            await until(lambda: not watched.reflector.connected)
            proxy.stalled = False
            await until(lambda: "c" in watched.values)

            await proxy.refuse()
            await cluster.delete("a")
            await until(lambda: watched.reflector.last_error is not None)
            assert watched.values.keys() == {"a", "b", "c"}, "nothing is forgotten"
            await proxy.accept()
            await until(lambda: watched.values.keys() == {"b", "c"})
            await until(lambda: watched.reflector.last_error is None)
