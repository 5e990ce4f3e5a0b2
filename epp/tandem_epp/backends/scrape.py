"""Scrapes each backend's metrics: often while it is busy, seldom while nothing changes (`pace`).

One task starts the scrapes that are due, TICK seconds apart, so a backend that gets a request is
scraped within TICK although its idle interval has not passed.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Final

import aiohttp

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort

from .fleet import Fleet
from .pace import BUSY_INTERVAL, Allowance, fresh_seconds, next_interval, select_due
from .page_reader import PageReader
from .pods import Pod

TICK: Final = 0.025
"""Seconds between two looks at which scrapes are due."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0)
_DNS_SECONDS: Final = 10.0
"""Seconds for which a host name's address is used before it is resolved again."""
_log: Final = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Target:
    """A backend that is scraped."""

    pod: Pod
    has_host_name: bool
    """Whether its URL names a host and not an IP address."""
    reader: PageReader = field(default_factory=PageReader)
    task: asyncio.Task[None] | None = None
    """The scrape under way."""
    interval: float = BUSY_INTERVAL
    """Seconds from one scrape to the next while the backend is idle."""
    ended_at: float = float("-inf")
    """When the last scrape ended, successful or not, in seconds of the monotonic clock."""
    jitter: float = 1.0
    """Factor of `interval` for this wait: backends that started together drift apart."""
    fresh_until: float = 0.0
    """When the figures of the last successful scrape become stale."""
    failures: int = 0
    """Failed scrapes in a row."""
    resolved_at: float = float("-inf")
    process: bytes | None = None
    """Identity of the process that answered the last scrape; None while it is unhealthy."""

    @property
    def due_at(self) -> float:
        # Requests that came since the last scrape shorten the wait at once.
        is_soon = self.pod.in_flight > 0 and not self.failures
        interval = min(BUSY_INTERVAL, self.interval) if is_soon else self.interval
        return self.ended_at + interval * self.jitter


class Scraper:
    """Scrapes the serving backends of the fleet."""

    def __init__(self, fleet: Fleet, on_backend_up: Callable[[Pod], None] = lambda _: None) -> None:
        """`on_backend_up` is called with a pod that answers for the first time, answers again
        after it was unhealthy, or answers as another process."""
        self._fleet, self._on_backend_up = fleet, on_backend_up
        self._targets: dict[Pod, _Target] = {}
        self._random = Random()
        self._allowance = Allowance(burst=TICK)
        self._is_complete = False
        self._session: aiohttp.ClientSession | None = None
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether, at some moment, every backend had finished a first scrape or failed it.

        Stays True afterwards: a backend that is added later does not make the picker unready.
        """
        self._is_complete = self._is_complete or (
            # Without a session `sync` has not run yet, and `all` of no targets would be true.
            self._session is not None
            and all(target.ended_at >= 0 for target in self._targets.values())
        )
        return self._is_complete

    def sync(self) -> None:
        """Scrape exactly the fleet's serving backends from now on; to be called on the event
        loop."""
        # Created here, because a ClientSession needs the running event loop.
        if self._session is None:
            # No limit of connections: `pace` limits the scrapes, and one that hangs must not hold
            # up the others.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector)
            self._loop_task = asyncio.create_task(self._run(self._session))
        pods = {pod for pod in self._fleet if pod.serving}
        # A cancelled task need not be awaited: it changes only its own Pod, which is not chosen.
        for pod in self._targets.keys() - pods:
            if (task := self._targets.pop(pod).task) is not None:
                task.cancel()
        for pod in pods - self._targets.keys():
            self._targets[pod] = _Target(pod, has_host_name=pod.address is None)

    async def close(self) -> None:
        """Cancel every task and wait for its end."""
        tasks = [self._loop_task, *(target.task for target in self._targets.values())]
        self._targets, self._loop_task = {}, None
        for task in filter(None, tasks):
            task.cancel()
        for task in filter(None, tasks):
            with suppress(asyncio.CancelledError):
                await task
        if self._session is not None:
            await self._session.close()

    async def _run(self, session: aiohttp.ClientSession) -> None:
        while True:
            self._start_due(session, monotonic())
            await asyncio.sleep(TICK)

    def _start_due(self, session: aiohttp.ClientSession, now: float) -> None:
        """Start the scrapes that are due, and fade the figures of those that are late."""
        idle = [target for target in self._targets.values() if target.task is None]
        due = select_due(idle, now, self._allowance.available(now))
        self._allowance.spend(len(due))
        for target in due:
            target.task = asyncio.create_task(self._scrape(target, session))
        self._fade(now)

    def _fade(self, now: float) -> None:
        has_faded = False
        for target in self._targets.values():
            pod = target.pod
            if now > target.fresh_until and pod.healthy and pod.gauges is not None:
                pod.fade(now - target.fresh_until)
                has_faded = True
        if has_faded:
            self._fleet.invalidate_scores()

    async def _scrape(self, target: _Target, session: aiohttp.ClientSession) -> None:
        """Scrape once, and set when to scrape again."""
        pod = target.pod
        try:
            is_outdated = monotonic() - target.resolved_at >= _DNS_SECONDS
            # After a failed lookup `resolved_at` stays, so the next scrape tries again.
            if target.has_host_name and is_outdated and await self._resolve(pod):
                target.resolved_at = monotonic()
            changed = await self._scrape_once(target, session)
        finally:
            target.task = None
            target.ended_at = monotonic()
        is_busy = changed or pod.is_busy or not pod.health.is_available
        target.interval = next_interval(target.interval, is_busy=is_busy, failures=target.failures)
        target.jitter = self._random.uniform(0.9, 1.1)
        if not target.failures:
            # Set only here: after a failure the figures go on fading from where they are.
            target.fresh_until = target.ended_at + fresh_seconds(target.interval)
        # Called after the scrape is applied: the callback sees the new process.
        previous, target.process = target.process, pod.incarnation if pod.healthy else None
        if target.process is not None and target.process != previous:
            self._on_backend_up(pod)

    async def _scrape_once(self, target: _Target, session: aiohttp.ClientSession) -> bool:
        """Scrape into the pod; returns whether anything changed that scorers see."""
        pod = target.pod
        readiness = (pod.healthy, pod.health.is_available)
        try:
            async with session.get(pod.backend.url.rstrip("/") + endpoints.METRICS) as response:
                page = await response.read()
                response.raise_for_status()
        # A timeout is an OSError, too (TimeoutError).
        except (aiohttp.ClientError, OSError) as err:
            target.failures += 1
            if changed := pod.record_scrape_failure():
                why = str(err) or type(err).__name__
                _log.warning(
                    "backend %s is unhealthy and not chosen until a scrape of %s%s succeeds: %s",
                    pod.name,
                    pod.backend.url,
                    endpoints.METRICS,
                    why,
                )
        else:
            target.failures = 0
            was_healthy = pod.healthy
            changed = pod.apply_scrape(target.reader.read(page).total, monotonic())
            if not was_healthy:
                _log.info("backend %s is healthy again", pod.name)
        if readiness != (pod.healthy, pod.health.is_available):
            self._fleet.invalidate_views()
        elif changed:
            self._fleet.invalidate_scores()
        return changed

    async def _resolve(self, pod: Pod) -> bool:
        """Look up the pod's host name; False, with a warning logged, when that fails."""
        host, _, port = pod.backend.address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.getaddrinfo(host, int(port), proto=socket.IPPROTO_TCP)
        except OSError as err:
            _log.warning("backend %s: cannot resolve %s: %s", pod.name, host, err.strerror)
            return False
        address = str(HostPort(str(answers[0][4][0]), int(port)))
        if address != pod.address:
            pod.address = address
            self._fleet.invalidate_views()
        return True
