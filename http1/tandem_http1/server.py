"""Accepts clients up to a limit and enforces the deadlines of their connections."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, cast

from tandem_contract.connections import Beginning, address_of, to_evict
from tandem_contract.held_bytes import HeldBytes

from .client import ClientConnection, Clients, Handler, Limits
from .reader import HeadCheck

log = logging.getLogger(__name__)

_ACCEPT_BATCH: Final = 64
"""Connections accepted before the event loop runs other callbacks."""
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE: Final = 1.0
"""Seconds without accepting after the system had no descriptor or memory for a connection."""


class Server:
    """The open client connections, and the timer that enforces their deadlines."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        tls: Callable[[], ssl.SSLContext] | None = None,
        held: HeldBytes | None = None,
        check_head: HeadCheck | None = None,
    ) -> None:
        """`tls` returns the context for each new connection; None: plain TCP. `held` counts the
        request bodies; None: without a limit. `check_head`: of each request; None: none."""
        self._tls = tls
        held = held or HeldBytes()
        self.clients = Clients(handler, limits, held, self._removed, check_head)
        self._timer: asyncio.TimerHandle | None = None
        self._sockets: tuple[socket.socket, ...] = ()
        self._accepting = False
        self._adopting: dict[asyncio.Task[None], Beginning] = {}

    def listen(self, sockets: Iterable[socket.socket]) -> None:
        """Accept clients on `sockets`, which are listening; the server owns them from here."""
        self._sockets = tuple(sockets)
        for sock in self._sockets:
            sock.setblocking(False)
        self._accept_on()

    def stop_listening(self) -> None:
        """Stop accepting and close the listening sockets."""
        self._accept_off()
        for sock in self._sockets:
            sock.close()
        self._sockets = ()

    def new_connection(self, peer: str = "") -> asyncio.Protocol:
        """Create a connection's protocol (a protocol factory); `peer`: its client's address."""
        if self._timer is None:
            self._check_deadlines()
        # A cast, as it only looks like an `asyncio.Protocol`.
        return cast(asyncio.Protocol, ClientConnection(self.clients, peer))

    def close(self) -> None:
        """Close every connection once what was written to it is sent."""
        if self._timer is not None:
            self._timer.cancel()
        for client in list(self.clients):
            client.close()

    def close_idle(self) -> None:
        """Close the connections whose clients have sent nothing of a next request."""
        now = asyncio.get_running_loop().time()
        for client in list(self.clients):
            progress = client.without_progress(now)
            if progress is not None and not progress[0]:
                client.close()

    async def closed(self) -> None:
        """Wait until no connection is left."""
        await self.clients.all_closed.wait()

    def _removed(self) -> None:
        """A connection is gone: there is a place."""
        if self._has_capacity():
            self._accept_on()

    def _accept_on(self) -> None:
        if self._accepting:
            return
        self._accepting = bool(self._sockets)
        for sock in self._sockets:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept_off(self) -> None:
        self._accepting = False
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)

    def _has_capacity(self) -> bool:
        return len(self.clients) + len(self._adopting) < self.clients.limits.connections

    def _evict(self) -> bool:
        """Close connections for a client that waits to be accepted; False: none can be."""
        connections: list[ClientConnection | Beginning] = [*self.clients]
        connections += self._adopting.values()
        found = to_evict(connections, asyncio.get_running_loop().time())
        for connection in found:
            connection.evict()
        return bool(found)

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # A bounded batch: a burst of new clients must not stall the streams that are running.
        for number in range(_ACCEPT_BATCH):
            if not self._has_capacity():
                # Only for a client that is known to wait: the first one.
                if number:
                    return
                if not self._evict():
                    self._accept_off()
                    return
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                # The backlog is empty, possibly because another worker took the client: they share
                # the sockets.
                return
            except OSError as err:
                if err.errno not in _OUT_OF_RESOURCES:
                    raise
                log.error("cannot accept clients, retrying in %.3gs: %s", _PAUSE, err.strerror)
                self._accept_off()
                loop.call_later(_PAUSE, self._accept_on)
                return
            # A strong reference: the event loop keeps only a weak one. It also counts towards the
            # limit until the connection is made.
            peer = address_of(address)
            task = loop.create_task(self._adopt(sock, peer))
            self._adopting[task] = Beginning(task, sock, peer, loop.time())
            task.add_done_callback(self._adopted)

    async def _adopt(self, sock: socket.socket, peer: str) -> None:
        loop, limit = asyncio.get_running_loop(), self.clients.limits.request_seconds
        factory = partial(self.new_connection, peer)
        try:
            if self._tls is None:
                await loop.connect_accepted_socket(factory, sock)
                return
            await loop.connect_accepted_socket(
                factory, sock, ssl=self._tls(), ssl_handshake_timeout=limit
            )
        # The client disconnected meanwhile, or did not complete a handshake (ssl.SSLError, too).
        except OSError:
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise

    def _adopted(self, task: asyncio.Task[None]) -> None:
        self._adopting.pop(task, None)

    def _check_deadlines(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        # One pass over all connections is cheaper than a timer for each of them, whose deadline
        # moves with every request.
        for client in [c for c in self.clients if c.deadline < now]:
            client.expire()
        for client in list(self.clients.unsent):
            client.check_unsent(now)
        # Also when it is full: `_accept` closes a connection for a client that waits.
        self._accept_on()
        # Deadlines are late by one interval at most: a second, or a quarter of a short limit.
        interval = min(1.0, self.clients.limits.request_seconds / 4)
        self._timer = loop.call_later(interval, self._check_deadlines)
