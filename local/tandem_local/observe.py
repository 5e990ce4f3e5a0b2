"""What a running stack is doing, from the metrics of its engines and sidecars."""

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
    """One pod now. None: the figure could not be had."""

    pod: PodState
    running: int | None = None
    """Requests being computed."""
    waiting: int | None = None
    """Requests in the queue."""
    kv_usage: float | None = None
    """Share of the KV blocks in use, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A stack now."""

    endpoint: str
    pods: tuple[PodLoad, ...]
    paths: dict[str, int] = field(default_factory=dict)
    """Requests served so far, by routing path."""


Samples = list[tuple[str, dict[str, str], float]]
"""(name, labels, value) of a metrics page."""


async def observe(state: State) -> Observation:
    """Ask every engine and sidecar of a stack; who does not answer in 2 seconds is left blank."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
        engines = await asyncio.gather(*(read_page(http, p.engine_metrics) for p in state.pods))
        sidecars = await asyncio.gather(*(read_page(http, p.sidecar_metrics) for p in state.pods))
    paths: Counter[str] = Counter()
    for name, labels, value in (sample for page in sidecars for sample in page):
        if name == metrics.REQUESTS:
            paths[labels.get("routing_path", "")] += int(value)
    loads = (_load(pod, page) for pod, page in zip(state.pods, engines, strict=True))
    return Observation(state.endpoint, tuple(loads), dict(paths))


def _load(pod: PodState, page: Samples) -> PodLoad:
    def value(wanted: str) -> float | None:
        found = [v for name, _, v in page if name == wanted]
        return sum(found) if found else None

    running, waiting = value(metrics.ENGINE_RUNNING), value(metrics.ENGINE_WAITING)
    return PodLoad(
        pod,
        None if running is None else int(running),
        None if waiting is None else int(waiting),
        value(metrics.ENGINE_KV_USAGE),
    )


async def read_page(http: aiohttp.ClientSession, url: str | None) -> Samples:
    """What the page at `url` says; nothing where it does not answer."""
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
