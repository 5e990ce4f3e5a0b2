"""Folds the decode engine's own counters into the sidecar's metrics, each fact counted once.

    counters = EngineCounters(ask, metrics, seen)
    await counters.look()       # before a scrape is answered; `watch` does so every 15 s besides

*Transfer times.* An engine that writes `x-tandem-timing` tells the time of each transfer, and its
histogram is left alone; of one that does not (vLLM), the histogram is folded in. Which of the two
it is, its first decode answer says; until then what its histogram gains is held back.

*KV that was not loaded.* An engine may fail a request whose KV did not load, which the sidecar
counts itself, or compute the prompt again and say nothing. Its counter has both. So the errors that
count are the greater of the two numbers; what the sidecar counted and the engine has not by the
next look, it will not.

An engine of several ranks counts a transfer, and a failed one, once for each. Among the failed are
handshakes and notifications. `nixl_num_kv_expired_reqs` is no figure of a reader: a producer counts
there what nobody fetched.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Final

from tandem_contract import endpoints
from tandem_contract import metrics as names
from tandem_contract.commandline import HostPort
from tandem_contract.paths import ErrorPhase

from ..http.collect import Answer, Collector, NoAnswer
from ..http.messages import request_bytes
from ..http.upstream import Pool
from .metrics import FAILED_LOADS, TELLS_TIMES, Metrics

LOOK_SECONDS: Final = 15.0
"""Between looks that no scrape asks for. What an engine counts within this time of its end, in a
crash, is lost."""
FRESH_SECONDS: Final = 1.0
"""A look this recent will do: several may scrape."""
TIMEOUT: Final = 1.0
"""A scrape waits this long for a busy engine."""

_LINE: Final = re.compile(
    rf"\n({names.ENGINE_XFER_SECONDS}_bucket|{names.ENGINE_XFER_SECONDS}_sum"
    rf"|{names.ENGINE_XFER_FAILED})(?:{{(.*)}})? (\S+)".encode()
)
"""Begins with a literal, which is searched for ten times as fast as line by line."""
_STARTED: Final = re.compile(rf"\n{names.PROCESS_START_TIME} (\S+)".encode())
_BOUND: Final = re.compile(rb'le="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Figures:
    """What one page says; summed over an engine's ranks."""

    started: float | None = None
    """Unix seconds; None where the engine does not say."""
    failed: float = 0.0
    """KV transfers."""
    seconds: float = 0.0
    """Of all transfers together."""
    below: Mapping[float, float] = field(default_factory=dict)
    """Bound in seconds → transfers that took at most that long."""

    def since(self, before: "Figures") -> "Figures":
        """What came after `before`: everything, where the engine has begun anew."""
        if self.started != before.started or self._fell(before):
            return self
        return Figures(
            self.started,
            self.failed - before.failed,
            self.seconds - before.seconds,
            {bound: n - before.below.get(bound, 0.0) for bound, n in self.below.items()},
        )

    def _fell(self, before: "Figures") -> bool:
        return (
            self.failed < before.failed
            or self.seconds < before.seconds
            or any(self.below.get(bound, 0.0) < n for bound, n in before.below.items())
        )


def read(page: bytes) -> Figures:
    """The figures in an engine's metrics page; what it does not have is zero."""
    page = b"\n" + page
    started = _STARTED.search(page)
    failed = seconds = 0.0
    below: dict[float, float] = {}
    for match in _LINE.finditer(page):
        name, value = match[1].decode(), _number(match[3])
        if name == names.ENGINE_XFER_FAILED:
            failed += value
        elif name.endswith("_sum"):
            seconds += value
        elif bound := _BOUND.search(match[2] or b""):
            key = float(bound[1])
            below[key] = below.get(key, 0.0) + value
    return Figures(_number(started[1]) if started else None, failed, seconds, below)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the data path knows of the same engine."""

    failed_loads: float
    """KV loads it saw fail, and counted."""
    times_told: bool | None
    """Whether answers tell of transfers; None: there was none."""

    @classmethod
    def by(cls, metrics: Metrics) -> "Seen":
        """What one process knows."""
        return cls(metrics.failed_loads.value, metrics.engine_tells)

    @classmethod
    def by_all(cls, samples: Iterable[tuple[str, float]]) -> "Seen":
        """What several know, from the samples of their metrics."""
        failed, tells = 0.0, None
        for name, value in samples:
            if name == FAILED_LOADS:
                failed += value
            elif name == TELLS_TIMES:
                tells = bool(value) or bool(tells)
        return cls(failed, tells)


class EngineCounters:
    """The engine's counters, followed."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[bytes | None]],
        metrics: Metrics,
        seen: Callable[[], Seen],
        *,
        fresh: float = FRESH_SECONDS,
    ) -> None:
        self._ask = ask
        """For the engine's metrics page; None: it gives none now."""
        self._metrics = metrics
        self._seen = seen
        self._fresh = fresh
        self._begun = time.time()
        self._lock = asyncio.Lock()
        self._looked = -inf
        self._before: Figures | None = None
        self._failed = 0.0
        """As the engine counts, across its restarts."""
        self._told = 0.0
        """What the data path had counted at the last look."""
        self._added = 0.0
        """Errors that are in the metrics on the engine's word alone."""
        self._held: list[Figures] = []

    async def watch(self) -> None:
        """Look now and then, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Bring the metrics up to date, from a page that is fresh."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._looked >= self._fresh:
                self._looked = now
                page = await self._ask()
                if page is not None:
                    self._take(read(page))
        self._settle()

    def _take(self, figures: Figures) -> None:
        if self._before is None:
            # An engine older than this sidecar has counted for one before it.
            ours = figures.started is not None and figures.started >= self._begun
            self._before = Figures(figures.started) if ours else figures
        gained = figures.since(self._before)
        self._before = figures
        if any(gained.below.values()):
            self._held.append(gained)
        self._failed = max(self._failed + gained.failed, self._told)
        self._told = self._seen().failed_loads

    def _settle(self) -> None:
        seen = self._seen()
        added = max(0.0, self._failed - seen.failed_loads)
        # Less than before where the data path has counted since what the engine had told of.
        self._metrics.errors[ErrorPhase.KV_TRANSFER].inc(added - self._added)
        self._added = added
        if seen.times_told is None:
            return
        held, self._held = self._held, []
        if not seen.times_told:
            for gained in held:
                self._fold(gained)

    def _fold(self, gained: Figures) -> None:
        transfer, lower = self._metrics.transfer, 0.0
        for bound, upper in sorted(gained.below.items()):
            transfer.fold(bound, upper - lower)
            lower = upper
        transfer.sum += gained.seconds


async def metrics_page(pool: Pool, engine: HostPort, *, timeout: float = TIMEOUT) -> bytes | None:
    """The engine's metrics page; None: it gives none, or not within `timeout` seconds."""
    result: asyncio.Future[Answer | NoAnswer] = asyncio.get_running_loop().create_future()

    def done(answer: Answer | NoAnswer) -> None:
        if not result.done():
            result.set_result(answer)

    target = endpoints.METRICS.encode()
    request = request_bytes(b"GET", target, [(b"host", str(engine).encode())], b"")
    call = pool.send(engine, b"GET", request, Collector(done), connect_timeout=timeout)
    try:
        async with asyncio.timeout(timeout):
            answer = await result
    except TimeoutError:
        return None
    finally:
        call.abort()
    return answer.body if isinstance(answer, Answer) and answer.head.status == 200 else None


def _number(text: bytes) -> float:
    """Zero for what is no finite number."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if isfinite(number) else 0.0
