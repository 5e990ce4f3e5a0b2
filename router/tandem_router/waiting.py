"""Requests that no backend can serve now wait for one, if the set resumes streams.

    waiting = WaitingRequest(waiter, WaitingRequests(lifecycle))    the client's active request

An engine that died is started again, or serves already and has not yet passed a check. So a request
ends with an error only after WAIT_SECONDS without any backend.
"""

import asyncio
from typing import Final, Protocol

from tandem_contract.commandline import HostPort
from tandem_sidecar.handoff.context import Lifecycle

WAIT_SECONDS: Final = 10.0
"""For how long a request waits. Shorter than a few checks: a backend that is back is not found.
Longer: a client learns late that no backend serves, and cannot go elsewhere."""
TICK: Final = 0.05
"""Seconds between two looks at whether a backend is there, while a request waits."""


class Waiter(Protocol):
    """What waits."""

    def try_start(self) -> bool:
        """Send the request to a backend; returns whether there is one."""

    def give_up(self) -> None:
        """Answer with an error: there was none in time."""

    def abandon(self) -> None:
        """The client left: end, and write nothing."""

    def describe(self) -> dict[str, object]:
        """As of `handoff.context.Work`."""


class WaitingRequests:
    """All that wait in a process."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.loop = asyncio.get_running_loop()
        self._waiting: set[WaitingRequest] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, waiting: "WaitingRequest") -> None:
        self._waiting.add(waiting)
        self.lifecycle.add(waiting)
        if self._timer is None:
            self._timer = self.loop.call_later(TICK, self._look)

    def remove(self, waiting: "WaitingRequest") -> None:
        self._waiting.discard(waiting)
        self.lifecycle.remove(waiting)

    def _look(self) -> None:
        # The timer runs only while something waits.
        self._timer = self.loop.call_later(TICK, self._look) if self._waiting else None
        for waiting in self._waiting:
            # Each by itself: a bug that one meets keeps no other from going on.
            self.loop.call_soon(waiting.look)


class WaitingRequest:
    """One of them, as its client's active request and as work that a drain waits for."""

    survives_half_close = False

    def __init__(self, waiter: Waiter, requests: WaitingRequests) -> None:
        self._waiter, self._requests = waiter, requests
        self._ends = requests.loop.time() + WAIT_SECONDS
        self._has_ended = False
        requests.add(self)

    def look(self) -> None:
        """Start the request if a backend is there; end it if there was none for too long."""
        if self._has_ended:
            return
        if self._waiter.try_start():
            self._end()
        elif self._requests.loop.time() >= self._ends:
            self.drain_expired()

    def client_disconnected(self) -> None:
        self._end()
        self._waiter.abandon()

    def pause_sending(self) -> None:
        """Nothing is sent; `ClientConnection.continue_with` tells the request that follows."""

    def resume_sending(self) -> None:
        """As above."""

    def drain_expired(self) -> None:
        self._end()
        self._waiter.give_up()

    def engine_drains(self, engine: HostPort | None) -> None:
        """It is at no engine."""

    def describe(self) -> dict[str, object]:
        return self._waiter.describe()

    def _end(self) -> None:
        self._has_ended = True
        self._requests.remove(self)
