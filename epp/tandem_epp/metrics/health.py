"""Metrics of the health of backends, computed when Prometheus scrapes them."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_contract import metrics as names

from ..backends.fleet import Fleet


class HealthCollector(Collector):
    """Outcomes, failure rate and ejections of each backend of a fleet. A backend that left the
    fleet leaves the metrics with it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        """The metrics now."""
        outcomes = CounterMetricFamily(
            "tandem_epp_outcomes",
            "Requests of this EPP by what happened at a backend. answered: below HTTP 500; "
            "error: 5xx; "
            "unreachable, reset: no connection, or one that ended before the response; broken: "
            "the answer broke off; timeout: 504; stalled: the request ended at a backend that was "
            "silent for a minute; handoff: a prefill backend gave no usable KV; "
            "busy: 429 or 503; unknown: nothing was learned.",
            labels=("backend", "outcome"),
        )
        rate = GaugeMetricFamily(
            "tandem_epp_failure_rate",
            "Failed share of a backend's requests, 0 to 1, decaying with a half-life of 10 s; 0 "
            "while a probe is due.",
            labels=("backend",),
        )
        ejected = GaugeMetricFamily(
            names.EPP_EJECTED,
            "1 from the ejection of a backend until a probe succeeds, else 0.",
            labels=("backend",),
        )
        ejections = CounterMetricFamily(
            "tandem_epp_ejections",
            "Ejections of a backend because its requests failed; each failed probe is one more.",
            labels=("backend",),
        )
        for pod in self._fleet:
            health = pod.health
            for outcome, count in health.outcomes.items():
                outcomes.add_metric((pod.name, outcome), count)
            rate.add_metric((pod.name,), health.failure_rate)
            ejected.add_metric((pod.name,), health.is_ejected)
            ejections.add_metric((pod.name,), health.ejections)
        return (outcomes, rate, ejected, ejections)
