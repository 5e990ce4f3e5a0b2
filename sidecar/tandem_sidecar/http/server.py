"""The clients' side: accepts no more connections than it may hold, ends the ones that dawdle."""

import asyncio
import errno
import logging
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from .client import Client, Exchange, Switched
from .messages import Request

log = logging.getLogger(__name__)

_AT_ONCE: Final = 64
"""Connections accepted before others get a turn."""
_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE: Final = 1.0
"""Seconds until another try, where the system has no descriptor or memory for a connection."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a client; sizes in bytes, times in seconds."""

    body: int = 32 * 1024 * 1024
    head: int = 64 * 1024
    """Request line and headers."""
    request_seconds: float = 30.0
    """From a request's first byte to the end of its head, and for each 64 KiB of its body: a
    client may be as slow as 2 KiB/s, and no slower."""
    connections: int = 8192
    """Clients connected at once; more wait in the backlog."""
    idle_seconds: float = 3660.0
    """Above Envoy's idle hour: the side that closes last loses no request to a race."""
    stall_seconds: float = 300.0
    """For a client that takes nothing of an answer; then the engine is stopped. Too low: readers
    that stop to think are cut off."""


class Handler(Protocol):
    """Who serves requests."""

    def handle(self, request: Request, client: Client) -> Exchange | None:
        """Serve `request` by `client.write` and one `client.finish`; None: it is done already."""


class Server:
    """Open connections, and the clock that ends the ones that dawdle."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self.handler = handler
        self.limits = limits
        self.clients: set[Client] = set()
        self.unsent: set[Client] = set()
        """Those with more written to them than they took, or closing."""
        self._none = asyncio.Event()
        self._none.set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._sockets: tuple[socket.socket, ...] = ()
        self._accepting = False
        self._adopting: set[asyncio.Task[None]] = set()

    def listen(self, sockets: Iterable[socket.socket]) -> None:
        """Accept clients on `sockets`, which are listening and ours from here."""
        self._sockets = tuple(sockets)
        for sock in self._sockets:
            sock.setblocking(False)
        self._accept_on()

    def stop_listening(self) -> None:
        """Accept no more, and close the sockets."""
        self._accept_off()
        for sock in self._sockets:
            sock.close()
        self._sockets = ()

    def client(self) -> Client:
        """A protocol for a new connection."""
        if self._sweeping is None:
            self._sweep()
        return Client(self)

    def close(self) -> None:
        """Close every connection once what was written to it is sent."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for client in list(self.clients):
            client.close()

    async def closed(self) -> None:
        """Return when no connection is left."""
        await self._none.wait()

    def opened(self, client: Client) -> None:
        self.clients.add(client)
        self._none.clear()

    def lost(self, client: Client) -> None:
        self.clients.discard(client)
        self.unsent.discard(client)
        self._accept_on()
        if not self.clients:
            self._none.set()

    def _accept_on(self) -> None:
        if self._accepting or not self._has_room():
            return
        self._accepting = bool(self._sockets)
        for sock in self._sockets:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept_off(self) -> None:
        self._accepting = False
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)

    def _has_room(self) -> bool:
        return len(self.clients) + len(self._adopting) < self.limits.connections

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_AT_ONCE):
            if not self._has_room():
                self._accept_off()
                return
            try:
                sock, _address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:
                if err.errno not in _SCARCE:
                    raise
                log.error("no client is accepted for %.3gs: %s", _PAUSE, err.strerror)
                self._accept_off()
                loop.call_later(_PAUSE, self._accept_on)
                return
            task = loop.create_task(self._adopt(sock))
            self._adopting.add(task)
            task.add_done_callback(self._adopted)

    async def _adopt(self, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self.client, sock)
        except OSError:  # gone again meanwhile
            sock.close()

    def _adopted(self, task: asyncio.Task[None]) -> None:
        self._adopting.discard(task)
        self._accept_on()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for client in [c for c in self.clients if c.deadline < now]:
            client.expired()
        for client in list(self.unsent):
            client.check_unsent(now)
        self._accept_on()
        interval = min(1.0, self.limits.request_seconds / 4)
        self._sweeping = loop.call_later(interval, self._sweep)


__all__ = ["Client", "Exchange", "Handler", "Limits", "Server", "Switched"]
