"""A scripted API server, and a TCP proxy before a real one."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from tandem_kube.client import Api, connect

DEADLINE = 20.0
LOOPBACK = "127.0.0.1"
PODS_PATH = "/api/v1/namespaces/{namespace}/pods"


async def until(holds: Callable[[], bool]) -> None:
    """Wait until `holds`; fails after DEADLINE."""
    async with asyncio.timeout(DEADLINE):
        while not holds():
            await asyncio.sleep(0.005)


def pod(name: str, version: int, **labels: str) -> dict[str, Any]:
    """A minimal pod of namespace `n`."""
    metadata = {"name": name, "namespace": "n", "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata}


def event(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """A line of a watch."""
    return {"type": kind, "object": body}


def bookmark(version: int) -> dict[str, Any]:
    return event("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


def refusal(status: int, message: str = "no") -> dict[str, Any]:
    """A `Status` object with this code and message."""
    return {"kind": "Status", "status": "Failure", "code": status, "message": message}


@dataclass
class Script:
    """What a scripted API server answers to the nth list and the nth watch; the last answer is
    given again and again. A refusal is answered with its status; a watch stays open after its
    events, unless it is a tuple: then it ends."""

    lists: list[dict[str, Any]]
    watches: list[list[dict[str, Any]] | tuple[dict[str, Any], ...] | dict[str, Any]]
    listed: int = 0
    watched: list[str] = field(default_factory=list)
    """The version each watch began from."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            self.watched.append(request.query["resourceVersion"])
            script = self.watches[min(len(self.watched), len(self.watches)) - 1]
            return (
                refused(script) if isinstance(script, dict) else await self._stream(request, script)
            )
        page = self.lists[min(self.listed, len(self.lists) - 1)]
        self.listed += 1
        return refused(page) if "code" in page else web.json_response(page)

    async def _stream(
        self, request: web.Request, events: list[dict[str, Any]] | tuple[dict[str, Any], ...]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        for line in events:
            await response.write(json.dumps(line).encode() + b"\n")
        if isinstance(events, list):
            await asyncio.Event().wait()
        return response


def refused(status: dict[str, Any]) -> web.Response:
    return web.json_response(status, status=status["code"])


def listing(version: int, *pods: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version)}, "items": list(pods)}


def _cluster(port: int) -> dict[str, str]:
    return {"server": f"http://127.0.0.1:{port}"}


@asynccontextmanager
async def scripted(
    script: Script,
    folder: Path,
    *,
    cluster: Callable[[int], dict[str, str]] = _cluster,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Api]:
    """A client of a server that follows `script`; `cluster` is its kubeconfig's, by the port."""
    app = web.Application()
    app.router.add_get(PODS_PATH, script.answer)
    for path, answer in _DISCOVERY.items():
        app.router.add_get(path, partial(_discover, answer))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    kubeconfig = folder / "scripted.kubeconfig"
    kubeconfig.write_text(json.dumps(_kubeconfig(cluster(runner.addresses[0][1]))))
    try:
        async with await connect(kubeconfig) as api:
            yield api
    finally:
        await runner.cleanup()


async def _discover(answer: dict[str, Any], _request: web.Request) -> web.Response:
    return web.json_response(answer)


_VERBS = ["get", "list", "watch"]
_DISCOVERY: dict[str, dict[str, Any]] = {
    "/api": {"versions": ["v1"]},
    "/apis": {"groups": []},
    "/api/v1": {
        "resources": [
            {"name": name, "singularName": "", "kind": kind, "namespaced": True, "verbs": _VERBS}
            for name, kind in (("pods", "Pod"), ("namespaces", "Namespace"))
        ]
    },
}
"""What the scripted server says about the kinds that it serves."""


def _kubeconfig(cluster: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


class _Side(asyncio.Protocol):
    """One of a forwarded connection's two ends."""

    def __init__(self, proxy: "Proxy", peer: "_Side | None" = None) -> None:
        self._proxy, self._peer = proxy, peer
        self._early: list[bytes] = []
        self.transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._proxy.join(self)
        if self._peer is None:
            self._peer = self._proxy.dial(self)
        else:
            transport.writelines(self._peer._early)

    def data_received(self, data: bytes) -> None:
        if self._proxy.stalled:
            return
        if self._peer is None or self._peer.transport is None:
            self._early.append(data)
        else:
            self._peer.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._proxy.leave(self)
        if self._peer is not None and self._peer.transport is not None:
            self._peer.transport.abort()
        self.closed.set()


class Proxy:
    """Forwards bytes to `target` ("host:port"); can drop, refuse and silence connections."""

    def __init__(self, target: str, address: str = LOOPBACK) -> None:
        self._address = address
        self._host, _, port = target.rpartition(":")
        self._target_port = int(port)
        self._sides: set[_Side] = set()
        self._dialling: set[asyncio.Task[object]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.stalled = False
        """While true, all bytes are dropped silently."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Proxy"]:
        await self.accept()
        try:
            yield self
        finally:
            await self.refuse()

    async def accept(self) -> None:
        """Accept connections, on the same port as before."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Side(self), self._address, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Stop accepting connections and close the open ones."""
        if self._server is not None:
            loop = asyncio.get_running_loop()
            for listening in self._server.sockets:
                loop.remove_reader(listening.fileno())
            # What was accepted last becomes a side two turns of the loop later. Python 3.11 leaves
            # it open if the server is closed before.
            for _ in range(2):
                await asyncio.sleep(0)
            self._server.close()
        await self.drop()

    async def drop(self) -> None:
        """Cut every connection."""
        await asyncio.gather(*self._dialling, return_exceptions=True)
        sides = list(self._sides)
        for side in sides:
            if side.transport is not None:
                side.transport.abort()
        for side in sides:
            await side.closed.wait()

    def join(self, side: _Side) -> None:
        self._sides.add(side)

    def leave(self, side: _Side) -> None:
        self._sides.discard(side)

    def dial(self, client: _Side) -> _Side:
        """The other end for `client`, being connected."""
        server, loop = _Side(self, client), asyncio.get_running_loop()
        connecting = loop.create_connection(lambda: server, self._host, self._target_port)
        task: asyncio.Task[object] = asyncio.ensure_future(connecting)
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)
        return server


@asynccontextmanager
async def proxied(
    kubeconfig: Path, folder: Path, address: str = LOOPBACK
) -> AsyncIterator[tuple[Proxy, Path]]:
    """A proxy at `address` before the cluster of `kubeconfig`, and a kubeconfig that goes through
    it."""
    document = json.loads(kubeconfig.read_text())
    cluster = document["clusters"][0]["cluster"]
    async with Proxy(cluster["server"].removeprefix("https://"), address).running() as proxy:
        cluster |= {"server": f"https://{address}:{proxy.port}", "tls-server-name": LOOPBACK}
        through = folder / "proxied.kubeconfig"
        through.write_text(json.dumps(document))
        yield proxy, through
