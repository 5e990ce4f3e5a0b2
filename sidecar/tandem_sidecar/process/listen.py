"""Listening sockets, bound before anything else starts, and those that a worker inherits.

Errors: `CannotListen`: a port is in use or an address is not one of this machine.
"""

import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort

BACKLOG: Final = 1024
"""Connections that the kernel queues until they are accepted."""


EVERY_ADDRESS: Final = "*"
"""Host for all addresses of the machine, of IPv4 and IPv6."""


class CannotListen(OSError):
    """The message names the flag, the address and the reason."""


@dataclass(frozen=True, slots=True)
class WorkerSockets:
    """The sockets that a worker inherits from its supervisor, as file descriptors."""

    number: int
    """The worker's number, from 0."""
    clients: tuple[int, ...]
    """Listening sockets for clients; all workers accept from the same ones."""
    admin: int
    """The Unix socket on which this worker answers its supervisor's admin requests."""

    def __str__(self) -> str:
        """The value of `--worker-sockets`, which `parse` reads."""
        return f"{self.number}:{','.join(map(str, self.clients))}:{self.admin}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises ValueError."""
        number, clients, admin = text.split(":")
        return cls(int(number), tuple(int(c) for c in clients.split(",")), int(admin))


def listen(address: HostPort, flag: str) -> list[socket.socket]:
    """Listening sockets, one for each IP address that the host of `flag` resolves to.

    Raises CannotListen, with none left open.
    """
    try:
        hosts = _every_host() if address.host == EVERY_ADDRESS else [address.host]
        resolved = [
            info
            for host in hosts
            for info in socket.getaddrinfo(
                host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        ]
        with ExitStack() as opened:
            sockets = [opened.enter_context(_listening_socket(*info)) for info in resolved]
            opened.pop_all()  # all are bound: keep them open
            return sockets
    except OSError as err:
        # Errors of name resolution have their own codes, which `os.strerror` does not know.
        lookup = isinstance(err, socket.gaierror) or err.errno is None
        reason = str(err.strerror or err) if lookup else os.strerror(err.errno or 0)
        raise CannotListen(f"{flag} {address}: cannot listen there: {reason.lower()}") from err


def listen_for_clients(address: HostPort, ranks: int) -> list[socket.socket]:
    """Listening sockets on `ranks` ports from that of `address` on. Raises CannotListen."""
    with ExitStack() as opened:
        sockets = []
        for rank in range(ranks):
            for listener in listen(HostPort(address.host, address.port + rank), "--listen"):
                sockets.append(opened.enter_context(listener))
        opened.pop_all()
        return sockets


def listen_for_admin(address: HostPort) -> list[socket.socket]:
    """Listening sockets of the admin port, and on Linux the Unix socket on which a drain is asked
    for (`endpoints.DRAIN_SOCKET`), last. Raises CannotListen, with none left open."""
    sockets = listen(address, "--admin")
    if sys.platform == "linux":  # the abstract namespace is Linux's
        bound = bound_address(address, sockets)
        try:
            name = endpoints.DRAIN_SOCKET.format(host=bound.host, port=bound.port)
            sockets.append(_listen_abstract(name))
        except OSError as err:
            for listener in sockets:
                listener.close()
            raise CannotListen(
                f"--admin {bound}: another process has its socket for drains"
            ) from err
    return sockets


def _every_host() -> list[str]:
    """The unspecified addresses of the families that the kernel has an address of."""
    addresses = Path("/proc/net/if_inet6")
    has_ipv6 = addresses.exists() and addresses.read_bytes() != b""
    return ["0.0.0.0", *(["::"] if has_ipv6 else [])]


def listen_for_supervisor() -> socket.socket:
    """The Unix socket on which a worker answers its supervisor. Raises OSError."""
    return _listen_abstract(f"tandem-sidecar-{secrets.token_hex(8)}")


def _listen_abstract(name: str) -> socket.socket:
    """A listening Unix socket in Linux's abstract namespace: it has no file to clean up. Raises
    OSError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def bound_address(address: HostPort, sockets: Sequence[socket.socket]) -> HostPort:
    """`address` with the port that was bound, which differs when port 0 was asked for."""
    name = sockets[0].getsockname()
    return HostPort(address.host, name[1]) if isinstance(name, tuple) else address


def _listening_socket(
    family: int, kind: int, protocol: int, _name: str, address: tuple[object, ...]
) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        # Connections in TIME_WAIT must not keep a restarted sidecar from its port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # The IPv4 address has a socket of its own; a dual-stack one would take its port.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
