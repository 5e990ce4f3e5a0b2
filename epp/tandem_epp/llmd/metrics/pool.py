"""Metrics of the pool's pods under llm-d's names, made at each scrape from what pods report."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import sqrt
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ...backends.fleet import Fleet
from ...backends.inference_pool import PoolReference
from ...estimates.engine_figures import Gauges
from ...settings import Settings
from .families import FLOW, NO_POOL, Names, Pool, gauges

_POOL: Final = ("name",)


@dataclass(frozen=True, slots=True)
class _Statistic:
    """A value of each pod of which mean and spread are shown."""

    mean: Names
    spread: Names
    value: Callable[[Gauges], float]


def _statistic(name: str, what: str, value: Callable[[Gauges], float]) -> _Statistic:
    average = f"average_{name}"
    return _Statistic(
        Names(average, _POOL, f"Mean over the pods: {what}.", f"inference_pool_{average}", _POOL),
        Names(f"std_dev_{name}", _POOL, f"Standard deviation over the pods: {what}."),
        value,
    )


STATISTICS: Final = (
    _statistic(
        "kv_cache_utilization", "share of the KV cache in use, 0 to 1", lambda g: g.kv_usage
    ),
    _statistic("queue_size", "requests in the engine's queue", lambda g: g.waiting),
    _statistic("running_requests", "requests that the engine computes", lambda g: g.running),
)
READY: Final = Names(
    "ready_endpoints", _POOL, "Pods that answer scrapes.", "inference_pool_ready_pods", _POOL
)
QUEUE: Final = Names(
    "per_endpoint_queue_size",
    ("name", "model_server_endpoint"),
    "Requests in the queue of each pod's engine.",
    "inference_pool_per_pod_queue_size",
    ("name", "model_server_pod"),
)
IN_FLIGHT: Final = Names(
    "inflight_requests",
    ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority"),
    "Requests that this replica of the EPP placed on each pod and that have not ended.",
)
INFO: Final = Names(
    "info",
    ("commit", "build_ref"),
    "1, with the EPP's version in build_ref.",
    "inference_extension_info",
    ("commit", "build_ref"),
)


def pool_of(settings: Settings) -> Pool:
    """What these metrics call the backends that `settings` select."""
    if (pods := settings.pods) is None:
        return NO_POOL
    name = pods.name if isinstance(pods, PoolReference) else settings.inference_pool
    return Pool(name, pods.namespace)


class PoolCollector(Collector):
    """Mean and spread over pods, and the queue of each."""

    def __init__(self, fleet: Fleet, pool: Pool) -> None:
        self._fleet = fleet
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        """The metrics now."""
        name = {"name": self._pool.name}
        pods = [(pod.name, pod.gauges) for pod in self._fleet if pod.healthy and pod.gauges]
        families = gauges(READY, [(name, len(pods))])
        # As llm-d: without pods there is no mean, and an autoscaler must not read 0.
        for statistic in STATISTICS if pods else ():
            values = [statistic.value(load) for _, load in pods]
            families += gauges(statistic.mean, [(name, sum(values) / len(values))])
            families += gauges(statistic.spread, [(name, _deviation(values))])
        families += gauges(
            QUEUE,
            (
                (name | {"model_server_endpoint": pod, "model_server_pod": pod}, load.waiting)
                for pod, load in pods
            ),
        )
        producer = {"producer_name": "inflight-load-producer", **FLOW}
        producer["namespace"] = self._pool.namespace
        families += gauges(
            IN_FLIGHT,
            (
                (producer | {"endpoint_name": pod.name}, pod.in_flight - pod.remote_in_flight)
                for pod in self._fleet
            ),
        )
        build = {"commit": "", "build_ref": f"tandem-{version('tandem-llm')}"}
        return families + gauges(INFO, [(build, 1.0)])


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample, as llm-d computes it; 0 for one value."""
    mean = sum(values) / len(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))
