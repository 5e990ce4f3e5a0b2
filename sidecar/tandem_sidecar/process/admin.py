"""The admin port, on aiohttp: metrics, probes, drain, running requests and past ones.

ProcessAdmin      answers for one process
SupervisorAdmin   asks every worker and aggregates the answers; it serves no client itself
"""

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from tandem_contract import endpoints
from tandem_contract.connections import address_of
from tandem_contract.metrics_text import metrics_text
from tandem_contract.trace import trace_path
from tandem_contract.web_connections import WebConnections

from ..handoff.breaker import Breakers
from ..handoff.context import Lifecycle
from ..observability.engine_counters import DataPathCounts, EngineCounters, FetchPages
from ..observability.metrics import Metrics
from ..observability.observer import History, RequestObserver
from . import aggregate
from .aggregate import Families

NOT_HEALTHY: Final = "the engine does not pass the health check: it has to answer 200\n"
DRAIN_IS_LOCAL: Final = (
    "only the preStop hook of this pod begins a drain, by a Unix socket: delete the pod, or send "
    "SIGTERM to the process\n"
)
_MAX_BODY_BYTES: Final = 1024
"""No admin request has a body that is read."""


class WorkerSilent(RuntimeError):
    """A worker does not answer on its admin socket: it exited, or hangs."""


class AdminHandlers(ABC):
    """The routes of the admin port."""

    def routes(self) -> list[web.RouteDef]:
        """The admin port's paths and handlers."""
        return [
            web.get(endpoints.METRICS, self.metrics),
            web.get(endpoints.ALIVE, self.livez),
            web.get(endpoints.READY, self.readyz),
            web.post(endpoints.DRAIN, self.drain),
            web.get(endpoints.STATE, self.state),
            web.get(endpoints.REQUESTS + "{id}", self.requests),
        ]

    async def livez(self, _request: web.Request) -> web.Response:
        """200 as long as the event loop runs."""
        return web.Response(text="alive\n")

    async def metrics(self, _request: web.Request) -> web.Response:
        """The page that Prometheus scrapes."""
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=await self.metrics_page(), headers=headers)

    async def readyz(self, request: web.Request) -> web.Response:
        """200 when new requests can be served, else 503 with the reason.

        With `?starting=true` also 200 while the engine has not been healthy yet.
        """
        problem = await self.not_ready(starting=_is_set(request, "starting"))
        if problem is not None:
            return web.Response(status=503, text=problem)
        return web.Response(text="ready\n")

    async def drain(self, request: web.Request) -> web.Response:
        """Begin the drain; with `?wait=true`, answer when no request needs an engine any more.

        A drain cannot be undone, so it takes a Unix socket, which only this pod reaches. An address
        tells nothing: the proxy of a mesh connects from one of this pod for every client.
        """
        transport = request.transport
        if transport is None or address_of(transport.get_extra_info("peername")):
            return web.Response(status=403, text=DRAIN_IS_LOCAL)
        in_flight = await self.begin_drain(wait=_is_set(request, "wait"))
        return web.json_response({"draining": True, "in_flight": in_flight})

    async def state(self, _request: web.Request) -> web.Response:
        """Running requests without their content, and the state of drain, engine and breakers."""
        return web.json_response(await self.current_state())

    async def requests(self, request: web.Request) -> web.Response:
        """The traces of a request id (`tandem_contract.trace`); 404 with an empty list if none."""
        traces = await self.find_traces(request.match_info["id"])
        return web.Response(
            body=msgspec.json.encode(traces),
            status=200 if traces else 404,
            content_type="application/json",
        )

    @abstractmethod
    async def metrics_page(self) -> bytes:
        """All metrics, in Prometheus' text format."""

    @abstractmethod
    async def not_ready(self, *, starting: bool) -> str | None:
        """Why new requests cannot be served, in one line; None: they can.

        `starting`: None also while the engine has not been healthy yet.
        """

    @abstractmethod
    async def begin_drain(self, *, wait: bool) -> int:
        """Refuse new requests from now on; returns the number of requests that still run.

        `wait`: return only when none of them needs an engine; see `Lifecycle.engines_idle`.
        """

    @abstractmethod
    async def current_state(self) -> dict[str, Any]:
        """The body of `/state`."""

    @abstractmethod
    async def find_traces(self, request_id: str) -> Sequence[Any]:
        """The traces of `request_id`, newest last."""


class Health(Protocol):
    """Whether requests can be served."""

    @property
    def healthy(self) -> bool:
        """Whether the engine, or one of them, passed the last health check."""


class ProcessAdmin(AdminHandlers):
    """Answers for this process."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        observer: RequestObserver,
        lifecycle: Lifecycle,
        health: Health,
        breakers: Breakers,
        history: History,
        counters: EngineCounters | None,
    ) -> None:
        """`counters`: refreshed before `/metrics` is answered; None in a worker, whose supervisor
        does it for all."""
        self._metrics = metrics
        self._observer = observer
        self._lifecycle = lifecycle
        self._health = health
        self._breakers = breakers
        self._history = history
        self._counters = counters
        self._was_healthy = False
        """Whether a request for readiness has found the engine healthy."""

    async def metrics_page(self) -> bytes:
        if self._counters is not None:
            await self._counters.refresh()
        # Requests that ended a moment ago still wait for the observer's next batch.
        self._observer.catch_up()
        return await metrics_text(self._metrics.registry)

    async def not_ready(self, *, starting: bool) -> str | None:
        if self._lifecycle.draining:
            return "draining\n"
        self._was_healthy |= self._health.healthy
        if self._health.healthy or (starting and not self._was_healthy):
            return None
        return NOT_HEALTHY

    async def begin_drain(self, *, wait: bool) -> int:
        self._lifecycle.drain()
        if wait:
            await self._lifecycle.engines_idle()
        return len(self._lifecycle.work)

    async def current_state(self) -> dict[str, Any]:
        pods = self._breakers.snapshot(asyncio.get_running_loop().time())
        return {
            "draining": self._lifecycle.draining,
            "engine_healthy": self._health.healthy,
            "in_flight": [work.describe() for work in self._lifecycle.work],
            "prefill_pods": {address: asdict(pod) for address, pod in pods.items()},
        }

    async def find_traces(self, request_id: str) -> Sequence[Any]:
        return self._history.find(request_id)


class Worker(Protocol):
    """A worker, as its supervisor's admin port needs it."""

    pid: int
    page: Families
    """Its metrics at the last scrape that it answered."""

    async def request(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET on its admin socket. Raises WorkerSilent."""


class WorkerGroup(Protocol):
    """The workers, as their supervisor's admin port needs them."""

    draining: bool
    exited_totals: Families
    """Counters and histograms of workers that have exited."""

    @property
    def serving(self) -> Sequence[Worker]:
        """The workers that serve now."""

    async def drain(self, *, wait: bool) -> None:
        """Have all refuse new requests; with `wait`, return when none needs an engine."""


class SupervisorAdmin(AdminHandlers):
    """Asks every worker and aggregates the answers; a worker that does not answer is left out."""

    def __init__(self, workers: WorkerGroup, fetch_pages: FetchPages) -> None:
        """`fetch_pages`: fetches the decode engines' metrics, once for all workers."""
        self._workers = workers
        self._own_metrics = Metrics()
        self.counters = EngineCounters(fetch_pages, self._own_metrics, self._data_path_counts)

    async def metrics_page(self) -> bytes:
        # A worker that does not answer counts as at its last scrape: a sum must not fall.
        for worker, status, body in await self.request_all(endpoints.METRICS):
            if status == 200:
                worker.page = aggregate.parse_page(body.decode())
        await self.counters.refresh()
        # The supervisor's own page holds the engine's counts and zeros: it serves no request.
        own_page = aggregate.parse_page(self._own_metrics.page().decode())
        return aggregate.format_page(aggregate.sum_pages([*self._pages(), own_page]))

    async def not_ready(self, *, starting: bool) -> str | None:
        if self._workers.draining:
            return "draining\n"
        path = endpoints.READY_OR_STARTING if starting else endpoints.READY
        answers = await self.request_all(path)
        # The kernel may give a new client to any worker, so all of them must be ready.
        problems = [body.decode() for _, status, body in answers if status != 200]
        if not answers:
            return "no worker answers\n"
        return problems[0] if problems else None

    async def begin_drain(self, *, wait: bool) -> int:
        await self._workers.drain(wait=wait)
        return len((await self.current_state())["in_flight"])

    async def current_state(self) -> dict[str, Any]:
        answers = await self.request_all(endpoints.STATE)
        states = {w.pid: msgspec.json.decode(body) for w, status, body in answers if status == 200}
        return aggregate.merge_states(states, draining=self._workers.draining)

    async def find_traces(self, request_id: str) -> Sequence[Any]:
        answers = await self.request_all(trace_path(request_id))
        return aggregate.merge_traces(
            [msgspec.json.decode(body) for _, status, body in answers if status == 200]
        )

    def _pages(self) -> list[Families]:
        return [self._workers.exited_totals, *(worker.page for worker in self._workers.serving)]

    def _data_path_counts(self) -> DataPathCounts:
        families = [samples for page in self._pages() for samples in page.values()]
        return DataPathCounts.of_samples(
            sample for samples in families for sample in samples.items()
        )

    async def request_all(self, path: str) -> list[tuple[Worker, int, bytes]]:
        """Worker, status and body of each answer; workers that do not answer are left out."""
        answers = await asyncio.gather(*(_request(w, path) for w in self._workers.serving))
        return [answer for answer in answers if answer is not None]


def _is_set(request: web.Request, name: str) -> bool:
    """Whether the query has `name=true`."""
    return request.query.get(name, "").lower() in ("true", "1")


async def _request(worker: Worker, path: str) -> tuple[Worker, int, bytes] | None:
    try:
        return worker, *await worker.request(path)
    except WorkerSilent:
        return None


@asynccontextmanager
async def serve_admin(
    handlers: AdminHandlers, sockets: Sequence[socket.socket]
) -> AsyncIterator[None]:
    """Answer admin requests on `sockets`, which are closed at the end."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.add_routes(handlers.routes())
    connections = WebConnections(app)
    await connections.runner.setup()
    servers = []
    try:
        for listener in sockets:
            servers.append(await _start_server(connections, listener))
        yield
    finally:
        # Listening ends first; `cleanup` then gives open requests `shutdown_timeout` to end.
        for server in servers:
            server.close()
        await connections.runner.cleanup()


async def _start_server(
    connections: WebConnections, listener: socket.socket
) -> asyncio.AbstractServer:
    # asyncio has one call for Unix sockets and one for TCP.
    loop = asyncio.get_running_loop()
    if listener.family == socket.AF_UNIX:
        return await loop.create_unix_server(connections, sock=listener)
    return await loop.create_server(connections, sock=listener)
