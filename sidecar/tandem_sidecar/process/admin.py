"""The admin port, on aiohttp: `/metrics`, `/readyz`, `/drain`, `/state`."""

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from tandem_contract import endpoints

from ..handoff.lifecycle import Lifecycle
from ..seeing.metrics import Metrics
from .health import EngineHealth


class Admin:
    """Handlers over what the process shares."""

    def __init__(self, metrics: Metrics, lifecycle: Lifecycle, health: EngineHealth) -> None:
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._health = health

    def app(self) -> web.Application:
        """The application."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self.metrics),
                web.get(endpoints.READY, self.readyz),
                web.get("/drain", self.drain),
                web.post("/drain", self.drain),
                web.get("/state", self.state),
            ]
        )
        return app

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def readyz(self, _request: web.Request) -> web.Response:
        """200 when new requests can be served."""
        if self._lifecycle.draining:
            return web.Response(status=503, text="draining\n")
        if not self._health.healthy:
            return web.Response(status=503, text="the engine's /health does not answer 200\n")
        return web.Response(text="ready\n")

    async def drain(self, request: web.Request) -> web.Response:
        """Begin the drain; `?wait=true` answers when nothing runs any more."""
        self._lifecycle.drain()
        if request.query.get("wait", "").lower() in ("true", "1"):
            await self._lifecycle.idle()
        return web.json_response({"draining": True, "in_flight": len(self._lifecycle.work)})

    async def state(self, _request: web.Request) -> web.Response:
        """What runs, without what it is about."""
        return web.json_response(
            {
                "draining": self._lifecycle.draining,
                "engine_healthy": self._health.healthy,
                "in_flight": [work.describe() for work in self._lifecycle.work],
            }
        )
