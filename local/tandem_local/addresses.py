"""One address of 127.0.0.0/8 for each pod, so that every pod keeps its standard ports.

Linux routes the whole block to the loopback interface; other systems configure 127.0.0.1 alone.
"""

import errno
import hashlib
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Final

from .errors import SetupError

PLACEHOLDER: Final = "127.0.0.1"
"""Used for a pod's address while its JSON is checked, before it has an address."""
_ATTEMPTS: Final = 16
"""Networks tried before giving up; each other stack on the machine occupies one."""
_MAX_PODS: Final = 250


def allocate(pods: Mapping[str, Sequence[int]], seed: str) -> dict[str, str]:
    """Pod name → address. `pods` gives the ports that each pod will listen on.

    The same names and seed give the same addresses, unless another process uses one of the ports.
    Raises SetupError if the machine has no such addresses, or none with these ports free.
    """
    if len(pods) > _MAX_PODS:
        raise SetupError(f"{len(pods)} pods: one machine runs up to {_MAX_PODS}")
    for attempt in range(_ATTEMPTS):
        network = _network(f"{seed}#{attempt}")
        candidates = {name: f"{network}.{i}" for i, name in enumerate(sorted(pods), start=1)}
        if all(_is_free(candidates[name], ports) for name, ports in pods.items()):
            return candidates
    raise SetupError(
        f"no free addresses in 127.0.0.0/8 after {_ATTEMPTS} attempts: other processes listen on "
        "the pods' ports; stop them"
    )


def is_free(host: str, port: int) -> bool:
    """Whether this process could listen on `host:port` now."""
    return _is_free(host, (port,))


def _network(seed: str) -> str:
    digest = hashlib.sha256(seed.encode()).digest()
    # Never 127.0.x.y: that network holds 127.0.0.1 and the local resolvers of many systems.
    return f"127.{1 + digest[0] % 254}.{digest[1]}"


def _is_free(address: str, ports: Iterable[int]) -> bool:
    # Port 0 first: it fails exactly when the machine does not have the address at all.
    for port in (0, *ports):
        with closing(socket.socket()) as sock:
            # Connections of the previous run in TIME_WAIT must not make a port count as used.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((address, port))
            except OSError as err:
                if err.errno == errno.EADDRNOTAVAIL:
                    raise SetupError(_no_such_address(address)) from err
                if err.errno in (errno.EADDRINUSE, errno.EACCES):
                    return False
                raise
    return True


def _no_such_address(address: str) -> str:
    system = os.uname().sysname
    return (
        f"{system} cannot listen on {address}: every pod needs its own address in 127.0.0.0/8. "
        f"Linux has them all; on macOS add each: sudo ifconfig lo0 alias {address} up"
    )
