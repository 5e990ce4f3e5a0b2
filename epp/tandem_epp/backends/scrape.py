"""Ask each backend for its gauges, often while it is busy and seldom while nothing moves.

A metrics page is searched for the few lines that matter and not parsed: it can be tens of
kilobytes, many times a second, from a hundred backends.
"""

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import aiohttp

from tandem_contract import metrics as names
from tandem_contract.commandline import HostPort

from .fleet import Fleet
from .pods import Gauges, Pod, Report

FASTEST: Final = 0.2
"""Seconds between scrapes of a backend whose gauges move or that has requests of ours."""
SLOWEST: Final = 1.0
"""Seconds between scrapes of an idle backend. Also how late a dead idle one is noticed, times
`pods.REFUSALS`."""
_BACK_OFF: Final = 1.5
_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0)
_RESOLVE_SECONDS: Final = 10.0
"""How long a host name's address is believed."""
_METRICS: Final = "/metrics"

_BLOCKS: Final = re.compile(rb'num_gpu_blocks="(\d+)"')
_BLOCK_SIZE: Final = re.compile(rb'block_size="(\d+)"')
_log: Final = logging.getLogger(__name__)


class Scraper:
    """One task per backend, started and ended as the fleet changes."""

    def __init__(self, fleet: Fleet, met: Callable[[Pod], None] = lambda _pod: None) -> None:
        """`met` is told of a pod that answers for the first time, or again, or as another
        process."""
        self._fleet, self._met = fleet, met
        self._tasks: dict[Pod, asyncio.Task[None]] = {}
        self._seen: set[Pod] = set()
        self._complete = False
        self._session: aiohttp.ClientSession | None = None

    @property
    def complete(self) -> bool:
        """Whether there was a moment at which every backend had answered, or failed to, once.

        A backend that comes later does not count: the router does not stop serving for it.
        """
        self._complete = self._complete or (
            self._session is not None and all(pod in self._seen for pod in self._tasks)
        )
        return self._complete

    def follow(self) -> None:
        """Scrape exactly the fleet's serving backends from now on; on the event loop only."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        pods = {pod for pod in self._fleet if pod.serving}
        for pod in self._tasks.keys() - pods:
            self._tasks.pop(pod).cancel()
            self._seen.discard(pod)
        for pod in pods - self._tasks.keys():
            self._tasks[pod] = asyncio.create_task(self._watch(pod, self._session))

    async def close(self) -> None:
        """End every task."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        if self._session is not None:
            await self._session.close()

    async def _watch(self, pod: Pod, session: aiohttp.ClientSession) -> None:
        loop = asyncio.get_running_loop()
        resolved, interval = -_RESOLVE_SECONDS, FASTEST
        named = pod.address is None
        answering: bytes | None = None
        while True:
            if named and loop.time() - resolved >= _RESOLVE_SECONDS and await self._resolve(pod):
                resolved = loop.time()
            moved = await self._scrape(pod, session)
            self._seen.add(pod)
            before, answering = answering, pod.incarnation if pod.healthy else None
            if answering is not None and answering != before:
                self._met(pod)
            # One that is down is asked as often, so that its return is seen at once.
            busy = moved or pod.in_flight > 0 or pod.suspect or not pod.healthy
            interval = FASTEST if busy else min(SLOWEST, interval * _BACK_OFF)
            await asyncio.sleep(interval)

    async def _scrape(self, pod: Pod, session: aiohttp.ClientSession) -> bool:
        """One scrape into the fleet; whether it changed anything."""
        try:
            async with session.get(pod.backend.url.rstrip("/") + _METRICS) as response:
                page = await response.read()
                response.raise_for_status()
        except (aiohttp.ClientError, OSError) as err:
            if moved := pod.unreachable():
                why = str(err) or type(err).__name__
                _log.warning("backend %s is not chosen until it answers: %s", pod.name, why)
        else:
            was_healthy = pod.healthy
            moved = pod.reported(read_page(page))
            if not was_healthy:
                _log.info("backend %s answers again", pod.name)
        if moved:
            self._fleet.changed()
        return moved

    async def _resolve(self, pod: Pod) -> bool:
        host, _, port = pod.backend.address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, int(port), proto=socket.IPPROTO_TCP)
        except OSError as err:
            _log.warning("backend %s: %s does not resolve: %s", pod.name, host, err.strerror)
            return False
        address = str(HostPort(str(found[0][4][0]), int(port)))
        if address != pod.address:
            pod.address = address
            self._fleet.changed()
        return True


def read_page(page: bytes) -> Report:
    """The few figures of a metrics page in Prometheus' text format; absent ones are 0 or None.

    A gauge that stands there more than once (one line per engine) is summed, usage is averaged.
    """
    page = b"\n" + page
    config = next(iter(_lines(page, names.ENGINE_CACHE_CONFIG)), b"")
    started = next(iter(_lines(page, names.PROCESS_START_TIME)), b"")
    usage = _values(page, names.ENGINE_KV_USAGE)
    block_size, blocks = _BLOCK_SIZE.search(config), _BLOCKS.search(config)
    return Report(
        Gauges(
            running=sum(_values(page, names.ENGINE_RUNNING)),
            waiting=sum(_values(page, names.ENGINE_WAITING)),
            kv_usage=sum(usage) / len(usage) if usage else 0.0,
        ),
        incarnation=started + config,
        block_tokens=int(block_size[1]) if block_size else None,
        blocks=int(blocks[1]) if blocks else None,
    )


def _lines(page: bytes, name: str) -> list[bytes]:
    """What follows the metric's name on each of its lines: labels, value."""
    needle = b"\n" + name.encode()
    found = []
    at = page.find(needle)
    while at >= 0:
        start = at + len(needle)
        end = page.find(b"\n", start)
        # A longer name may begin with this one.
        if page[start : start + 1] in (b"{", b" "):
            found.append(page[start : end if end >= 0 else len(page)])
        at = page.find(needle, start)
    return found


def _values(page: bytes, name: str) -> list[float]:
    values = []
    for line in _lines(page, name):
        with suppress(ValueError, IndexError):
            values.append(float(line[line.rfind(b"}") + 1 :].split()[0]))
    return values
