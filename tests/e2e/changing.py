"""Requests while everything changes: a steady load that counts what was not answered."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .client import chat
from .site import prompt, until

CLIENTS = 6


@dataclass
class Load:
    """Clients that send one request after another to `host:port`."""

    address: str
    answered: int = 0
    lost: list[str] = field(default_factory=list)
    """What clients got instead of an answer."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def wait_for(self, answered: int) -> None:
        """Wait for this many answers, or for a request that was lost."""
        until(lambda: bool(self.lost) or self.answered >= answered, f"{answered} answers")

    def client(self) -> None:
        """Send requests until the load stops."""
        while not self._stopped.is_set():
            try:
                answer = chat(self.address, prompt(120), tokens=8)
                loss = "" if answer.status == 200 else f"{answer.status}: {answer.text}"
            except (OSError, http.client.HTTPException) as err:
                loss = repr(err)
            with self._lock:
                self.answered += not loss
                self.lost += [loss] if loss else []

    def stop(self) -> None:
        self._stopped.set()


@contextmanager
def load(address: str, clients: int = CLIENTS) -> Iterator[Load]:
    """The load runs in this block; it has ended after it."""
    running = Load(address)
    threads = [threading.Thread(target=running.client, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield running
    finally:
        running.stop()
        for thread in threads:
            thread.join()
