"""Scrapes each backend's metrics: often while it is busy, seldom while nothing changes."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import aiohttp

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort

from .fleet import Fleet
from .page_reader import PageReader
from .pods import Pod

MIN_INTERVAL: Final = 0.2
"""Seconds between scrapes of a backend whose gauges change or that has requests of this EPP."""
MAX_INTERVAL: Final = 1.0
"""Seconds between scrapes of an idle backend. Times `pods.FAILURE_THRESHOLD`, it is also how late
the death of an idle backend is noticed."""
_BACK_OFF: Final = 1.5
"""Factor by which the interval of an idle backend grows per scrape."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0)
_DNS_SECONDS: Final = 10.0
"""Seconds for which a host name's address is used before it is resolved again."""

_log: Final = logging.getLogger(__name__)


class Scraper:
    """Runs one task per serving backend, started and cancelled as the fleet changes."""

    def __init__(self, fleet: Fleet, on_backend_up: Callable[[Pod], None] = lambda _: None) -> None:
        """`on_backend_up` is called with a pod that answers for the first time, answers again
        after it was unhealthy, or answers as another process."""
        self._fleet, self._on_backend_up = fleet, on_backend_up
        self._tasks: dict[Pod, asyncio.Task[None]] = {}
        self._attempted: set[Pod] = set()
        """Pods with at least one finished scrape, successful or not."""
        self._is_complete = False
        self._session: aiohttp.ClientSession | None = None

    @property
    def is_complete(self) -> bool:
        """Whether, at some moment, every backend had finished a first scrape or failed it.

        Stays True afterwards: a backend that is added later does not make the picker unready.
        """
        self._is_complete = self._is_complete or (
            # Without a session `sync` has not run yet, and `all` of no tasks would be true.
            self._session is not None and all(pod in self._attempted for pod in self._tasks)
        )
        return self._is_complete

    def sync(self) -> None:
        """Start and cancel tasks so that exactly the fleet's serving backends are scraped; to be
        called on the event loop."""
        # Created here, because a ClientSession needs the running event loop.
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        pods = {pod for pod in self._fleet if pod.serving}
        # A cancelled task need not be awaited: it changes only its own Pod, which is not chosen.
        for pod in self._tasks.keys() - pods:
            self._tasks.pop(pod).cancel()
            self._attempted.discard(pod)
        for pod in pods - self._tasks.keys():
            self._tasks[pod] = asyncio.create_task(self._scrape_repeatedly(pod, self._session))

    async def close(self) -> None:
        """Cancel every task and wait for its end."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        if self._session is not None:
            await self._session.close()

    async def _scrape_repeatedly(self, pod: Pod, session: aiohttp.ClientSession) -> None:
        loop = asyncio.get_running_loop()
        resolved_at, interval = -_DNS_SECONDS, MIN_INTERVAL
        has_host_name = pod.address is None
        # The process that answered the last scrape; None while the pod is unhealthy.
        process: bytes | None = None
        reader = PageReader()
        while True:
            is_stale = has_host_name and loop.time() - resolved_at >= _DNS_SECONDS
            # After a failed lookup `resolved_at` stays, so the next round tries again.
            if is_stale and await self._resolve(pod):
                resolved_at = loop.time()
            changed = await self._scrape(pod, reader, session)
            self._attempted.add(pod)
            # Called after the scrape is applied: the callback sees the new process.
            previous, process = process, pod.incarnation if pod.healthy else None
            if process is not None and process != previous:
                self._on_backend_up(pod)
            # An unhealthy backend is scraped as often as a busy one, to notice its return early.
            busy = changed or pod.in_flight > 0 or not pod.health.is_available or not pod.healthy
            interval = MIN_INTERVAL if busy else min(MAX_INTERVAL, interval * _BACK_OFF)
            await asyncio.sleep(interval)

    async def _scrape(self, pod: Pod, reader: PageReader, session: aiohttp.ClientSession) -> bool:
        """Scrape once into `pod`; returns whether anything changed that scorers see."""
        readiness = (pod.healthy, pod.health.is_available)
        try:
            async with session.get(pod.backend.url.rstrip("/") + endpoints.METRICS) as response:
                page = await response.read()
                response.raise_for_status()
        # A timeout is an OSError, too (TimeoutError).
        except (aiohttp.ClientError, OSError) as err:
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
            was_healthy = pod.healthy
            changed = pod.apply_scrape(reader.read(page).total)
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
