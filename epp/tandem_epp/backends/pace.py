"""How often a backend is scraped, and what its figures are worth until the next scrape. Pure.

    busy      requests of this EPP, or the engine reports work       every BUSY_INTERVAL
    idle      nothing happens                                        less and less often, down to
                                                                     the interval of health checks
    failing   the last scrape failed                                 after RETRY_INTERVAL, then
                                                                     down to MAX_RETRY_INTERVAL

All backends together are scraped at most MAX_RATE times per second, the longest overdue first.
Figures that should have been replaced by now fade: see `fade`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from tandem_contract.config import MIN_CHECK_INTERVAL

from ..estimates.engine_figures import Gauges

BUSY_INTERVAL: Final = MIN_CHECK_INTERVAL
"""Seconds between scrapes of a busy backend. Too long: requests that other EPPs place there are
noticed late."""
RETRY_INTERVAL: Final = 0.25
"""Seconds from a scrape that failed to the next one."""
MAX_RETRY_INTERVAL: Final = 1.0
"""Seconds between scrapes of a backend that goes on failing. Too long: its return is noticed late.
Too short: many dead backends cost CPU."""
MAX_RATE: Final = 500.0
"""Scrapes per second of all backends together. A scrape costs about 0.3 ms of CPU."""
_BACK_OFF: Final = 1.5
"""Factor by which the interval of an idle or failing backend grows per scrape."""

FRESH_INTERVALS: Final = 2.0
"""Figures older than this many of the backend's intervals are stale: one scrape was missed."""
FRESH_SECONDS: Final = 0.5
"""Figures younger than this are never stale."""
HALF_LIFE: Final = 1.0
"""Seconds in which stale figures lose half their weight. Too
short: one slow scrape makes a loaded backend look idle. Too long: it looks loaded after its load
has gone."""


def next_interval(previous: float, longest: float, *, is_busy: bool, failures: int = 0) -> float:
    """Seconds from the scrape that just ended to the next one, when the last wait was `previous`
    seconds and the last `failures` scrapes failed; `longest`: the interval of health checks."""
    if failures == 1:
        # Soon, however idle the backend is: after a few failures it is not chosen any more.
        return min(RETRY_INTERVAL, longest)
    if failures:
        return min(MAX_RETRY_INTERVAL, longest, previous * _BACK_OFF)
    if is_busy:
        return BUSY_INTERVAL
    return min(longest, previous * _BACK_OFF)


class Scrapable(Protocol):
    """A backend as `select_due` sees it."""

    @property
    def due_at(self) -> float:
        """When its next scrape should start, in seconds of the monotonic clock."""


S = TypeVar("S", bound=Scrapable)


def select_due(backends: Iterable[S], now: float, limit: int) -> list[S]:
    """At most `limit` of the backends whose scrape is due at `now`, the longest overdue first."""
    due = [backend for backend in backends if backend.due_at <= now]
    return sorted(due, key=lambda backend: backend.due_at)[:limit]


@dataclass(slots=True)
class Allowance:
    """How many scrapes may start: MAX_RATE per second, saved up for at most `burst` seconds."""

    burst: float
    _scrapes: float = 0.0
    _filled_at: float | None = None

    def available(self, now: float) -> int:
        """Scrapes that may start at `now`, in seconds of the monotonic clock."""
        elapsed = self.burst if self._filled_at is None else now - self._filled_at
        self._filled_at = now
        self._scrapes = min(self.burst * MAX_RATE, self._scrapes + elapsed * MAX_RATE)
        return int(self._scrapes)

    def spend(self, scrapes: int) -> None:
        """Count `scrapes` that start now."""
        self._scrapes -= scrapes


def fresh_seconds(interval: float) -> float:
    """Seconds for which figures are fresh, when the next scrape should start `interval` seconds
    after the one that brought them."""
    return max(FRESH_SECONDS, FRESH_INTERVALS * interval)


def fade(scraped: Gauges, own_at_scrape: int, own: int, staleness: float) -> Gauges:
    """What to believe of gauges that have been stale for `staleness` seconds.

    `own` requests of this EPP are on the backend now, `own_at_scrape` were when it was scraped. As
    the weight w = 0.5^(staleness / HALF_LIFE) falls, belief moves from the scrape, corrected by
    the requests placed and ended since, to what this EPP knows by itself:

        load    = w · max(0, running + waiting + own − own_at_scrape) + (1 − w) · own
        waiting = load − running                          at least 0
        kv      = kv · load / (running + waiting)         at most 1

    So a backend that answers late never flips to idle or to busy.
    """
    total = scraped.running + scraped.waiting
    weight = 0.5 ** (staleness / HALF_LIFE)
    load = weight * max(0.0, total + own - own_at_scrape) + (1.0 - weight) * own
    running = min(scraped.running, load) if scraped.waiting else load
    return Gauges(
        running=running,
        waiting=load - running,
        # Without requests there is nothing to scale by.
        kv_usage=min(1.0, scraped.kv_usage * load / total) if total else scraped.kv_usage,
        deferred=min(scraped.deferred, load - running),
    )
