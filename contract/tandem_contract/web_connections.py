"""The connections of an aiohttp server, bounded as `connections` says.

web = WebConnections(app)
await web.runner.setup()
await loop.create_server(web, sock=listener)
"""

import asyncio
import socket
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.typedefs import Handler

from .connections import address_of, to_evict

IDLE_SECONDS: Final = 75.0
"""Seconds between two requests, and to the end of a request's head. Above Prometheus' usual
interval of a minute, so that it keeps its connection."""
CONNECTIONS: Final = 256
"""Connections of a server for probes, scrapes and people."""
HANDSHAKE_SECONDS: Final = 10.0
"""Seconds for a TLS handshake."""
_LINGER_SECONDS: Final = 1.0
"""Seconds for which the rest of a body is read that no handler has read."""
_PIECE: Final = 256 * 1024
"""Most bytes of a body that are read at once."""
_HANDLER: Final[dict[str, Any]] = {"access_log": None, "auto_decompress": False}
"""Settings of aiohttp's connections. It takes None for no log, which its annotations do not say. No
body is inflated: a few bytes can become millions."""


class WebConnections:
    """The application of a server, and its connections."""

    def __init__(
        self,
        app: web.Application,
        *,
        limit: int = CONNECTIONS,
        idle_seconds: float = IDLE_SECONDS,
        shutdown_seconds: float = 1.0,
        **runner: Any,
    ) -> None:
        """`limit`: connections at a time. `runner`: arguments of aiohttp's AppRunner."""
        self.limit, self.idle_seconds = limit, idle_seconds
        self._open: set[WebConnection] = set()
        app.middlewares.insert(0, _begin)
        self.runner = web.AppRunner(
            app, shutdown_timeout=shutdown_seconds, access_log=None, **runner
        )

    def __call__(self) -> "WebConnection":
        """A connection; `runner` must be set up. asyncio's protocol factory."""
        return WebConnection(cast("web.Server", self.runner.server), self)

    def evict(self) -> bool:
        """Close connections for newcomers; False: the server works for all of them."""
        found = to_evict(self._open, asyncio.get_running_loop().time())
        for connection in found:
            self.remove(connection)
            connection.force_close()
        return bool(found)

    def add(self, connection: "WebConnection") -> bool:
        """Count a connection; False: it finds no place."""
        has_place = len(self._open) < self.limit or self.evict()
        self._open.add(connection)
        return has_place

    def remove(self, connection: "WebConnection") -> None:
        """The connection has ended, or takes no place any more."""
        self._open.discard(connection)


class WebConnection(web.RequestHandler):
    """A connection that knows whether its client or its server is waited for."""

    __slots__ = ("_connections", "_is_served", "_last_byte", "body_since", "peer", "sock")

    def __init__(self, server: "web.Server", connections: WebConnections) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=connections.idle_seconds,
            lingering_time=_LINGER_SECONDS,
            **_HANDLER,
        )
        self._connections = connections
        self._is_served = False
        self._last_byte = 0.0
        self.body_since: float | None = None
        """When a handler began to wait for more of the body; None: it waits for none."""
        self.peer = ""
        self.sock: socket.socket | None = None

    def without_progress(self, now: float) -> tuple[bool, float] | None:
        """See `connections.Connection`."""
        if self._is_served:
            return None if self.body_since is None else (True, now - self.body_since)
        return False, now - self._last_byte

    def serve(self) -> None:
        """A request has arrived, perhaps without its body."""
        self._is_served = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.peer = address_of(transport.get_extra_info("peername"))
        self.sock = transport.get_extra_info("socket")
        self._last_byte = asyncio.get_running_loop().time()
        has_place = self._connections.add(self)
        super().connection_made(transport)
        if not has_place:
            self.force_close()

    def data_received(self, data: bytes) -> None:
        self._last_byte = asyncio.get_running_loop().time()
        super().data_received(data)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._is_served = False
            self._last_byte = asyncio.get_running_loop().time()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)


@web.middleware
async def _begin(request: web.Request, handler: Handler) -> web.StreamResponse:
    if isinstance(request.protocol, WebConnection):
        request.protocol.serve()
    return await handler(request)


async def read_piece(request: web.Request, seconds: float, ends: float) -> bytes:
    """The next bytes of a body, empty at its end. Raises TimeoutError after `seconds`, and at
    `ends`, the loop's time."""
    now, connection = asyncio.get_running_loop().time(), request.protocol
    if isinstance(connection, WebConnection):
        connection.body_since = now
    try:
        async with asyncio.timeout(min(seconds, ends - now)):
            return await request.content.read(_PIECE)
    finally:
        if isinstance(connection, WebConnection):
            connection.body_since = None
