"""Sockets that listen, bound before anything else starts.

Errors: `CannotListen`: a port is taken or an address is not this machine's.
"""

import os
import resource
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from tandem_contract.commandline import HostPort

BACKLOG: Final = 1024
"""Connections the kernel holds until they are accepted."""


class CannotListen(OSError):
    """The message says where and why."""


def allow_descriptors() -> None:
    """Have as many connections as the system lets us: what shells and containers start with is
    meant for programs that use select, and each client takes up to three."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(address: HostPort, flag: str) -> list[socket.socket]:
    """Listening sockets, one for each address that the host of `flag` stands for.

    Raises CannotListen, with none left open.
    """
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with ExitStack() as opened:
            listening = [opened.enter_context(_listening(*info)) for info in found]
            opened.pop_all()
            return listening
    except OSError as err:
        lookup = isinstance(err, socket.gaierror) or err.errno is None
        reason = str(err.strerror or err) if lookup else os.strerror(err.errno or 0)
        raise CannotListen(f"{flag} {address}: cannot listen there: {reason.lower()}") from err


def listen_privately() -> socket.socket:
    """A listening Unix socket without a file: its name is Linux's abstract kind."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0tandem-sidecar-{secrets.token_hex(8)}")
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def bound(address: HostPort, listening: Sequence[socket.socket]) -> HostPort:
    """`address` with the port bound, should 0 have been asked."""
    name = listening[0].getsockname()
    return HostPort(address.host, name[1]) if isinstance(name, tuple) else address


def _listening(
    family: int, kind: int, protocol: int, _name: str, address: tuple[object, ...]
) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
