"""The admin port over several workers: what they say, joined."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from tandem_contract import endpoints
from tandem_contract.trace import trace_path

from ..observability.engine_counters import EngineCounters, Seen
from ..observability.metrics import Metrics
from . import aggregate
from .admin import livez, metrics_page, traces, waits
from .aggregate import Families
from .worker import Worker, WorkerSilent


class Workers(Protocol):
    """Whom to ask."""

    draining: bool
    gone: Families
    """What workers that ended had counted."""

    @property
    def serving(self) -> Sequence[Worker]:
        """Those that are up."""

    async def drain(self) -> None:
        """Have all take nothing new."""

    async def drained(self) -> None:
        """The same, and return when nothing runs."""


class SupervisorAdmin:
    """Handlers, each of which asks every worker."""

    def __init__(
        self, workers: Workers, engine_page: Callable[[], Awaitable[bytes | None]]
    ) -> None:
        """`engine_page`: asks the decode engine for its metrics, once for all workers."""
        self._workers = workers
        self._own = Metrics()
        self._counters = EngineCounters(engine_page, self._own, self._seen)

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

    async def watch(self) -> None:
        """Follow the engine's counters between scrapes, for ever."""
        await self._counters.watch()

    async def metrics(self, _request: web.Request) -> web.Response:
        """Summed; a worker that does not answer counts as when it last did."""
        for worker, status, body in await self._ask(endpoints.METRICS):
            if status == 200:
                worker.page = aggregate.families(body.decode())
        await self._counters.look()
        own = aggregate.families(self._own.page().decode())
        return metrics_page(aggregate.text(aggregate.summed([*self._pages(), own])))

    async def readyz(self, _request: web.Request) -> web.Response:
        """200 when every worker that is up is ready, and one is."""
        if self._workers.draining:
            return web.Response(status=503, text="draining\n")
        answers = await self._ask(endpoints.READY)
        for _, status, body in answers:
            if status != 200:
                return web.Response(status=503, body=body, content_type="text/plain")
        if not answers:
            return web.Response(status=503, text="no worker answers\n")
        return web.Response(text="ready\n")

    async def drain(self, request: web.Request) -> web.Response:
        """Begin the drain in all; `?wait=true` answers when nothing runs any more."""
        await (self._workers.drained() if waits(request) else self._workers.drain())
        return web.json_response(
            {"draining": True, "in_flight": len((await self._state())["in_flight"])}
        )

    async def state(self, _request: web.Request) -> web.Response:
        """What runs, in all workers."""
        return web.json_response(await self._state())

    async def requests(self, request: web.Request) -> web.Response:
        """What is remembered of a request id, by whichever worker had it."""
        answers = await self._ask(trace_path(request.match_info["id"]))
        known = aggregate.traces(
            [msgspec.json.decode(body) for _, status, body in answers if status == 200]
        )
        return traces(msgspec.json.encode(known), known=bool(known))

    def _pages(self) -> list[Families]:
        return [self._workers.gone, *(worker.page for worker in self._workers.serving)]

    def _seen(self) -> Seen:
        families = [samples for page in self._pages() for samples in page.values()]
        return Seen.by_all(sample for samples in families for sample in samples.items())

    async def _state(self) -> dict[str, Any]:
        answers = await self._ask(endpoints.STATE)
        states = {w.pid: msgspec.json.decode(body) for w, status, body in answers if status == 200}
        return aggregate.state(states, draining=self._workers.draining)

    async def _ask(self, path: str) -> list[tuple[Worker, int, bytes]]:
        """What those that answer say."""
        return [
            a for a in await asyncio.gather(*(_asked(w, path) for w in self._workers.serving)) if a
        ]


async def _asked(worker: Worker, path: str) -> tuple[Worker, int, bytes] | None:
    try:
        return worker, *await worker.ask(path)
    except WorkerSilent:
        return None
