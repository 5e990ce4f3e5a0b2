"""Ports for processes that are about to start.

A port that the kernel picks may be taken again, by another program or by an outgoing connection,
before the process that is meant to listen there has started. These ports lie below those of
outgoing connections, and every program takes them from a block that it has locked.
"""

import fcntl
import os
import random
import socket
import tempfile
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Final

from .errors import SetupError

_FIRST: Final = 25_000
"""Above the ports of the etcd of `make cluster-up`."""
_BLOCK: Final = 200
"""Ports in a block."""
_BLOCKS: Final = 24
"""Up to port 29,799: node ports of Kubernetes begin at 30,000, ports of outgoing connections at
32,768 (Linux) or 49,152 (macOS)."""


class PortBlock:
    """A block of ports that no other program takes from, until `close` or this process's end."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds one lock file per block. Raises SetupError when all blocks are locked."""
        self._first, self._lock = _lock_block(folder)
        self._next = 0

    def take(self, host: str) -> int:
        """A port of `host` on which nothing listens; it recurs only after all others of the block.
        Raises SetupError when there is none."""
        for _ in range(_BLOCK):
            port = self._first + self._next
            self._next = (self._next + 1) % _BLOCK
            with closing(socket.socket()) as sock, suppress(OSError):
                sock.bind((host, port))
                return port
        last = self._first + _BLOCK - 1
        raise SetupError(f"no free port on {host} between {self._first} and {last}: end a process")

    def close(self) -> None:
        """Leave the block to other programs."""
        os.close(self._lock)


def free_port(host: str) -> int:
    """A port of `host` on which nothing listens, from this program's block. Raises SetupError when
    there is none."""
    return _own_block().take(host)


@cache
def _own_block() -> PortBlock:
    return PortBlock(Path(tempfile.gettempdir(), f"tandem-ports-{os.getuid()}"))


def _lock_block(folder: Path) -> tuple[int, int]:
    """The first port of a block that was not locked, and the descriptor that holds its lock."""
    folder.mkdir(mode=0o700, exist_ok=True)
    # In a random order: other users have other folders, so only chance keeps them apart.
    for number in random.sample(range(_BLOCKS), _BLOCKS):
        lock = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return _FIRST + number * _BLOCK, lock
    raise SetupError(f"{_BLOCKS} programs have locked all ports in {folder}: end one of them")
