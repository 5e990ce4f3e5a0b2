"""Load of a running stack, from the metrics pages of its engines, sidecars and EPP."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from tandem_contract import endpoints, metrics, ports
from tandem_contract.metrics_page import MetricsPage

from .router import EPP
from .state import PodState, State

_TIMEOUT = aiohttp.ClientTimeout(total=2)
_EPP_METRICS = f"http://{{}}:{ports.EPP_METRICS}{endpoints.METRICS}"


@dataclass(frozen=True, slots=True)
class PodLoad:
    """Load of one pod. A figure is None if the pod's metrics do not show it."""

    pod: PodState
    running: int | None = None
    """Requests being computed."""
    waiting: int | None = None
    """Requests in the queue."""
    kv_usage: float | None = None
    """Share of the KV blocks in use, 0 to 1."""
    counts_since: float | None = None
    """When its sidecar began to count requests, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class StackMetrics:
    """Load of a stack."""

    endpoint: str
    pods: tuple[PodLoad, ...]
    paths: dict[str, int] = field(default_factory=dict)
    """Requests that engines answered, by routing path, as the sidecars counted them."""
    refused: int = 0
    """Requests that got an error of the EPP or of a sidecar instead."""


async def scrape_stack(state: State) -> StackMetrics:
    """Scrape engines, sidecars and EPP; pods that do not answer in 2 seconds have no figures."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
        # All pods at once: with the timeout of 2 seconds, pods that hang would otherwise add up.
        engines = await asyncio.gather(*(scrape(http, p.engine_metrics) for p in state.pods))
        sidecars = await asyncio.gather(*(scrape(http, p.sidecar_metrics) for p in state.pods))
        epps = [_EPP_METRICS.format(p.address) for p in state.pods if p.name == EPP]
        decisions = await asyncio.gather(*(scrape(http, url) for url in epps))
    paths: Counter[str] = Counter()
    refused = 0.0
    for page in sidecars:
        ended = page.totals_by_label(metrics.REQUESTS, metrics.ROUTING_PATH_LABEL)
        unserved = page.totals_by_label(metrics.UNSERVED, metrics.ROUTING_PATH_LABEL)
        paths.update({path: int(n - unserved.get(path, 0)) for path, n in ended.items()})
        refused += sum(unserved.values())
    for page in decisions:
        by_path = page.totals_by_label(metrics.EPP_DECISIONS, metrics.EPP_PATH_LABEL)
        refused += by_path.get(metrics.EPP_REFUSED, 0)
    loads = map(_load, state.pods, engines, sidecars)
    return StackMetrics(state.endpoint, tuple(loads), dict(paths), int(refused))


def _load(pod: PodState, engine: MetricsPage, sidecar: MetricsPage) -> PodLoad:
    running = engine.totals.get(metrics.ENGINE_RUNNING)
    waiting = engine.totals.get(metrics.ENGINE_WAITING)
    return PodLoad(
        pod,
        None if running is None else int(running),
        None if waiting is None else int(waiting),
        engine.totals.get(metrics.ENGINE_KV_USAGE),
        sidecar.totals.get(metrics.PROCESS_START_TIME),
    )


async def scrape(http: aiohttp.ClientSession, url: str | None) -> MetricsPage:
    """The metrics page at `url`; an empty page if it does not answer."""
    if url is None:
        return MetricsPage()
    try:
        async with http.get(url) as answer:
            answer.raise_for_status()
            return MetricsPage.parse(await answer.text())
    # A pod that starts, drains or has just ended does not answer: its figures are left out.
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return MetricsPage()
