"""Adds the decode engines' own counters to the process's metrics, each event counted once.

    counters = EngineCounters(fetch_pages, metrics, data_path_counts)
    await counters.refresh()    # before each scrape is answered; `follow` does so every 15 s, too

Two facts are known to both the data path and the engine, and must not be counted twice:

*Transfer times.* An engine that writes `x-tandem-timing` reports the time of each transfer with its
answer, and the observer counts it; the engine's histogram is then ignored. For an engine that does
not (vLLM), the histogram is added instead. The engine's first decode answer shows which of the two
it is; until then the gains of its histogram are kept in `_pending`.

*Failed KV loads.* When a KV load fails, an engine may fail the request, which the data path counts
as an error, or compute the prompt again without telling. The engine's counter includes both. So the
number of errors is the greater of the two counts. A failure that the data path counted and that
the engine's counter lacks at the next refresh will never appear there.

A sidecar has one decode engine, a router several: of those, either all write the header or none.

An engine with several ranks counts each transfer, and each failed one, once per rank. Handshakes
and notifications that fail are among the failed transfers. `nixl_num_kv_expired_reqs` is not read:
it counts, on a producer, KV that no decode engine fetched.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import inf, isfinite
from typing import Final

from tandem_contract import metrics as names
from tandem_contract import vllm_storage
from tandem_contract.commandline import HostPort
from tandem_contract.paths import ErrorPhase

from .metrics import FAILED_LOADS, REPORTS_TIMES, Metrics

REFRESH_SECONDS: Final = 15.0
"""Seconds between refreshes without a scrape. What an engine counts in the last seconds before a
crash, up to this many, is lost."""
FRESH_SECONDS: Final = 1.0
"""A page fetched at most this many seconds ago is used again: several clients may scrape."""

FetchPages = Callable[[], Awaitable[Mapping[HostPort, bytes | None]]]
"""The metrics page of each decode engine, by its address; None: it did not answer in time."""


def _samples(seconds: str, failed: str) -> re.Pattern[bytes]:
    return re.compile(rf"\n({seconds}_bucket|{seconds}_sum|{failed})(?:{{(.*)}})? (\S+)".encode())


_SAMPLES: Final = (
    _samples(names.ENGINE_XFER_SECONDS, names.ENGINE_XFER_FAILED),
    _samples(vllm_storage.TRANSFER_SECONDS, f"{vllm_storage.FAILED_TRANSFERS}_total"),
)
"""Sample lines of interest, of KV from the prefill engine and from storage. Each pattern starts
with a literal, so that searching the whole page takes a tenth of the time of a loop over its
lines."""
_START_TIME: Final = re.compile(rf"\n{names.PROCESS_START_TIME} (\S+)".encode())
_BUCKET_BOUND: Final = re.compile(rb'le="(\d+(?:\.\d+)?(?:e[+-]?\d+)?|\+Inf)"')


@dataclass(frozen=True, slots=True)
class EngineReadings:
    """The counters on one metrics page of an engine, summed over its ranks."""

    started: float | None = None
    """Start of the engine's process in Unix seconds; None: the page does not contain it."""
    failed: float = 0.0
    """KV transfers that failed."""
    seconds: float = 0.0
    """Sum of the durations of all KV transfers."""
    buckets: Mapping[float, float] = field(default_factory=dict)
    """Upper bound in seconds → number of transfers that took at most that long."""

    def since(self, previous: "EngineReadings") -> "EngineReadings":
        """The gain since `previous`; all of `self` if the engine was restarted in between."""
        if self.started != previous.started or self._is_below(previous):
            return self
        return EngineReadings(
            self.started,
            self.failed - previous.failed,
            self.seconds - previous.seconds,
            {bound: n - previous.buckets.get(bound, 0.0) for bound, n in self.buckets.items()},
        )

    def _is_below(self, previous: "EngineReadings") -> bool:
        """Whether any counter fell: a restart, where the page has no start time."""
        return (
            self.failed < previous.failed
            or self.seconds < previous.seconds
            or any(self.buckets.get(bound, 0.0) < n for bound, n in previous.buckets.items())
        )


def parse_readings(page: bytes) -> EngineReadings:
    """The counters on an engine's metrics page; a missing or non-finite one is zero."""
    # The patterns begin with a line end, so that a metric's name matches only at a line's start.
    page = b"\n" + page
    started = _START_TIME.search(page)
    failed = seconds = 0.0
    buckets: dict[float, float] = {}
    for match in chain.from_iterable(pattern.finditer(page) for pattern in _SAMPLES):
        name, value = match[1].decode(), _finite(match[3])
        if name.endswith("_total"):
            failed += value
        elif name.endswith("_sum"):
            seconds += value
        elif bound := _BUCKET_BOUND.search(match[2] or b""):
            key = float(bound[1])
            buckets[key] = buckets.get(key, 0.0) + value
    return EngineReadings(_finite(started[1]) if started else None, failed, seconds, buckets)


@dataclass(frozen=True, slots=True)
class DataPathCounts:
    """The data path's own counts for the same engine."""

    failed_loads: float
    """Failed KV loads that became an error answer, already in the metrics."""
    reports_times: bool | None
    """Whether the engine's answers carry transfer times; None: it has not answered yet."""

    @classmethod
    def of_process(cls, metrics: Metrics) -> "DataPathCounts":
        """The counts of this process."""
        return cls(metrics.failed_loads.value, metrics.engine_reports_times)

    @classmethod
    def of_samples(cls, samples: Iterable[tuple[str, float]]) -> "DataPathCounts":
        """The counts of several workers, from the samples of their metrics pages."""
        failed, reports = 0.0, None
        for name, value in samples:
            if name == FAILED_LOADS:
                failed += value
            elif name == REPORTS_TIMES:
                reports = bool(value) or bool(reports)
        return cls(failed, reports)


class EngineCounters:
    """Fetches the engines' counters and adds their gains to `metrics`."""

    def __init__(
        self,
        fetch_pages: FetchPages,
        metrics: Metrics,
        data_path: Callable[[], DataPathCounts],
        *,
        fresh: float = FRESH_SECONDS,
    ) -> None:
        """`data_path`: what this process counted of all these engines."""
        self._fetch_pages = fetch_pages
        self._metrics = metrics
        self._data_path = data_path
        self._fresh = fresh
        self._created = time.time()
        self._lock = asyncio.Lock()
        """Held during a fetch, so that scrapes at the same time fetch each page once."""
        self._fetched = -inf
        """Loop time of the last fetch."""
        self._previous: dict[HostPort, EngineReadings] = {}
        self._engine_failed = 0.0
        """Failed loads by the engines' count, across their restarts."""
        self._data_path_failed = 0.0
        """Failed loads by the data path's count, when all engines answered last."""
        self._added_errors = 0.0
        """Errors that are in the metrics only because an engine counted them."""
        self._pending: list[EngineReadings] = []
        """Histogram gains since it is unknown whether the answers report transfer times."""

    async def follow(self) -> None:
        """Refresh every `REFRESH_SECONDS`, forever."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_SECONDS)

    async def refresh(self) -> None:
        """Bring the metrics up to date, from pages at most `fresh` seconds old."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._fetched >= self._fresh:
                # Before the fetch: an engine that does not answer is not asked again by every
                # scrape.
                self._fetched = now
                self._add_pages(await self._fetch_pages())
        self._update_metrics()

    def _add_pages(self, pages: Mapping[HostPort, bytes | None]) -> None:
        # An engine that left is forgotten: it may come back with another past.
        self._previous = {e: last for e, last in self._previous.items() if e in pages}
        gains = [
            self._gain(engine, parse_readings(page))
            for engine, page in pages.items()
            if page is not None
        ]
        self._pending += [gain for gain in gains if any(gain.buckets.values())]
        self._engine_failed += sum(gain.failed for gain in gains)
        # What the data path counted of an engine that is silent may appear on its next page.
        if None in pages.values():
            return
        # Both counters run side by side: after each page the engine's count is raised to the data
        # path's count at the page before. A failure that only the data path counted would
        # otherwise hide a later one that only the engine counts.
        self._engine_failed = max(self._engine_failed, self._data_path_failed)
        self._data_path_failed = self._data_path().failed_loads

    def _gain(self, engine: HostPort, readings: EngineReadings) -> EngineReadings:
        """What `engine` counted since its page before."""
        previous = self._previous.get(engine)
        if previous is None:
            # Counts from before this process existed belong to its predecessor, so they are the
            # baseline. An engine that started later has counted for this process from zero.
            is_newer = readings.started is not None and readings.started >= self._created
            previous = EngineReadings(readings.started) if is_newer else readings
        self._previous[engine] = readings
        return readings.since(previous)

    def _update_metrics(self) -> None:
        data_path = self._data_path()
        added = max(0.0, self._engine_failed - data_path.failed_loads)
        # Negative when the data path has counted a failure that was added on the engine's count
        # before: the observer has incremented the same counter, so the sum stays right.
        self._metrics.errors[ErrorPhase.KV_TRANSFER].inc(added - self._added_errors)
        self._added_errors = added
        if data_path.reports_times is None:
            return
        pending, self._pending = self._pending, []
        if not data_path.reports_times:
            for gain in pending:
                self._add_transfers(gain)

    def _add_transfers(self, gain: EngineReadings) -> None:
        # The engine's buckets are cumulative, those of `Histogram` are not.
        transfer, lower = self._metrics.transfer, 0.0
        for bound, upper in sorted(gain.buckets.items()):
            transfer.fold(bound, upper - lower)
            lower = upper
        transfer.sum += gain.seconds


def _finite(text: bytes) -> float:
    """The number in `text`; zero if it is not a finite one."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if isfinite(number) else 0.0
