"""Counters of engines and sidecars, read from their metrics pages, and differences of them.

    before = await scrape(session, urls)
    ...
    moved = await scrape(session, urls) - before

Errors: `ScrapeError`: a page cannot be fetched or parsed; the message has its URL.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import aiohttp

from tandem_contract import metrics
from tandem_contract.metrics_page import MetricsPage


class ScrapeError(Exception):
    """A metrics page cannot be fetched or parsed."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals over all pages; a counter that no page has is 0.

    A difference is negative when an engine restarted in between.
    """

    kv_bytes: float = 0
    """KV bytes that were pulled."""
    transfers: float = 0
    """KV pulls that succeeded."""
    transfer_seconds: float = 0
    """Seconds of all these pulls together."""
    transfers_failed: float = 0
    """KV pulls that failed."""
    kv_expired: float = 0
    """Prompts whose KV was not read within the lease."""
    fallbacks: float = 0
    """Requests that the sidecars served without the planned hand-off."""
    paths: Mapping[str, float] = field(default_factory=dict)
    """Requests by routing path, counted by the sidecars."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Errors by phase, counted by the sidecars."""

    def __add__(self, other: "Counters") -> "Counters":
        return self._plus(other, 1)

    def __sub__(self, other: "Counters") -> "Counters":
        return self._plus(other, -1)

    def _plus(self, other: "Counters", sign: int) -> "Counters":
        return Counters(
            kv_bytes=self.kv_bytes + sign * other.kv_bytes,
            transfers=self.transfers + sign * other.transfers,
            transfer_seconds=self.transfer_seconds + sign * other.transfer_seconds,
            transfers_failed=self.transfers_failed + sign * other.transfers_failed,
            kv_expired=self.kv_expired + sign * other.kv_expired,
            fallbacks=self.fallbacks + sign * other.fallbacks,
            paths=_joined(self.paths, other.paths, sign),
            errors=_joined(self.errors, other.errors, sign),
        )


def _joined(left: Mapping[str, float], right: Mapping[str, float], sign: int) -> dict[str, float]:
    return {key: left.get(key, 0) + sign * right.get(key, 0) for key in sorted({*left, *right})}


def read_page(text: str) -> Counters:
    """The counters of one page. Raises ValueError when it is not in Prometheus' text format."""
    page = MetricsPage.parse(text)
    return Counters(
        kv_bytes=page.totals.get(f"{metrics.ENGINE_XFER_BYTES}_sum", 0),
        transfers=page.totals.get(f"{metrics.ENGINE_XFER_SECONDS}_count", 0),
        transfer_seconds=page.totals.get(f"{metrics.ENGINE_XFER_SECONDS}_sum", 0),
        transfers_failed=page.totals.get(metrics.ENGINE_XFER_FAILED, 0),
        kv_expired=page.totals.get(metrics.ENGINE_KV_EXPIRED, 0),
        fallbacks=page.totals.get(metrics.FALLBACKS, 0),
        paths=page.totals_by_label(metrics.REQUESTS, metrics.ROUTING_PATH_LABEL),
        errors=page.totals_by_label(metrics.ERRORS, metrics.PHASE_LABEL),
    )


async def scrape(session: aiohttp.ClientSession, urls: Iterable[str]) -> Counters:
    """The sum over the pages at `urls`, read at the same time. Raises ScrapeError."""
    # At the same time, so that the sum is of one moment as nearly as possible.
    pages = await asyncio.gather(*(_page(session, url) for url in urls))
    return sum(pages, start=Counters())


async def _page(session: aiohttp.ClientSession, url: str) -> Counters:
    try:
        async with session.get(url) as response:
            text = await response.text()
    except (aiohttp.ClientError, OSError, UnicodeDecodeError) as err:
        raise ScrapeError(f"{url}: {type(err).__name__}: {err}") from err
    if response.status != 200:
        raise ScrapeError(f"{url}: HTTP {response.status}")
    try:
        return read_page(text)
    except ValueError as err:
        raise ScrapeError(f"{url}: not a metrics page: {err}") from err
