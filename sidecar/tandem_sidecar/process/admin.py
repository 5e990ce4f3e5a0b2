"""The admin port, on aiohttp: metrics, probes, drain, what runs, what became of a request."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Final

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from tandem_contract import endpoints

from ..handoff.breaker import Breakers
from ..handoff.lifecycle import Lifecycle
from ..observability.engine_counters import EngineCounters
from ..observability.history import History
from ..observability.metrics import Metrics
from ..observability.observer import Observer
from .health import EngineHealth

NOT_HEALTHY: Final = "the engine's /health does not answer 200\n"
_BODY_BYTES: Final = 1024
"""Nothing here reads a body."""
_IDLE_SECONDS: Final = 15.0
"""From a connection to its first request, and from one request to the next."""


class Admin:
    """Handlers over what the process shares."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        observer: Observer,
        lifecycle: Lifecycle,
        health: EngineHealth,
        breakers: Breakers,
        history: History,
        counters: EngineCounters | None,
    ) -> None:
        """`counters`: brought up to date before `/metrics` is answered."""
        self._metrics = metrics
        self._observer = observer
        self._lifecycle = lifecycle
        self._health = health
        self._breakers = breakers
        self._history = history
        self._counters = counters

    def routes(self) -> list[web.RouteDef]:
        """What is served."""
        return [
            web.get(endpoints.METRICS, self.metrics),
            web.get(endpoints.ALIVE, livez),
            web.get(endpoints.READY, self.readyz),
            web.get(endpoints.DRAIN, self.drain),
            web.post(endpoints.DRAIN, self.drain),
            web.get(endpoints.STATE, self.state),
            web.get(endpoints.REQUESTS + "{id}", self.requests),
        ]

    async def metrics(self, _request: web.Request) -> web.Response:
        """What Prometheus scrapes."""
        if self._counters is not None:
            await self._counters.look()
        self._observer.catch_up()
        return metrics_page(self._metrics.page())

    async def readyz(self, _request: web.Request) -> web.Response:
        """200 when new requests can be served."""
        if self._lifecycle.draining:
            return web.Response(status=503, text="draining\n")
        if not self._health.healthy:
            return web.Response(status=503, text=NOT_HEALTHY)
        return web.Response(text="ready\n")

    async def drain(self, request: web.Request) -> web.Response:
        """Begin the drain; `?wait=true` answers when nothing runs any more."""
        self._lifecycle.drain()
        if waits(request):
            await self._lifecycle.idle()
        return web.json_response({"draining": True, "in_flight": len(self._lifecycle.work)})

    async def state(self, _request: web.Request) -> web.Response:
        """What runs, without what it is about, and how prefill pods are treated."""
        pods = self._breakers.snapshot(asyncio.get_running_loop().time())
        return web.json_response(
            {
                "draining": self._lifecycle.draining,
                "engine_healthy": self._health.healthy,
                "in_flight": [work.describe() for work in self._lifecycle.work],
                "prefill_pods": {address: asdict(pod) for address, pod in pods.items()},
            }
        )

    async def requests(self, request: web.Request) -> web.Response:
        """What is remembered of a request id, see `tandem_contract.trace`."""
        found = self._history.find(request.match_info["id"])
        return traces(msgspec.json.encode(found), known=bool(found))


async def livez(_request: web.Request) -> web.Response:
    """200 as long as the event loop runs."""
    return web.Response(text="alive\n")


def metrics_page(page: bytes) -> web.Response:
    """A page in Prometheus' text format."""
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})


def traces(found: bytes, *, known: bool) -> web.Response:
    """The JSON behind `tandem trace`."""
    return web.Response(body=found, status=200 if known else 404, content_type="application/json")


def waits(request: web.Request) -> bool:
    """Whether a drain is to be answered at its end only."""
    return request.query.get("wait", "").lower() in ("true", "1")


@asynccontextmanager
async def serving(
    routes: Sequence[web.RouteDef], listening: Sequence[socket.socket]
) -> AsyncIterator[None]:
    """Answer `routes` on `listening`, which are closed at the end."""
    app = web.Application(client_max_size=_BODY_BYTES)
    app.add_routes(routes)
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=_IDLE_SECONDS,
        lingering_time=1.0,
    )
    await runner.setup()
    servers = []
    try:
        for listener in listening:
            servers.append(await _serve(runner, listener))
        yield
    finally:
        for server in servers:
            server.close()
        await runner.cleanup()


async def _serve(runner: web.AppRunner, listener: socket.socket) -> asyncio.AbstractServer:
    loop, factory = asyncio.get_running_loop(), runner.server
    if factory is None:
        raise RuntimeError("the runner is not set up")
    if listener.family == socket.AF_UNIX:
        return await loop.create_unix_server(factory, sock=listener)
    return await loop.create_server(factory, sock=listener)
