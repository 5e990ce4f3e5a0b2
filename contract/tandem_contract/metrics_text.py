"""Makes a metrics page without holding up the event loop: a large one takes tenths of a second."""

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class _Collected(Collector):
    """Metrics that were collected before."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


async def metrics_text(registry: CollectorRegistry) -> bytes:
    """The metrics of `registry` in Prometheus' text format."""
    metrics: list[Metric] = []
    # On the event loop, whose callbacks change the values, but with turns for other callbacks.
    for metric in registry.collect():
        metrics.append(metric)
        await asyncio.sleep(0)
    return await asyncio.to_thread(generate_latest, _Collected(metrics))
