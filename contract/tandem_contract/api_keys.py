"""API keys of clients: the files of a mounted Secret, each named after a client, with its key.

Envoy compares them itself (`tandem_operator.routing.api_keys`); the router does it by `ApiKeys`.
"""

import hashlib
import logging
from pathlib import Path
from typing import Final

_log: Final = logging.getLogger(__name__)


def read_keys(directory: Path) -> dict[str, str]:
    """Client → key. Files that are empty or no text are reported and left out. Raises OSError for a
    directory or a file that cannot be read."""
    keys = {}
    # The kubelet's own entries begin with dots.
    for file in (file for file in directory.iterdir() if not file.name.startswith(".")):
        try:
            # Tools that write a Secret from a file often leave a line break at its end.
            key = file.read_text(encoding="ascii").strip()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError) as err:
            _log.error("API key of client %s is not used: %s", file.name, err)
            continue
        if key:
            keys[file.name] = key
        else:
            _log.error("API key of client %s is not used: it is empty", file.name)
    return keys


def clients_by_key(key_by_client: dict[str, str]) -> dict[str, str]:
    """Key → client. Of clients with equal keys the first by name counts."""
    clients: dict[str, str] = {}
    for client, key in sorted(key_by_client.items()):
        clients.setdefault(key, client)
    return clients


class ApiKeys:
    """The keys of a directory; `reload` after it changed."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError for a directory or a file that cannot be read."""
        self.directory = directory
        self._clients = self._read()

    def reload(self) -> None:
        """Use the keys that the directory has now, also none: all clients are refused then. If it,
        or a file in it, cannot be read, the previous keys stay in use."""
        try:
            self._clients = self._read()
        except OSError as err:
            _log.error("API keys not reloaded, the previous keys stay in use: %s", err)
            return
        _log.info("API keys of %d clients", len(self._clients))

    def client_of(self, key: bytes) -> str | None:
        """The client with this key; None: there is none."""
        return self._clients.get(_digest(key))

    def _read(self) -> dict[bytes, str]:
        clients = clients_by_key(read_keys(self.directory))
        return {_digest(key.encode()): client for key, client in clients.items()}


def _digest(key: bytes) -> bytes:
    """What keys are compared by: how long that takes says nothing about a key."""
    return hashlib.sha256(key).digest()
