"""Load of a running stack, from the metrics pages of its engines and sidecars."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from tandem_contract import metrics
from tandem_contract.metrics_page import MetricsPage

from .state import PodState, State

_TIMEOUT = aiohttp.ClientTimeout(total=2)


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


@dataclass(frozen=True, slots=True)
class StackMetrics:
    """Load of a stack."""

    endpoint: str
    pods: tuple[PodLoad, ...]
    paths: dict[str, int] = field(default_factory=dict)
    """Requests served so far, by routing path."""


async def scrape_stack(state: State) -> StackMetrics:
    """Scrape every engine and sidecar; pods that do not answer in 2 seconds have no figures."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
        # All pods at once: with the timeout of 2 seconds, pods that hang would otherwise add up.
        engines = await asyncio.gather(*(scrape(http, p.engine_metrics) for p in state.pods))
        sidecars = await asyncio.gather(*(scrape(http, p.sidecar_metrics) for p in state.pods))
    paths: Counter[str] = Counter()
    for page in sidecars:
        by_path = page.totals_by_label(metrics.REQUESTS, metrics.ROUTING_PATH_LABEL)
        paths.update({path: int(count) for path, count in by_path.items()})
    loads = (_load(pod, page) for pod, page in zip(state.pods, engines, strict=True))
    return StackMetrics(state.endpoint, tuple(loads), dict(paths))


def _load(pod: PodState, page: MetricsPage) -> PodLoad:
    running = page.totals.get(metrics.ENGINE_RUNNING)
    waiting = page.totals.get(metrics.ENGINE_WAITING)
    return PodLoad(
        pod,
        None if running is None else int(running),
        None if waiting is None else int(waiting),
        page.totals.get(metrics.ENGINE_KV_USAGE),
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
