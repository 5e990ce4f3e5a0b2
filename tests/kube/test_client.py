"""The client against a real API server, and against broken responses."""

import contextlib
import json
import os
import socket
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import AddrInfoType, web

from tandem_kube import transport
from tandem_kube.client import Api, connect
from tandem_kube.errors import (
    AlreadyExists,
    ApiError,
    Conflict,
    Expired,
    Fenced,
    Forbidden,
    Invalid,
    NotConfigured,
    NotFound,
    TooManyRequests,
    Unauthorized,
    Unreachable,
    error_of,
)
from tandem_kube.resources import CONFIG_MAPS, NODES, PODS, Object, Resource, resource_of

from ..cluster.control_plane import ControlPlane

UNUSED_PORT = 1


def config_map(namespace: str, name: str, **data: str) -> Object:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


@pytest.fixture
async def api(control_plane: ControlPlane) -> AsyncIterator[Api]:
    async with await connect(control_plane.kubeconfig) as client:
        yield client


@pytest.mark.control_plane
async def test_an_object_is_created_read_changed_and_deleted(api: Api, namespace: str) -> None:
    created = await api.create(CONFIG_MAPS, config_map(namespace, "a", x="1"))
    with pytest.raises(AlreadyExists):
        await api.create(CONFIG_MAPS, config_map(namespace, "a"))
    assert (await api.get(CONFIG_MAPS, "a", namespace))["data"] == {"x": "1"}

    patched = await api.patch(CONFIG_MAPS, "a", {"data": {"x": None, "y": "2"}}, namespace)
    assert patched["data"] == {"y": "2"}
    with pytest.raises(Conflict):
        await api.patch(CONFIG_MAPS, "a", {"metadata": {"uid": str(uuid.uuid4())}}, namespace)
    with pytest.raises(Conflict):
        await api.replace(CONFIG_MAPS, created | {"data": {}})
    assert "data" not in await api.replace(CONFIG_MAPS, patched | {"data": {}})

    with pytest.raises(Conflict):
        await api.delete(CONFIG_MAPS, "a", namespace, uid=str(uuid.uuid4()))
    await api.delete(CONFIG_MAPS, "a", namespace, uid=created["metadata"]["uid"])
    with pytest.raises(NotFound):
        await api.get(CONFIG_MAPS, "a", namespace)


@pytest.mark.control_plane
async def test_apply_owns_its_fields_and_takes_them_by_force(api: Api, namespace: str) -> None:
    await api.apply(CONFIG_MAPS, config_map(namespace, "a", x="1"), manager="one")
    with pytest.raises(Conflict):
        await api.apply(CONFIG_MAPS, config_map(namespace, "a", x="2"), manager="two", force=False)
    taken = await api.apply(CONFIG_MAPS, config_map(namespace, "a", x="2"), manager="two")
    assert taken["data"] == {"x": "2"}


@pytest.mark.control_plane
async def test_an_apply_for_a_deleted_object_creates_none(api: Api, namespace: str) -> None:
    created = await api.apply(CONFIG_MAPS, config_map(namespace, "a", x="1"), manager="one")
    body = config_map(namespace, "a", x="2")
    body["metadata"]["uid"] = str(uuid.uuid4())
    with pytest.raises(Conflict):
        await api.apply(CONFIG_MAPS, body, manager="one")
    body["metadata"]["uid"] = created["metadata"]["uid"]
    await api.apply(CONFIG_MAPS, body, manager="one")
    await api.delete(CONFIG_MAPS, "a", namespace)
    with pytest.raises(Conflict):
        await api.apply(CONFIG_MAPS, body, manager="one")


@pytest.mark.control_plane
async def test_a_list_is_complete_for_any_page_size(api: Api, namespace: str) -> None:
    for name in "abcde":
        body = config_map(namespace, name)
        body["metadata"]["labels"] = {"half": str(name in "abc")}
        await api.create(CONFIG_MAPS, body)
    listed = await api.list(CONFIG_MAPS, namespace, labels="half", page=2)
    assert [item["metadata"]["name"] for item in listed.items] == list("abcde")
    assert len((await api.list(CONFIG_MAPS, namespace, labels="half=True")).items) == 3
    assert len((await api.list(CONFIG_MAPS, namespace, fields="metadata.name=b")).items) == 1


@pytest.mark.control_plane
async def test_a_watch_delivers_changes_after_a_list(api: Api, namespace: str) -> None:
    listed = await api.list(CONFIG_MAPS, namespace, labels="w")
    async with api.watch(
        CONFIG_MAPS, namespace, resource_version=listed.resource_version, labels="w"
    ) as events:
        body = config_map(namespace, "a", text="ä" * 100_000)
        body["metadata"]["labels"] = {"w": ""}
        await api.create(CONFIG_MAPS, body)
        await api.delete(CONFIG_MAPS, "a", namespace)
        assert (await anext(events))["type"] == "ADDED"
        deleted = await anext(events)
    assert deleted["type"] == "DELETED"
    assert deleted["object"]["data"] == body["data"]


@pytest.mark.control_plane
async def test_the_kernel_probes_the_server_of_a_silent_watch(api: Api, namespace: str) -> None:
    listed = await api.list(CONFIG_MAPS, namespace)
    async with api.watch(CONFIG_MAPS, namespace, resource_version=listed.resource_version):
        port = int(api.configuration.host.rsplit(":", 1)[1])
        # Probed after 10 seconds, then every 5 seconds; ended after 20 seconds without an answer.
        assert set(_keepalives(port)) == {(1, 10, 5, 3, 20_000)}


def _keepalives(port: int) -> list[tuple[int, ...]]:
    """Of each of this process's connections to a port of 127.0.0.1, what the kernel's probes do."""
    values = []
    tcp = (
        *(socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT),
        socket.TCP_USER_TIMEOUT,
    )
    for descriptor in os.listdir("/dev/fd"):
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(int(descriptor))) as connection,
        ):
            if connection.getpeername() == ("127.0.0.1", port):
                is_on = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                options = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in tcp)
                values.append((is_on, *options))
    return values


async def test_a_watch_from_long_ago_has_expired(tmp_path: Path) -> None:
    expired = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
    async with (
        answering(web.Response(text=json.dumps(expired) + "\n"), tmp_path) as api,
        api.watch(PODS, "n", resource_version="1") as events,
    ):
        with pytest.raises(Expired, match="too old"):
            await anext(events)


@pytest.mark.control_plane
async def test_errors_have_the_servers_message(
    api: Api, control_plane: ControlPlane, namespace: str
) -> None:
    with pytest.raises(Invalid, match="Invalid value"):
        await api.create(CONFIG_MAPS, config_map(namespace, "Not_A_Name"))
    with pytest.raises(NotFound):
        await api.list(Resource("example.com/v1", "nothings"))
    stranger = control_plane.kubeconfig_for("stranger")
    async with await connect(stranger) as stranger_api:
        with pytest.raises(Forbidden, match='User "stranger" cannot list resource "nodes"'):
            await stranger_api.list(NODES)


@pytest.mark.control_plane
async def test_the_observer_is_called_for_every_call(
    control_plane: ControlPlane, namespace: str
) -> None:
    calls: list[tuple[str, int]] = []
    async with await connect(
        control_plane.kubeconfig, observer=lambda verb, code, _: calls.append((verb, code))
    ) as api:
        await api.list(CONFIG_MAPS, namespace)
        with contextlib.suppress(NotFound):
            await api.delete(CONFIG_MAPS, "none", namespace)
        await api.create(CONFIG_MAPS, config_map(namespace, "a"), dry_run=True)
        with pytest.raises(NotFound):
            await api.get(CONFIG_MAPS, "a", namespace)
    assert calls == [("list", 200), ("delete", 404), ("create", 201), ("get", 404)]


async def test_a_missing_configuration_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(NotConfigured, match="--kubeconfig FILE or set KUBECONFIG"):
        await connect()
    with pytest.raises(NotConfigured, match="no such kubeconfig file"):
        await connect(tmp_path / "none")
    for text in ("a: [", "", "kind: Config\ncurrent-context: x\n"):
        (tmp_path / "broken").write_text(text)
        with pytest.raises(NotConfigured, match="cannot load the cluster's configuration"):
            await connect(tmp_path / "broken")


@contextlib.asynccontextmanager
async def answering(answer: web.Response, folder: Path) -> AsyncIterator[Api]:
    async def handle(_request: web.Request) -> web.Response:
        return answer

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with at(f"http://127.0.0.1:{runner.addresses[0][1]}", folder) as api:
        yield api
    await runner.cleanup()


@contextlib.asynccontextmanager
async def at(url: str, folder: Path) -> AsyncIterator[Api]:
    file = folder / "kubeconfig"
    file.write_text(
        f"clusters: [{{name: c, cluster: {{server: '{url}'}}}}]\n"
        "users: [{name: u, user: {token: t}}]\n"
        "contexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"
    )
    async with await connect(file) as api:
        yield api


async def test_a_write_that_may_not_be_made_any_more_when_it_has_a_connection_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leading = True
    connect_socket = transport.open_socket

    def lose(address: AddrInfoType) -> socket.socket:
        nonlocal leading
        leading = False
        return connect_socket(address)

    monkeypatch.setattr(transport, "open_socket", lose)
    async with answering(web.json_response({}), tmp_path) as api:
        writer = api.fenced(lambda: leading)
        with pytest.raises(Fenced, match="/api/v1/namespaces/n/configmaps/a: not sent"):
            await writer.patch(CONFIG_MAPS, "a", {}, "n")
        assert await writer.get(CONFIG_MAPS, "a", "n") == {}


async def test_a_missing_server_is_unreachable(tmp_path: Path) -> None:
    async with at(f"http://127.0.0.1:{UNUSED_PORT}", tmp_path) as api:
        with pytest.raises(Unreachable, match="cannot reach the API server"):
            await api.list(PODS)


@pytest.mark.parametrize("body", ["<html>", "", "[1", "null"])
async def test_a_response_that_is_no_object_is_unreachable(tmp_path: Path, body: str) -> None:
    async with answering(web.Response(text=body), tmp_path) as api:
        with pytest.raises(Unreachable):
            await api.get(PODS, "a", "n")


async def test_retry_after_is_in_the_error(tmp_path: Path) -> None:
    busy = web.json_response({"message": "busy"}, status=429, headers={"Retry-After": "7"})
    async with answering(busy, tmp_path) as api:
        with pytest.raises(TooManyRequests, match="busy") as caught:
            await api.get(PODS, "a", "n")
    assert caught.value.retry_after == 7.0


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"message": "m"}, Invalid),
        (401, {}, Unauthorized),
        (403, {}, Forbidden),
        (404, None, NotFound),
        (409, {"reason": "Conflict"}, Conflict),
        (409, {"reason": "AlreadyExists"}, AlreadyExists),
        (410, {}, Expired),
        (422, {}, Invalid),
        (429, {}, TooManyRequests),
        (500, "a\nproxy's page", Unreachable),
        (504, {}, Unreachable),
    ],
)
def test_each_status_has_its_error_class(status: int, body: object, kind: type[ApiError]) -> None:
    err = error_of(status, body)
    assert type(err) is kind
    assert err.status == status
    assert "\n" not in str(err)
    assert str(err)


def test_paths() -> None:
    assert PODS.path() == "/api/v1/pods"
    assert PODS.path("n", "a", "status") == "/api/v1/namespaces/n/pods/a/status"
    deployments = resource_of({"apiVersion": "apps/v1", "kind": "Deployment"})
    assert deployments.path("n") == "/apis/apps/v1/namespaces/n/deployments"
    assert (deployments.group, deployments.version) == ("apps", "v1")
    assert PODS.path("n", "../x") == "/api/v1/namespaces/n/pods/..%2Fx"
