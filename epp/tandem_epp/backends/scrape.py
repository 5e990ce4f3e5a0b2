"""Scrapes each backend's metrics: often while it is busy, seldom while nothing changes.

A metrics page is searched for the few lines that matter and not parsed as a whole: it can have tens
of kilobytes, and a hundred backends send several per second each.
"""

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import aiohttp

from tandem_contract import endpoints
from tandem_contract import metrics as names
from tandem_contract.commandline import HostPort

from .fleet import Fleet
from .pods import Gauges, Pod, ScrapeResult

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

_BLOCKS: Final = re.compile(rb'num_gpu_blocks="(\d+)"')
_BLOCK_SIZE: Final = re.compile(rb'block_size="(\d+)"')
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
        while True:
            is_stale = has_host_name and loop.time() - resolved_at >= _DNS_SECONDS
            # After a failed lookup `resolved_at` stays, so the next round tries again.
            if is_stale and await self._resolve(pod):
                resolved_at = loop.time()
            changed = await self._scrape(pod, session)
            self._attempted.add(pod)
            # Called after the scrape is applied: the callback sees the new process.
            previous, process = process, pod.incarnation if pod.healthy else None
            if process is not None and process != previous:
                self._on_backend_up(pod)
            # An unhealthy backend is scraped as often as a busy one, to notice its return early.
            busy = changed or pod.in_flight > 0 or pod.suspect or not pod.healthy
            interval = MIN_INTERVAL if busy else min(MAX_INTERVAL, interval * _BACK_OFF)
            await asyncio.sleep(interval)

    async def _scrape(self, pod: Pod, session: aiohttp.ClientSession) -> bool:
        """Scrape once into `pod`; returns whether anything changed that scorers see."""
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
            changed = pod.apply_scrape(read_page(page))
            if not was_healthy:
                _log.info("backend %s is healthy again", pod.name)
        if changed:
            self._fleet.invalidate_views()
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


def read_page(page: bytes) -> ScrapeResult:
    """The few figures needed of a page in Prometheus' text format; missing ones are 0 or None.

    A gauge with several lines (one per engine of the process) is summed; KV usage is averaged.
    """
    # A newline in front, so that every metric's line starts after one, the first too.
    page = b"\n" + page
    config = next(iter(_samples(page, names.ENGINE_CACHE_CONFIG)), b"")
    start_time = next(iter(_samples(page, names.PROCESS_START_TIME)), b"")
    usage = _values(page, names.ENGINE_KV_USAGE)
    block_size, blocks = _BLOCK_SIZE.search(config), _BLOCKS.search(config)
    return ScrapeResult(
        Gauges(
            running=sum(_values(page, names.ENGINE_RUNNING)),
            waiting=sum(_values(page, names.ENGINE_WAITING)),
            kv_usage=sum(usage) / len(usage) if usage else 0.0,
        ),
        incarnation=start_time + config,
        block_tokens=int(block_size[1]) if block_size else None,
        blocks=int(blocks[1]) if blocks else None,
    )


def _samples(page: bytes, name: str) -> list[bytes]:
    """Labels and value, as text, of each line of the metric `name`."""
    needle = b"\n" + name.encode()
    samples = []
    position = page.find(needle)
    while position >= 0:
        start = position + len(needle)
        end = page.find(b"\n", start)
        # A longer metric name may begin with this one: labels or a space must follow.
        if page[start : start + 1] in (b"{", b" "):
            samples.append(page[start : end if end >= 0 else len(page)])
        position = page.find(needle, start)
    return samples


def _values(page: bytes, name: str) -> list[float]:
    values = []
    for sample in _samples(page, name):
        # `{labels} value [timestamp]`; a label's value may hold `}`, so the last one counts.
        with suppress(ValueError, IndexError):
            values.append(float(sample[sample.rfind(b"}") + 1 :].split()[0]))
    return values
