"""Accepts connections and limits their number.

A connection is unidentified until it has sent a valid Hello. At the limit, a new connection
replaces the oldest unidentified one, so that silent connections cannot lock readers out.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from .wire import TransferLimits, prepare

_log = logging.getLogger(__name__)
_ACCEPT_PAUSE = 0.1
"""Seconds before the next attempt when accept fails: the process is out of file descriptors."""


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """One accepted connection. Its socket is non-blocking; the listener closes it after `serve`."""

    sock: socket.socket
    peer: str
    mark_identified: Callable[[], None]
    """To be called once the peer has sent a valid Hello: the connection is not replaced then."""


class Listener:
    """A listening socket. Each connection is handled by `serve` in a task of its own."""

    def __init__(
        self, serve: Callable[[Connection], Coroutine[None, None, None]], limits: TransferLimits
    ) -> None:
        self._serve = serve
        self._limits = limits
        self._sock: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        # In order of arrival: a dict is an ordered set here.
        self._unidentified: dict[asyncio.Task[None], None] = {}

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen. Returns the bound address; raises OSError when it cannot be bound."""
        loop = asyncio.get_running_loop()
        family, kind, protocol, _, address = (
            await loop.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        )[0]
        self._sock = socket.socket(family, kind, protocol)
        try:
            # A restarted engine must be able to bind while old connections are in TIME_WAIT.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(address)
            self._sock.listen(self._limits.connections)
            self._sock.setblocking(False)
        except OSError:
            self._sock.close()
            raise
        # The reference keeps the task alive: the event loop holds tasks weakly.
        self._accepting = asyncio.create_task(self._accept(self._sock))
        bound_host, bound_port = self._sock.getsockname()[:2]
        return bound_host, bound_port

    async def close(self) -> None:
        """Stop listening and end every connection; returns when all are closed."""
        tasks = [*self._connections, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        # Each task closes its socket in `on_end`, so no connection is left after this.
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sock is not None:
            self._sock.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError as err:
                _log.warning("cannot accept a connection: %s", err)
                # The pending connection stays in the backlog, so accept would fail again at once.
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            peer = f"{address[0]}:{address[1]}"
            if not self._make_place():
                _log.warning(
                    "%s: connection refused: %d are open",
                    peer,
                    self._limits.connections,
                )
                sock.close()
                continue
            self._serve_in_task(sock, peer)

    def _make_place(self) -> bool:
        """Whether another connection may be served; ends the oldest unidentified one if needed."""
        if len(self._connections) < self._limits.connections:
            return True
        # Every connection belongs to a reader of this engine: none may be cut off for a new one.
        if not self._unidentified:
            return False
        oldest = next(iter(self._unidentified))
        del self._unidentified[oldest]
        # Its place counts as free now, although its task ends a moment later.
        oldest.cancel()
        return True

    def _serve_in_task(self, sock: socket.socket, peer: str) -> None:
        def mark_identified() -> None:
            self._unidentified.pop(task, None)

        def on_end(_: asyncio.Task[None]) -> None:
            sock.close()
            self._connections.discard(task)
            self._unidentified.pop(task, None)

        # asyncio's sock_* calls need it; `ReadSession` sends through a duplicate with a timeout.
        sock.setblocking(False)
        prepare(sock, self._limits)
        task = asyncio.create_task(self._serve(Connection(sock, peer, mark_identified)))
        self._connections.add(task)
        self._unidentified[task] = None
        task.add_done_callback(on_end)
