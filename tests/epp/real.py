"""For the component tests: HTTP backends, and `tandem-epp` and Envoy as processes."""

import asyncio
import json
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from tandem_contract import headers as wire
from tandem_contract import metrics as names
from tandem_contract.api_paths import ApiPaths
from tandem_contract.timing import Timing
from tandem_local.ports import free_port
from tandem_local.router import find_envoy
from tandem_operator.routing.envoy.bootstrap import EnvoySettings, envoy_bootstrap
from tandem_operator.routing.envoy.clusters import EPP, Json, socket_address
from tandem_operator.routing.envoy.http_filters import BodyMode

DEADLINE = 20.0
_API = ApiPaths()


async def until(condition: Callable[[], Awaitable[bool]], within: float = DEADLINE) -> None:
    """Wait until `condition` is true; raises TimeoutError after `within` seconds."""
    async with asyncio.timeout(within):
        while not await condition():
            await asyncio.sleep(0.02)


@dataclass
class ReceivedRequest:
    """A request that a backend received."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Backend:
    """An HTTP server that answers like a sidecar and records its requests."""

    name: str
    port: int = 0
    received: list[ReceivedRequest] = field(default_factory=list)
    started: float = 1.0
    prefilled_by: str | None = None
    """Name of the prefill backend in its responses; None: none."""
    ranked_page: str = ""
    """Its metrics page, instead of that of one idle engine."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    fails: bool = False
    """Whether it answers requests with 500; its metrics stay in order."""
    max_model_len: int | None = None
    """What its list of models says to the EPP; None: it has no list."""
    is_down: bool = False
    """Whether its metrics page is gone, for which the EPP does not choose it."""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/metrics":
            return web.Response(status=503) if self.is_down else web.Response(text=self.page())
        if request.path == "/v1/models" and wire.REQUEST_ID not in request.headers:
            # A client's request has an id.
            return self._models()
        body = await request.read()
        headers = {key.lower(): value for key, value in request.headers.items()}
        self.received.append(ReceivedRequest(request.path, headers, body))
        if self.fails:
            return web.Response(status=500, text="out of memory")
        if request.path == "/v1/responses/hang":
            await self.release.wait()
        dies = request.path == "/v1/responses/die" or b'"die"' in body
        if dies and request.transport is not None:
            request.transport.abort()
        timing = Timing(queue=0.0, compute=0.5, cached=16, computed=48)
        response = web.StreamResponse(
            headers={wire.TIMING: timing.encode(), "x-served-by": self.name}
        )
        if self.prefilled_by is not None:
            response.headers[wire.PREFILL_BACKEND] = self.prefilled_by
        await response.prepare(request)
        await response.write(b"first ")
        if request.path == "/v1/responses/cut" and request.transport is not None:
            await self.release.wait()
            request.transport.abort()
            return response
        if request.path == "/v1/responses/slow" or b'"slow"' in body:
            await self.release.wait()
        await response.write(b"last")
        return response

    def _models(self) -> web.Response:
        if self.max_model_len is None:
            return web.Response(status=404)
        return web.json_response({"data": [{"id": "m", "max_model_len": self.max_model_len}]})

    def page(self) -> str:
        return self.ranked_page or (
            f"{names.PROCESS_START_TIME} {self.started}\n"
            f'{names.ENGINE_RUNNING}{{engine="0"}} 0.0\n'
            f'{names.ENGINE_WAITING}{{engine="0"}} 0.0\n'
            f'{names.ENGINE_CACHE_CONFIG}{{block_size="16",num_gpu_blocks="1000"}} 1.0\n'
        )


@asynccontextmanager
async def serving(*backends: Backend, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    """Serve the backends, each on a free port."""
    runners = []
    try:
        for backend in backends:
            app = web.Application(client_max_size=1 << 26)
            app.router.add_route("*", "/{path:.*}", backend.serve)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            runners.append(runner)
            site = web.TCPSite(runner, "127.0.0.1", backend.port, ssl_context=tls)
            await site.start()
            backend.port = runner.addresses[0][1]
        yield
    finally:
        for backend in backends:
            backend.release.set()
        for runner in runners:
            await runner.cleanup()


@asynccontextmanager
async def serving_app(app: web.Application) -> AsyncIterator[str]:
    """Serve `app` on a free port of loopback; yields its URL without a path."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@dataclass
class Epp:
    """A running `tandem-epp`."""

    process: asyncio.subprocess.Process
    grpc: int
    health: int
    metrics: int

    async def serves(self, *backends: str) -> bool:
        """Whether exactly these backends may be chosen."""
        healthy = 'tandem_epp_backend_healthy{backend="'
        figures = await self.figures()
        may = {
            k.removeprefix(healthy)[:-2] for k, v in figures.items() if k.startswith(healthy) and v
        }
        return may == set(backends)

    async def figures(self) -> dict[str, float]:
        """The metrics page: `name{labels}` → value."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.metrics}/metrics") as response,
        ):
            lines = (await response.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def ready(self) -> bool:
        """Whether the readiness probe succeeds."""
        assert self.process.returncode is None, "tandem-epp ended at its start"
        url = f"http://127.0.0.1:{self.health}/readyz"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def in_flight(self) -> float:
        figures = await self.figures()
        return sum(v for k, v in figures.items() if k.startswith("tandem_epp_in_flight{"))


@asynccontextmanager
async def process(
    *command: str | Path, stderr: int = asyncio.subprocess.DEVNULL, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is stopped with SIGTERM at the end."""
    started = await asyncio.create_subprocess_exec(
        *map(str, command),
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        stderr=stderr,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.send_signal(signal.SIGTERM)
        await started.wait()


@asynccontextmanager
async def starting_epp(config: Path, *flags: str, **environment: str) -> AsyncIterator[Epp]:
    """`tandem-epp` on free ports, without warm-up, because these tests count requests. `flags` come
    last, so they take precedence."""
    grpc, health, metrics = free_port("127.0.0.1"), free_port("127.0.0.1"), free_port("127.0.0.1")
    command = [sys.executable, "-m", "tandem_epp", "--no-warm-up", "--config", str(config)]
    for flag, port in (("--listen", grpc), ("--health", health), ("--metrics", metrics)):
        command += [flag, f"127.0.0.1:{port}"]
    async with process(*command, *flags, **environment) as started:
        yield Epp(started, grpc, health, metrics)


@asynccontextmanager
async def epp(config: Path, *flags: str, **environment: str) -> AsyncIterator[Epp]:
    """`tandem-epp` on free ports, once it is ready."""
    async with starting_epp(config, *flags, **environment) as started:
        await until(started.ready)
        yield started


def envoy_settings(
    epp_port: int,
    fallback: Sequence[str] = ("127.0.0.1:1",),
    body_mode: BodyMode = "BUFFERED",
    body_limit: int = 16 << 20,
    api: ApiPaths = _API,
) -> EnvoySettings:
    """Everything on loopback, on free ports. The fallback answers nothing where none is given;
    `body_limit` is in bytes."""
    return EnvoySettings(
        epp_address="127.0.0.1",
        epp_port=epp_port,
        fallback=tuple(fallback),
        listen_address="127.0.0.1",
        listen_port=free_port("127.0.0.1"),
        admin_port=free_port("127.0.0.1"),
        body_mode=body_mode,
        body_limit=body_limit,
        api=api,
    )


@asynccontextmanager
async def envoy(
    directory: Path,
    settings: EnvoySettings,
    other_epps: Sequence[int] = (),
    change: Callable[[Json], None] = lambda _: None,
) -> AsyncIterator[str]:
    """Envoy with the operator's bootstrap configuration; yields its URL once it is ready.

    `other_epps` are ports of further EPPs on loopback, as if the EPP's name had several addresses.
    `change` may edit the configuration first.
    """
    file = directory / "envoy.json"
    bootstrap = envoy_bootstrap(settings)
    clusters = {each["name"]: each for each in bootstrap["static_resources"]["clusters"]}
    endpoints = clusters[EPP]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoints += [
        {"endpoint": {"address": socket_address("127.0.0.1", port)}} for port in other_epps
    ]
    change(bootstrap)
    file.write_text(json.dumps(bootstrap))
    command = (find_envoy(), "-c", file, "--use-dynamic-base-id", "--concurrency", "1", "-l", "off")
    async with process(*command) as started, aiohttp.ClientSession() as session:

        async def ready() -> bool:
            assert started.returncode is None, "Envoy ended at its start"
            try:
                url = f"http://127.0.0.1:{settings.admin_port}/ready"
                async with session.get(url) as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await until(ready)
        yield f"http://127.0.0.1:{settings.listen_port}"
