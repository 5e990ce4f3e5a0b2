"""The picker's own metrics; gauges of the fleet are read from it when they are scraped."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_contract import metrics as names

from .backends.fleet import Fleet

_SECONDS = (25e-6, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_TENTHS = tuple(tenth / 10 for tenth in range(11))


class Metrics:
    """Counters and histograms, in a registry of their own."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_FleetCollector(fleet))
        self.decisions = Counter(
            "tandem_epp_decisions_total",
            "Requests by the path decided and why; path refused for those refused here, answered "
            "for lists of models. A reason is one of a fixed few.",
            ("path", "reason"),
            registry=self.registry,
        )
        self.decision_seconds = Histogram(
            "tandem_epp_decision_seconds",
            "Seconds from a whole body to a decision: parsing, hashing, scoring, signing.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._hit_ratio = Histogram(
            "tandem_epp_prefix_hit_ratio",
            "Cached share of a prompt, 0 to 1: as the index estimates it on the decode pick, and "
            "as the engine that computed the prompt measured it.",
            ("source",),
            buckets=_TENTHS,
            registry=self.registry,
        )

        self.warmups = Counter(
            "tandem_epp_warmups_total",
            "First hand-offs of pairs of pods, each attempt: warm; fallback, answered without the "
            "hand-off; error, an HTTP status; unreachable, no answer in time.",
            ("result",),
            registry=self.registry,
        )

    def hit(self, cached: int, prompt: int, source: str) -> None:
        """Record that `cached` of `prompt` tokens were cached; an empty prompt says nothing."""
        if prompt > 0:
            self._hit_ratio.labels(source).observe(cached / prompt)


class _FleetCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        in_flight = GaugeMetricFamily(
            "tandem_epp_in_flight",
            "Requests placed on a backend by this picker and not ended; a prefill backend's until "
            "its part is done.",
            labels=("backend",),
        )
        healthy = GaugeMetricFamily(
            names.EPP_HEALTHY,
            "1 while a backend may be chosen, 0 while it does not answer, and from a request that "
            "failed at it to its next scrape.",
            labels=("backend",),
        )
        rate = GaugeMetricFamily(
            "tandem_epp_prefill_tokens_per_second",
            "Prompt tokens a backend computes per second, learned from its answers; absent until "
            "one told.",
            labels=("backend",),
        )
        warming = GaugeMetricFamily(
            names.EPP_WARMING,
            "Pairs of pods whose first hand-off is under way: others are preferred meanwhile.",
        )
        warming.add_metric((), sum(len(pod.cold) for pod in self._fleet))
        for pod in self._fleet:
            in_flight.add_metric((pod.name,), pod.in_flight)
            healthy.add_metric((pod.name,), pod.ready and not pod.suspect)
            if pod.prefill_rate is not None:
                rate.add_metric((pod.name,), pod.prefill_rate)
        return (in_flight, healthy, rate, warming)
