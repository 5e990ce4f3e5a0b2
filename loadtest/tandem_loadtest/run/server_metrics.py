"""Reads servers' metrics pages during a run: how far counters rose, and gauges second by second.

Errors: none; a page that cannot be read is in `ServerMetrics.error`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Final, Self

import aiohttp

from tandem_contract.metrics_page import MetricsPage

from ..figures.model import ServerMetrics

INTERVAL: Final = 1.0
"""Seconds between two reads."""
TIMEOUT: Final = 5.0
"""Seconds for the reads before and after the run; those during it get one `INTERVAL`."""


class Increases:
    """How far counters rose over a number of reads; pure.

    A counter that is lower than before was reset by a restart of its server and has risen from 0,
    as Prometheus' `increase()` assumes.
    """

    def __init__(self) -> None:
        self._last: Mapping[str, float] | None = None
        self.totals: dict[str, float] = {}
        """Counter → its increase since the first read; never negative."""

    def add(self, counters: Mapping[str, float]) -> None:
        """Add a read. A counter that appears later than the first read has risen from 0."""
        if self._last is None:
            self.totals = dict.fromkeys(counters, 0.0)
        else:
            for name, value in counters.items():
                before = self._last.get(name, 0.0)
                rise = value - before if value >= before else value
                self.totals[name] = self.totals.get(name, 0.0) + rise
        self._last = {**(self._last or {}), **counters}


class MetricsWatch:
    """Reads the pages of several URLs during one run.

    async with MetricsWatch(urls) as watch:
        watch.start(start)
        …
        metrics = await watch.stop()
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._pages = [_WatchedPage(url) for url in urls]
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Read the pages before the run."""
        self._session = aiohttp.ClientSession()
        await self._read(TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task:
            self._task.cancel()
        await self._session.close()

    def start(self, at: float) -> None:
        """Begin to read every second; `at` is the start of the run on CLOCK_MONOTONIC."""
        self._task = asyncio.create_task(self._watch(at))

    async def stop(self) -> list[ServerMetrics]:
        """Read the pages after the run, and return what all reads gave."""
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._read(TIMEOUT)
        return [page.metrics() for page in self._pages]

    async def _watch(self, start: float) -> None:
        second = 0
        while self._pages:
            await asyncio.sleep(max(0.0, start + second * INTERVAL - monotonic()))
            await self._read(INTERVAL, second)
            # A read that took too long leaves out seconds, which have None.
            second = max(second + 1, int((monotonic() - start) / INTERVAL))

    async def _read(self, timeout: float, second: int | None = None) -> None:
        await asyncio.gather(*(page.read(self._session, timeout, second) for page in self._pages))


class _WatchedPage:
    """What was read of one page."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._increases = Increases()
        self._seconds: list[Mapping[str, float]] = []
        """Gauges, second by second; empty where the page could not be read."""
        self._errors: list[str] = []

    async def read(
        self, session: aiohttp.ClientSession, timeout: float, second: int | None
    ) -> None:
        """Read once; `second` of the run, None before and after it."""
        error = None
        page = MetricsPage()
        try:
            limit = aiohttp.ClientTimeout(total=timeout)
            async with session.get(self._url, timeout=limit) as response:
                text = await response.text()
            if response.status == 200:
                page = MetricsPage.parse(text)
            else:
                error = f"HTTP {response.status}"
        except TimeoutError:
            error = f"no answer within {timeout:g} s"
        except (aiohttp.ClientError, OSError) as err:
            error = str(err) or type(err).__name__
        except ValueError as err:
            error = f"not a metrics page: {err}"
        if error is None:
            self._increases.add(page.counters)
        if second is None:
            self._errors += [error] if error else []
            return
        while len(self._seconds) < second:
            self._seconds.append({})
        self._seconds.append(page.gauges)

    def metrics(self) -> ServerMetrics:
        """What all reads gave."""
        names = sorted({name for gauges in self._seconds for name in gauges})
        return ServerMetrics(
            url=self._url,
            before_after=dict(sorted(self._increases.totals.items())),
            gauges={name: [gauges.get(name) for gauges in self._seconds] for name in names},
            error=self._errors[0] if self._errors else None,
        )
