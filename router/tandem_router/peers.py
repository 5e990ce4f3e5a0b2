"""What a worker needs to share with the other workers: their addresses, its socket and their key.

The supervisor binds one loopback port for each worker and makes the key, which lives as long as
the supervisor. A worker that replaces another one inherits the same socket.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Self

from tandem_contract.commandline import HostPort
from tandem_epp.replicas.peers.channel import PeerSettings
from tandem_sidecar.process.listen import listen

KEY_VARIABLE: Final = "TANDEM_ROUTER_WORKER_KEY"
"""Environment variable with the key in hexadecimal, set by the supervisor, read by its workers."""
_KEY_NAME: Final = "workers"
_LOOPBACK: Final = HostPort("127.0.0.1", 0)


@dataclass(frozen=True)
class WorkerPeers:
    """How a worker talks to the others."""

    settings: PeerSettings
    keys: dict[str, bytes]

    @classmethod
    def inherited(cls, number: int, descriptors: Sequence[int]) -> Self:
        """Those of worker `number`; `descriptors` are the listening sockets of all workers."""
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        addresses = tuple(HostPort(*listener.getsockname()) for listener in sockets)
        for other in sockets[:number] + sockets[number + 1 :]:
            # Else connections to a worker that has exited would be accepted here.
            other.close()
        # The requests of a worker that is gone are gone, too: its connections were theirs.
        settings = PeerSettings(peers=addresses, inherited=sockets[number], grace=0.0)
        return cls(settings, {_KEY_NAME: bytes.fromhex(os.environ[KEY_VARIABLE])})


def bind(workers: int, stack: ExitStack) -> list[socket.socket]:
    """A listening socket for each worker, on loopback; `stack` closes them. Raises CannotListen."""
    listeners = [listen(_LOOPBACK, "a worker's port")[0] for _ in range(workers)]
    for listener in listeners:
        stack.callback(listener.close)
    return listeners
