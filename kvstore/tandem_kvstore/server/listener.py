"""The connections of `tandem store`: how many there are, and how they end.

    listening socket ── a place is free ── connection (aiohttp) ── StoreServer

When all places are taken, a client that waits gets the place of one that the server waits for
(`tandem_contract.connections`); without one, clients wait in the kernel's backlog. At a drain, idle
connections are closed at once, and running requests get some time to end.
"""

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final, cast

from aiohttp import web
from aiohttp.typedefs import Handler

from tandem_contract.connections import raise_descriptor_limit
from tandem_contract.web_connections import WebConnection, WebConnections

from .app import StoreServer, StoreSettings

_log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
"""Connections that the kernel queues until they are accepted."""
_FILES_OF_CONNECTION: Final = 2
"""Descriptors of a connection: its socket, and the object that it reads or writes."""
_OTHER_FILES: Final = 64
"""Descriptors that do not belong to connections."""
_NO_SUCH_ADDRESS: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
_ACCEPT_AGAIN: Final = 0.1
"""Seconds before the next accept after the kernel had no memory for one."""
_EVICT_AGAIN: Final = 0.5
"""Seconds between two looks for a connection to close while a client waits for a place."""
_LAST_SECONDS: Final = 3.0
"""Seconds for handlers that were cancelled to remove their temporary files. Shorter: on a busy
machine such a file stays for an hour."""


class StoreListener:
    """Accepts connections for a StoreServer. For one event loop."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        app = StoreServer(settings).app()
        app.middlewares.append(self._track)
        app.on_response_prepare.append(self._close_after)
        limit = _connection_limit(settings.max_connections)
        self._connections = WebConnections(
            app,
            limit=limit,
            idle_seconds=settings.idle_timeout,
            shutdown_seconds=_LAST_SECONDS,
        )
        self._runner = self._connections.runner
        self._places = asyncio.Semaphore(limit)
        self._accepting: list[asyncio.Task[None]] = []
        # Connections that were accepted, and are not yet connections of aiohttp's server.
        self._connecting: set[asyncio.Task[tuple[asyncio.Transport, asyncio.Protocol]]] = set()
        # The task of each running request, which also sends its answer.
        self._requests: dict[asyncio.Task[object], web.Request] = {}
        self._is_draining = False

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen there, and return the first address. Raises OSError."""
        await self._runner.setup()
        listeners = _listen(host, port, self._settings.idle_timeout)
        self._accepting += [asyncio.create_task(self._accept(item)) for item in listeners]
        address = listeners[0].getsockname()
        return address[0], address[1]

    async def close(self) -> None:
        """Accept no more connections, let running requests end, and cut those that take longer than
        `drain_timeout`."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await asyncio.gather(*self._connecting, return_exceptions=True)
        self._is_draining = True
        # The task of a request that has arrived begins within two turns of the event loop.
        for _ in range(2):
            await asyncio.sleep(0)
        if (server := self._runner.server) is not None:
            self._close_idle(server)
        await self._end_requests()
        await self._runner.cleanup()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection = partial(_Connection, self._connections, self._places.release)
        with listener:
            while True:
                await self._take_place(loop, listener)
                try:
                    client, _ = listener.accept()
                    client.setblocking(False)
                except BlockingIOError:
                    # A listener without clients keeps no place from another one.
                    self._places.release()
                    await _wait_until_readable(loop, listener)
                except OSError as err:
                    self._places.release()
                    _log.warning("a connection could not be accepted: %s", err.strerror)
                    await asyncio.sleep(_ACCEPT_AGAIN)
                else:
                    # Not awaited: it takes turns of the event loop, and more clients may wait.
                    task = asyncio.create_task(loop.connect_accepted_socket(connection, client))
                    self._connecting.add(task)
                    task.add_done_callback(self._connecting.discard)

    async def _take_place(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        """Return once there is a place for a client that waits, or for the next one to come."""
        while True:
            if self._places.locked():
                await _wait_until_readable(loop, listener)
                self._connections.evict()
            # Looked at again, because a client that is waited for may become late.
            with suppress(TimeoutError):
                async with asyncio.timeout(_EVICT_AGAIN):
                    await self._places.acquire()
                    return

    @web.middleware
    async def _track(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        task = cast("asyncio.Task[object]", asyncio.current_task())
        self._requests[task] = request
        task.add_done_callback(self._requests.pop)
        return await handler(request)

    async def _close_after(self, _: web.Request, response: web.StreamResponse) -> None:
        # When all places are taken, a client that waits gets this one instead of an idle client.
        if self._is_draining or self._places.locked():
            response.force_close()
            # aiohttp has set the other headers already.
            response.headers["Connection"] = "close"

    def _close_idle(self, server: web.Server) -> None:
        """Close idle connections; let aiohttp close the others after their request."""
        requests = {request.protocol: request for request in self._requests.values()}
        for connection in server.connections:
            if (request := requests.get(connection)) is None:
                connection.force_close()
            # From `close` on aiohttp drops what a connection receives. An upload's connection is
            # closed by its answer's header instead.
            elif request.content.is_eof():
                connection.close()

    async def _end_requests(self) -> None:
        try:
            async with asyncio.timeout(self._settings.drain_timeout):
                while self._requests:
                    await asyncio.wait(list(self._requests))
        except TimeoutError:
            tasks = list(self._requests)
            _log.warning("%d requests did not end in time, and are cut", len(tasks))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)


class _Connection(WebConnection):
    """A connection that reports its end."""

    __slots__ = ("_on_lost",)

    def __init__(self, connections: WebConnections, on_lost: Callable[[], None]) -> None:
        super().__init__(cast("web.Server", connections.runner.server), connections)
        self._on_lost = on_lost

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._on_lost()


async def _wait_until_readable(loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
    """Return once a client waits to be accepted."""
    readable = asyncio.Event()
    loop.add_reader(listener, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(listener)


def _listen(host: str, port: int, idle_timeout: float) -> list[socket.socket]:
    """Listening sockets, one for each address of `host` that this machine has. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as opened:
        listeners, failure = [], None
        # A name may resolve to one address twice, or to IPv6 where the machine has none.
        for family, address in dict.fromkeys(
            (family, address[:2]) for family, *_, address in found
        ):
            try:
                listener = socket.create_server(address, family=family, backlog=_BACKLOG)
            except OSError as err:
                if err.errno not in _NO_SUCH_ADDRESS:
                    raise
                failure = err
                if err.errno == errno.EADDRNOTAVAIL:
                    _log.warning("not listening on %s: %s", address[0], err.strerror)
            else:
                opened.enter_context(listener)
                _configure(listener, idle_timeout)
                listeners.append(listener)
        if failure is not None and not listeners:
            raise failure
        opened.pop_all()
    return listeners


def _configure(listener: socket.socket, idle_timeout: float) -> None:
    listener.setblocking(False)
    # Connections inherit it: the kernel ends those whose client takes no bytes for so long.
    # Only Linux has it; elsewhere `body_timeout` alone ends them.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(idle_timeout * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _connection_limit(connections: int) -> int:
    """How many connections this process has descriptors for, at most `connections`."""
    hard = raise_descriptor_limit()
    if hard == resource.RLIM_INFINITY:
        return connections
    limit = max(1, (hard - _OTHER_FILES) // _FILES_OF_CONNECTION)
    if limit < connections:
        _log.warning(
            "%d connections at once instead of %d: this process may open only %d files (ulimit -n)",
            *(limit, connections, hard),
        )
    return min(limit, connections)
