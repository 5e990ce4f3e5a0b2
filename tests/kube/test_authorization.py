"""Who may read pages, as a real API server decides it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tandem_kube.authorization import (
    ALLOWED_SECONDS,
    DENIED_SECONDS,
    TOKEN_REVIEWS,
    Authorizer,
    authorize,
)
from tandem_kube.client import Api, connect
from tandem_kube.resources import Object, Resource

from ..cluster.control_plane import ControlPlane
from ..epp.real import serving_app
from .apis import proxied

pytestmark = [pytest.mark.component, pytest.mark.control_plane]

RBAC = "rbac.authorization.k8s.io/v1"
CLUSTER_ROLES = Resource(RBAC, "clusterroles")
CLUSTER_ROLE_BINDINGS = Resource(RBAC, "clusterrolebindings")


@pytest.fixture
async def api(control_plane: ControlPlane) -> AsyncIterator[Api]:
    async with await connect(control_plane.kubeconfig) as connected:
        yield connected


def token(control_plane: ControlPlane, namespace: str, account: str) -> str:
    control_plane.kubectl("create", "serviceaccount", account, f"--namespace={namespace}")
    return control_plane.kubectl("create", "token", account, f"--namespace={namespace}").strip()


async def grant(api: Api, namespace: str, account: str) -> None:
    """Let the service account read `/metrics`."""
    name = f"{namespace}-metrics"
    rule = {"nonResourceURLs": ["/metrics"], "verbs": ["get"]}
    role: dict[str, Any] = {"apiVersion": RBAC, "kind": "ClusterRole", "metadata": {"name": name}}
    await api.create(CLUSTER_ROLES, role | {"rules": [rule]})
    binding = {
        **role,
        "kind": "ClusterRoleBinding",
        "roleRef": {"apiGroup": RBAC.partition("/")[0], "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }
    await api.create(CLUSTER_ROLE_BINDINGS, binding)


async def page(_request: web.Request) -> web.Response:
    return web.Response(text="page")


def app(api: Api) -> web.Application:
    made = web.Application(middlewares=[authorize(api)])
    made.add_routes([web.get("/metrics", page), web.get("/debug", page)])
    return made


async def get(url: str, path: str, authorization: str | None) -> int:
    headers = {"authorization": authorization} if authorization else {}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url + path) as answer:
        return answer.status


async def test_only_who_may_read_the_path_gets_it(
    control_plane: ControlPlane, namespace: str, api: Api
) -> None:
    reader, other = (token(control_plane, namespace, name) for name in ("reader", "other"))
    await grant(api, namespace, "reader")
    async with serving_app(app(api)) as url:
        # The API server's authorizer learns of a new binding by a watch.
        async with asyncio.timeout(20):
            while await Authorizer(api).status(reader, "/metrics") != 200:
                await asyncio.sleep(0.05)
        assert await get(url, "/metrics", f"Bearer {reader}") == 200
        assert await get(url, "/metrics", f"Bearer {other}") == 403
        assert await get(url, "/debug", f"Bearer {reader}") == 403
        assert await get(url, "/metrics", "Bearer wrong") == 401
        assert await get(url, "/metrics", f"Basic {reader}") == 401
        assert await get(url, "/metrics", None) == 401


async def test_without_an_answer_of_the_api_server_nothing_is_shown(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    async with proxied(control_plane.kubeconfig, tmp_path) as (proxy, kubeconfig):
        await proxy.refuse()
        async with await connect(kubeconfig) as api, serving_app(app(api)) as url:
            assert await get(url, "/metrics", "Bearer x") == 500


class FakeReviews:
    """Knows every token, and allows what the test says."""

    def __init__(self) -> None:
        self.allowed, self.asked = False, 0

    async def create(self, resource: Resource, body: Object) -> Object:
        if resource == TOKEN_REVIEWS:
            return {"status": {"authenticated": True, "user": {"username": body["spec"]["token"]}}}
        assert body["spec"]["nonResourceAttributes"]["verb"] == "get"
        self.asked += 1
        return {"status": {"allowed": self.allowed}}


async def test_answers_hold_for_a_while() -> None:
    now, reviews = 0.0, FakeReviews()
    authorizer = Authorizer(reviews, lambda: now)
    assert await authorizer.status("x", "/metrics") == 403
    reviews.allowed = True
    assert await authorizer.status("x", "/metrics") == 403
    assert await authorizer.status("x", "/debug/pods") == 200
    now = DENIED_SECONDS
    assert await authorizer.status("x", "/metrics") == 200
    reviews.allowed = False
    now += ALLOWED_SECONDS - 1
    assert await authorizer.status("x", "/metrics") == 200
    now += 1
    assert await authorizer.status("x", "/metrics") == 403
    assert reviews.asked == 4


async def test_only_so_many_answers_are_kept() -> None:
    reviews = FakeReviews()
    authorizer = Authorizer(reviews, lambda: 0.0)
    for n in range(300):
        await authorizer.status(str(n), "/metrics")
    await authorizer.status("299", "/metrics")
    assert reviews.asked == 300
    await authorizer.status("0", "/metrics")
    assert reviews.asked == 301
