"""Limits the time of KV transfers: finds decode legs whose KV is known not to have arrived.

    monitor.watch(engine, leg, timeout)    # the leg was sent and is to read KV
    monitor.unwatch(engine, leg)           # its first token came, or it ended

To a proxy a slow transfer looks like a long queue. vLLM 0.32 and the reference engine tell how many
requests have KV that is being loaded, but not which. If they are at least as many as the legs that
this sidecar has waiting there, all of these are being loaded, because only this sidecar sends the
engine such legs. A leg that was loading at each check for `timeout` seconds is given up; a check
that does not tell begins its time anew. So a leg that waits for its turn, or computes, goes on.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from tandem_contract import metrics
from tandem_contract.commandline import HostPort

CHECK_SECONDS: Final = 1.0
"""Seconds between two looks at the engine's metrics while legs wait. A transfer is given up at most
two of them, and the answer to the second look, late."""

_LOADING: Final = re.compile(
    rf'\n{metrics.ENGINE_KV_FETCH}{{[^}}]*stage="{metrics.KV_FETCH_LOADING}"[^}}]*}} (\S+)'.encode()
)

FetchPage = Callable[[HostPort], Awaitable[bytes | None]]
"""The metrics page of an engine; None: it did not answer in time."""


class WaitingLeg(Protocol):
    """A decode leg that reads KV and has no first token yet."""

    def kv_did_not_arrive(self, seconds: float) -> None:
        """Its KV was still being loaded after `seconds`. The leg is in flight: abort it."""


@dataclass(slots=True)
class _Wait:
    timeout: float
    loading_since: float | None = None
    """When it was first known to be loading, of an unbroken row of checks."""


class TransferMonitor:
    """Looks at the metrics of engines on which legs wait for KV."""

    def __init__(self, fetch_page: FetchPage | None, seconds: float = CHECK_SECONDS) -> None:
        """`fetch_page`: None if other processes send the engines such legs, too; then no leg is
        given up. `seconds`: between two checks."""
        self._fetch_page = fetch_page
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waits: dict[HostPort, dict[WaitingLeg, _Wait]] = {}
        self._joined: dict[HostPort, int] = {}
        """Engine whose page is being fetched → legs that came since."""
        self._timers: dict[HostPort, asyncio.TimerHandle] = {}
        self._checks: set[asyncio.Task[None]] = set()

    def watch(self, engine: HostPort, leg: WaitingLeg, timeout: float) -> None:
        """Limit the transfer of `leg`, which was sent to `engine`, to `timeout` seconds."""
        if self._fetch_page is None:
            return
        self._waits.setdefault(engine, {})[leg] = _Wait(timeout)
        if engine in self._joined:
            self._joined[engine] += 1
        elif engine not in self._timers:
            self._schedule(engine)

    def unwatch(self, engine: HostPort, leg: WaitingLeg) -> None:
        """The leg waits no longer."""
        if (waits := self._waits.get(engine)) is not None:
            waits.pop(leg, None)

    def close(self) -> None:
        """Stop."""
        for timer in self._timers.values():
            timer.cancel()
        for check in self._checks:
            check.cancel()
        self._waits.clear()

    def _schedule(self, engine: HostPort) -> None:
        self._timers[engine] = self._loop.call_later(self._seconds, self._begin_check, engine)

    def _begin_check(self, engine: HostPort) -> None:
        del self._timers[engine]
        # Most legs are answered before the first check: then the engine is not asked.
        if not self._waits[engine]:
            del self._waits[engine]
            return
        if self._fetch_page is None:
            return
        check = self._loop.create_task(self._check(engine, self._fetch_page))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)

    async def _check(self, engine: HostPort, fetch_page: FetchPage) -> None:
        began, waits = self._loop.time(), self._waits[engine]
        asked_for = set(waits)
        self._joined[engine] = 0
        page = await fetch_page(engine)
        # The page may count each leg that waited at any time between question and answer.
        most = len(asked_for) + self._joined.pop(engine)
        are_loading = (loading := _loading(page)) is not None and loading >= most
        now = self._loop.time()
        self._schedule(engine)
        for leg in asked_for:
            # Ending one leg may end another.
            if (wait := waits.get(leg)) is None:
                continue
            if not are_loading:
                wait.loading_since = None
            elif wait.loading_since is None:
                wait.loading_since = now
            elif began - wait.loading_since >= wait.timeout:
                del waits[leg]
                leg.kv_did_not_arrive(wait.timeout)


def _loading(page: bytes | None) -> float | None:
    """Requests whose KV the engine is loading, over all its ranks; None: it does not tell."""
    counts = _LOADING.findall(b"\n" + page) if page is not None else []
    return sum(map(float, counts)) if counts else None
