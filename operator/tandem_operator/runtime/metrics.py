"""The operator's metrics. The code that sets label values keeps their number bounded."""

from collections.abc import Callable, Iterable
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem_contract.metrics import (
    OPERATOR_API_CALLS,
    OPERATOR_LEADER,
    OPERATOR_PODS,
    OPERATOR_QUEUE_DEPTH,
    OPERATOR_RECONCILE_SECONDS,
    OPERATOR_RECONCILES,
)

Loop = Literal["set", "endpoint"]
Result = Literal["ok", "refused", "unreachable", "bug"]
"""How a reconciliation ended: it succeeded; the API server refused a write; an API call failed; an
unexpected exception."""

PodCounts = Callable[[], Iterable[tuple[str, str, str, str, int]]]
"""Returns namespace, pool, role, state (pending, ready, draining, failed) and number of pods."""

_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One process's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            OPERATOR_RECONCILE_SECONDS,
            "Seconds that one reconciliation of a set or an endpoint took, including its writes.",
            ["loop"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._results = Counter(
            OPERATOR_RECONCILES,
            "Reconciliations of a set or an endpoint, by result.",
            ["loop", "result"],
            registry=self.registry,
        )
        self._calls = Counter(
            OPERATOR_API_CALLS,
            "Calls to the API server by verb and HTTP status; 0: no response. Watches are not"
            " counted.",
            ["verb", "code"],
            registry=self.registry,
        )
        self.leader = Gauge(
            OPERATOR_LEADER, "1 while this replica is the leader.", registry=self.registry
        )

    def count_reconciliation(self, loop: Loop, result: Result, seconds: float) -> None:
        """Count one reconciliation."""
        self._seconds.labels(loop).observe(seconds)
        self._results.labels(loop, result).inc()

    def count_api_call(self, verb: str, status: int, _seconds: float) -> None:
        """Count one call to the API server; an `Observer` of `tandem_kube.client`."""
        self._calls.labels(verb, str(status)).inc()

    def watch_queue(self, depth: Callable[[], int]) -> None:
        """Export the queue's depth, read at each scrape."""
        gauge = Gauge(
            OPERATOR_QUEUE_DEPTH,
            "Sets and endpoints that wait to be reconciled.",
            registry=self.registry,
        )
        gauge.set_function(depth)

    def watch_pods(self, counts: PodCounts) -> None:
        """Export the number of pods, read at each scrape."""
        self.registry.register(_PodCollector(counts))


class _PodCollector(Collector):
    def __init__(self, counts: PodCounts) -> None:
        self._counts = counts

    def describe(self) -> Iterable[GaugeMetricFamily]:
        # The registry learns the name from this, and refuses a second metric of that name.
        return [self._family()]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = self._family()
        for namespace, pool, role, state, count in self._counts():
            family.add_metric([namespace, pool, role, state], count)
        return [family]

    @staticmethod
    def _family() -> GaugeMetricFamily:
        labels = ["namespace", "pool", "role", "state"]
        return GaugeMetricFamily(OPERATOR_PODS, "Pods of each pool by state.", labels=labels)
