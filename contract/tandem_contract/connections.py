"""How a server shares its connections among clients. Every server of Tandem follows this rule.

A server has a bound on its connections. When it is full, a newcomer gets the place of a client that
the server waits for, not the other way round: first of the address that has the most connections,
there first one between two requests, then one whose request is late, and of these the one that has
been without progress for longest. A connection whose request is being served is never closed for
another, nor one whose bytes the server has yet to read.

So one address can take all places only while no other one asks. No address has a bound of its own,
because a gateway, or a node that translates addresses, may be a server's only client.
"""

import asyncio
import fcntl
import resource
import socket
import sys
import termios
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Final, Protocol, TypeVar

LATE_SECONDS: Final = 2.0
"""Seconds without progress of a client, after which a full server may close its connection. Longer:
half-sent requests keep others waiting; shorter: new connections end before their first request."""
_SHARE: Final = 64
"""One in so many connections is closed at once: the search costs time for each connection."""

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 10),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
)
"""Peers may be silent for hours: gateways, and the API server of a watch. TCP notices within 25
seconds that their machine is gone, or that a load balancer or connection tracking has forgotten the
connection. Options that a system lacks are left out."""


class Connection(Protocol):
    """What the rule has to know of a connection."""

    @property
    def peer(self) -> str:
        """The client's address."""

    @property
    def sock(self) -> socket.socket | None:
        """The connection's socket; None: it has no real one."""

    def without_progress(self, now: float) -> tuple[bool, float] | None:
        """Whether a request has begun, and the seconds since the client's last progress with it;
        None: the server works for the client, which waits."""


@dataclass(frozen=True, eq=False)
class Beginning:
    """A connection whose first byte, or TLS handshake, a task waits for."""

    task: asyncio.Task[None]
    sock: socket.socket
    peer: str
    accepted: float
    """The loop's time."""

    def without_progress(self, now: float) -> tuple[bool, float]:
        """See `Connection`."""
        return True, now - self.accepted

    def evict(self) -> None:
        """Close it."""
        self.task.cancel()


AnyConnection = TypeVar("AnyConnection", bound=Connection)


def to_evict(connections: Collection[AnyConnection], now: float) -> list[AnyConnection]:
    """Those that a full server closes for newcomers; `now`: seconds of the connections' clock."""
    counts = Counter(connection.peer for connection in connections)
    waiting = []
    for connection in connections:
        if (progress := connection.without_progress(now)) is not None:
            in_request, seconds = progress
            if seconds >= LATE_SECONDS:
                key = counts[connection.peer], not in_request, seconds
                waiting.append((key, connection))
    waiting.sort(key=itemgetter(0), reverse=True)
    # Asked last, because it is a system call for each.
    late = (connection for _, connection in waiting if not has_unread(connection.sock))
    return list(islice(late, max(1, len(connections) // _SHARE)))


def address_of(peername: object) -> str:
    """The address in a socket's `peername`; empty for a Unix socket."""
    return str(peername[0]) if isinstance(peername, tuple) and peername else ""


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the client has not acknowledged, in the transport and in the kernel.

    The transport's buffer alone is not enough: the kernel asks for more data only when a third of
    its buffer, which may hold megabytes, is free; until then a slow reader looks stalled.
    """
    sock = transport.get_extra_info("socket")
    return transport.get_write_buffer_size() + _bytes_in_kernel(sock, termios.TIOCOUTQ)


def has_unread(sock: socket.socket | None) -> bool:
    """Whether the kernel has bytes that were not read from `sock`, a transport's `socket`."""
    return _bytes_in_kernel(sock, termios.FIONREAD) > 0


def _bytes_in_kernel(sock: socket.socket | None, queue: int) -> int:
    if sock is None or sock.fileno() < 0:
        return 0
    return int.from_bytes(fcntl.ioctl(sock.fileno(), queue, bytes(4)), sys.byteorder)


def keep_alive(sock: socket.socket | None) -> None:
    """Have TCP notice when a silent peer is gone."""
    for level, name, value in _KEEPALIVE:
        if sock is not None and (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(level, option, value)


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns it.

    The usual soft limit of 1024 is meant for programs that use select(); here every client needs up
    to three descriptors.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
