"""Metrics of what backends had cached of the prompts that they computed, made at each scrape."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_contract.pod_reports import Reporter

from ..backends.fleet import Fleet

_LABELS = ("backend", "source", "reported_by")


class HitCollector(Collector):
    """Prompt tokens of each backend of a fleet, and the cached ones, predicted and measured. A
    backend that left the fleet leaves the metrics with it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        """The metrics now."""
        prompts = CounterMetricFamily(
            "tandem_epp_prompt_tokens",
            "Tokens of the prompts that a backend computed; a prompt that was handed over counts "
            "on its prefill backend only. Source estimated: of answered requests that this EPP "
            "and its replicas placed; measured: by reported_by, engine: the engine's counters, of "
            "all its requests; answers: the usage in answers, for an engine without such counters.",
            labels=_LABELS,
        )
        cached = CounterMetricFamily(
            "tandem_epp_cached_prompt_tokens",
            "Those of tandem_epp_prompt_tokens_total that the backend had cached: as the choice "
            "predicted it (estimated), or as it was (measured).",
            labels=_LABELS,
        )
        for pod in self._fleet:
            reporter, measured = pod.hits.measured
            rows = ("estimated", Reporter.EPP, pod.hits.estimated), ("measured", reporter, measured)
            for source, reported_by, tokens in rows:
                labels = (pod.name, source, reported_by.value)
                prompts.add_metric(labels, tokens.prompt)
                cached.add_metric(labels, tokens.cached)
        return (prompts, cached)
