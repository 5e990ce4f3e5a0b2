"""Cluster against a scripted API server: conflicts, replaced objects and concurrent watches."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tandem_contract import labels
from tandem_kube.client import Api, connect
from tandem_kube.errors import Conflict
from tandem_operator.observed import PodName, PoolKey, SetKey
from tandem_operator.planning.actions import Adopt, Delete, Label, SetPlan
from tandem_operator.runtime.cache import ClusterCache
from tandem_operator.runtime.cluster import Cluster

SET = SetKey("n", "p")
POOL = PoolKey("n", "PrefillPool", "p")
NAME = PodName("p-r-0")


def pool(uid: str = "pool", **metadata: Any) -> dict[str, Any]:
    full_metadata = {"name": "p", "namespace": "n", "uid": uid, "resourceVersion": "1", **metadata}
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "PrefillPool",
        "metadata": full_metadata,
        "spec": {},
    }


def pod(uid: str, version: int = 1, name: str = NAME) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "n",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {labels.POOL: "p", labels.ROLE: "prefill"},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}, "status": {}}


class Server:
    """Serves pods and pools; answers every write to a pod with 409, or with the pod."""

    def __init__(self) -> None:
        self.pods = [pod("a")]
        self.pools = [pool()]
        self.conflicts = True
        self.writes = 0
        self.on_list = lambda: None

    async def answer(self, request: web.Request) -> web.Response:
        kind, _, name = request.path.partition("/namespaces/n/")[2].partition("/")
        objects = self.pods if kind == "pods" else self.pools
        if request.method != "GET":
            self.writes += 1
            if self.conflicts:
                status = {"kind": "Status", "reason": "Conflict", "message": "it was modified"}
                return web.json_response(status, status=409)
        if name:
            return web.json_response(
                next(body for body in objects if body["metadata"]["name"] == name)
            )
        listed = {"metadata": {"resourceVersion": "9"}, "items": list(objects)}
        self.on_list()
        return web.json_response(listed)


@asynccontextmanager
async def serving(server: Server, folder: Path) -> AsyncIterator[Api]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    kubeconfig = {
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(json.dumps(kubeconfig))
    try:
        async with await connect(folder / "kubeconfig") as api:
            yield api
    finally:
        await runner.cleanup()


@pytest.fixture
def cache() -> ClusterCache:
    cluster_cache = ClusterCache(nodes=False)
    cluster_cache.upsert_pool(pool())
    cluster_cache.upsert_pod(pod("a"))
    return cluster_cache


CHANGES = [
    SetPlan(SET, label_pods=(Label(POOL, NAME, "a", {labels.DRAINING: "true"}),)),
    SetPlan(SET, delete_pods=(Delete(POOL, NAME, "a", "surplus"),)),
]


@pytest.mark.parametrize("plan", CHANGES)
async def test_a_pod_changed_concurrently_stays_in_the_cache(
    plan: SetPlan, cache: ClusterCache, tmp_path: Path
) -> None:
    async with serving(Server(), tmp_path) as api:
        with pytest.raises(Conflict):
            await Cluster(api, cache).apply(plan)
    assert [state.uid for state in cache.observe(SET).pods] == ["a"]
    assert cache.failures == {}


@pytest.mark.parametrize("plan", CHANGES)
async def test_a_pod_replaced_by_one_of_its_name_leaves_the_cache(
    plan: SetPlan, cache: ClusterCache, tmp_path: Path
) -> None:
    server = Server()
    server.pods = [pod("b")]
    async with serving(server, tmp_path) as api:
        assert await Cluster(api, cache).apply(plan)
    assert cache.observe(SET).pods == ()


async def test_a_pod_added_by_a_watch_during_the_live_list_stays(
    cache: ClusterCache, tmp_path: Path
) -> None:
    server = Server()
    server.pods = []
    server.on_list = lambda: cache.upsert_pod(pod("b", name="p-r-1"))
    async with serving(server, tmp_path) as api:
        observed = await Cluster(api, cache).observe_live(SET)
    assert [state.uid for state in observed.pods] == ["b"]


@pytest.mark.parametrize(
    ("pools", "writes"),
    [
        ([pool()], 1),
        ([], 0),
        ([pool("another")], 0),
        ([pool(deletionTimestamp="2026-01-01T00:00:00Z")], 0),
    ],
)
async def test_orphans_of_a_deleted_pool_are_not_adopted(
    pools: list[dict[str, Any]], writes: int, cache: ClusterCache, tmp_path: Path
) -> None:
    server = Server()
    server.pools, server.conflicts = pools, False
    adopt = Adopt(POOL, "Pod", NAME, "a", {"uid": "pool"})
    async with serving(server, tmp_path) as api:
        assert await Cluster(api, cache).apply(SetPlan(SET, adopt=(adopt,)))
    assert server.writes == writes


class NoSuchKind(Server):
    """A server whose CRDs were deleted."""

    async def answer(self, request: web.Request) -> web.Response:
        status = {"kind": "Status", "reason": "NotFound", "message": "no such kind"}
        return web.json_response(status, status=404)


async def test_without_the_crd_there_is_no_decode_pool(tmp_path: Path) -> None:
    async with serving(NoSuchKind(), tmp_path) as api:
        assert await Cluster(api, ClusterCache(nodes=False)).read_decode_pools("n") == set()
