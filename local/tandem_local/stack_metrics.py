"""Load of a running stack, from the metrics pages of its engines and sidecars."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tandem_contract import metrics

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


Samples = list[tuple[str, dict[str, str], float]]
"""(name, labels, value) of each sample of a metrics page."""


async def scrape_stack(state: State) -> StackMetrics:
    """Scrape every engine and sidecar; pods that do not answer in 2 seconds have no figures."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
        engines = await asyncio.gather(*(scrape(http, p.engine_metrics) for p in state.pods))
        sidecars = await asyncio.gather(*(scrape(http, p.sidecar_metrics) for p in state.pods))
    paths: Counter[str] = Counter()
    for name, labels, value in (sample for page in sidecars for sample in page):
        if name == metrics.REQUESTS:
            paths[labels.get("routing_path", "")] += int(value)
    loads = (_load(pod, page) for pod, page in zip(state.pods, engines, strict=True))
    return StackMetrics(state.endpoint, tuple(loads), dict(paths))


def _load(pod: PodState, page: Samples) -> PodLoad:
    def total(metric: str) -> float | None:
        values = [value for name, _, value in page if name == metric]
        return sum(values) if values else None

    running, waiting = total(metrics.ENGINE_RUNNING), total(metrics.ENGINE_WAITING)
    return PodLoad(
        pod,
        None if running is None else int(running),
        None if waiting is None else int(waiting),
        total(metrics.ENGINE_KV_USAGE),
    )


async def scrape(http: aiohttp.ClientSession, url: str | None) -> Samples:
    """The samples of the metrics page at `url`; empty if it does not answer."""
    if url is None:
        return []
    try:
        async with http.get(url) as answer:
            answer.raise_for_status()
            return [
                (sample.name, sample.labels, sample.value)
                for family in text_string_to_metric_families(await answer.text())
                for sample in family.samples
            ]
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return []
