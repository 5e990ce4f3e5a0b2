"""What runs, and the drain that lets it finish: refuse new work, wait, then end what is left."""

import asyncio
from typing import Protocol


class Work(Protocol):
    """Something that must end before the process does."""

    def drain_expired(self) -> None:
        """End now, telling the client."""

    def describe(self) -> dict[str, object]:
        """For `/state`: ids, phase and age; never prompt text."""


class Lifecycle:
    """The set of running work and whether more is taken."""

    def __init__(self, drain_timeout: float) -> None:
        self.draining = False
        self.timeout = drain_timeout
        """Of a drain that begins from now on."""
        self.work: set[Work] = set()
        self._emptied = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None

    def enter(self, work: Work) -> None:
        self.work.add(work)

    def leave(self, work: Work) -> None:
        self.work.discard(work)
        if not self.work:
            self._emptied.set()

    def drain(self) -> None:
        """Take no more work; what runs has the drain timeout from the first call on."""
        if self.draining:
            return
        self.draining = True
        self._expiry = asyncio.get_running_loop().call_later(self.timeout, self._expire)

    async def idle(self) -> None:
        """Return when nothing runs, which after `drain` is at the latest when it timed out."""
        while self.work:
            self._emptied.clear()
            await self._emptied.wait()
        if self._expiry is not None:
            self._expiry.cancel()

    def _expire(self) -> None:
        for work in list(self.work):
            work.drain_expired()
