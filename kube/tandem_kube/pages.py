"""The HTTP pages that the kubelet and Prometheus read from a process: health and metrics."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort
from tandem_contract.metrics_text import metrics_text
from tandem_contract.web_connections import HANDSHAKE_SECONDS, WebConnections


def health_app(ready: Callable[[], bool]) -> web.Application:
    """Liveness answers 200 while the event loop runs, readiness 200 or 503 by `ready`."""

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_request: web.Request) -> web.Response:
        return (
            web.Response(text="ready\n")
            if ready()
            else web.Response(status=503, text="not ready\n")
        )

    app = web.Application()
    app.add_routes([web.get(endpoints.LIVE, healthz), web.get(endpoints.READY, readyz)])
    return app


def metrics_app(registry: CollectorRegistry) -> web.Application:
    """`/metrics` in Prometheus' text format."""

    async def metrics(_request: web.Request) -> web.Response:
        page = await metrics_text(registry)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get(endpoints.METRICS, metrics)])
    return app


@asynccontextmanager
async def listening(
    app: web.Application,
    address: HostPort | socket.socket,
    flag: str,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Serve `app` on `address`, which the user set with `flag`, or on a socket that listens.

    Raises OSError, naming the flag.
    """
    connections = WebConnections(app)
    await connections.runner.setup()
    server = None
    try:
        try:
            server = await _listen(connections, address, tls)
        except OSError as err:
            raise OSError(f"cannot listen on {address}: is the port in use? See {flag}") from err
        yield
    finally:
        if server is not None:
            server.close()
        await connections.runner.cleanup()


async def _listen(
    connections: WebConnections, address: HostPort | socket.socket, tls: ssl.SSLContext | None
) -> asyncio.Server:
    loop, seconds = asyncio.get_running_loop(), HANDSHAKE_SECONDS if tls else None
    if isinstance(address, socket.socket):
        return await loop.create_server(
            connections, sock=address, ssl=tls, ssl_handshake_timeout=seconds
        )
    return await loop.create_server(
        connections, address.host, address.port, ssl=tls, ssl_handshake_timeout=seconds
    )
