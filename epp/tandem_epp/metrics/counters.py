"""The EPP's own metrics. Gauges of the fleet are computed when Prometheus scrapes them."""

from collections.abc import Iterable
from time import time

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_contract import metrics as names
from tandem_contract.fast_metrics import CounterVec, HistogramVec
from tandem_contract.held_bytes import HeldBytes
from tandem_contract.paths import RoutingPath
from tandem_contract.pod_reports import Reporter

from ..backends.fleet import Fleet
from .faults import Faults

_OF_ONE_ENGINE = (RoutingPath.UNIFIED, RoutingPath.FAST_DECODE, RoutingPath.FALLBACK)
"""Paths on which an engine without a sidecar may serve."""
_SECONDS = (25e-6, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_TOKENIZATION_SECONDS = (1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1, 2)
_TYPICAL_PROMPT = 1000
"""Tokens of the prompt for which a backend's prefill rate is shown."""
_TENTHS = tuple(tenth / 10 for tenth in range(11))
_RELATIVE = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """Counters and histograms in a registry of this EPP's own."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_FleetCollector(fleet))
        self.registry.register(HealthCollector(fleet))
        self.registry.register(HitCollector(fleet))
        self.decisions = CounterVec(
            names.EPP_DECISIONS,
            "Requests by routing path and reason. Path refused: the EPP answered with an error; "
            "answered: the EPP answered a list of models. Reasons are a fixed set.",
            (names.EPP_PATH_LABEL, "reason"),
            registry=self.registry,
        )
        self.fallbacks = CounterVec(
            "tandem_epp_fallbacks_total",
            "Requests that one backend serves because no hand-off is possible. Reason: "
            "no_prefill_backend, no_decode_backend, fault. served_by: role of the backend; unified "
            "ones are used before others.",
            ("reason", "served_by"),
            registry=self.registry,
        )
        self._unreported = CounterVec(
            names.REQUESTS,
            "Generation requests ended, by the path that served them. The EPP counts those of "
            "which no sidecar tells: one engine without a sidecar served them.",
            (names.ROUTING_PATH_LABEL,),
            registry=self.registry,
        )
        self._unreported_fallbacks = CounterVec(
            names.FALLBACKS,
            "Those of them that one engine served for want of a hand-off.",
            registry=self.registry,
        ).child()
        for path in _OF_ONE_ENGINE:
            self._unreported.child(path)
        self.decision_seconds = HistogramVec(
            "tandem_epp_decision_seconds",
            "Seconds from a complete body to a decision: parsing, hashing, scoring, signing.",
            _SECONDS,
            registry=self.registry,
        ).child()
        self._hit_ratio = HistogramVec(
            "tandem_epp_prefix_hit_ratio",
            "Cached share of a prompt, 0 to 1, on the pod that computes it. Source estimated: as "
            "the choice predicted it; measured: as the headers of the answer tell it, which of "
            "vLLM's streams is known only after a hand-off. tandem_epp_cached_prompt_tokens_total "
            "has all requests.",
            _TENTHS,
            ("source",),
            registry=self.registry,
        )
        self._ttft_error = HistogramVec(
            "tandem_epp_ttft_prediction_error",
            "Error of the predicted seconds to the first token, as a share of the measured ones: "
            "|predicted - measured| / measured; 0.2 is 20 %. Both count from the decision. Only "
            "streams that were answered with 2xx on the planned path are observed.",
            _RELATIVE,
            ("path",),
            registry=self.registry,
        )
        self._tokenization = HistogramVec(
            "tandem_epp_tokenization_seconds",
            "Seconds that a request waited for the token ids of its prompt, by result: given (the "
            "request has them), cached, tokenized; and, placed without them: late, refused (no "
            "tokenizer or no answer from it), busy (too many at once).",
            _TOKENIZATION_SECONDS,
            ("result",),
            registry=self.registry,
        )
        self.warm_ups = CounterVec(
            "tandem_epp_warmups_total",
            "Attempts to make the first hand-off of a pair of pods, by result: warm; fallback "
            "(answered without the hand-off); error (HTTP status 400 or above); unreachable (no "
            "answer in time).",
            ("result",),
            registry=self.registry,
        )

        self.faults = Faults(self.registry)

    def observe_tokenization(self, result: str, seconds: float) -> None:
        """Observe the `seconds` that a request waited for its token ids."""
        self._tokenization.child(result).observe(seconds)

    def count_unreported(self, path: RoutingPath) -> None:
        """Count a request that one engine without a sidecar served."""
        self._unreported.child(path).inc()
        if path is RoutingPath.FALLBACK:
            self._unreported_fallbacks.inc()

    def observe_hit_ratio(self, cached: int, prompt: int, source: str) -> None:
        """Observe that `cached` of `prompt` tokens were cached; an empty prompt is not observed."""
        if prompt > 0:
            self._hit_ratio.child(source).observe(cached / prompt)

    def observe_ttft(self, predicted: float, measured: float, path: str) -> None:
        """Observe the error of a predicted TTFT; both in seconds."""
        if measured > 0:
            self._ttft_error.child(path).observe(abs(predicted - measured) / measured)


class _FleetCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        in_flight = GaugeMetricFamily(
            "tandem_epp_in_flight",
            "Requests that this replica of the EPP placed on a backend and that have not ended; on "
            "a prefill backend, until the response headers pass.",
            labels=("backend",),
        )
        healthy = GaugeMetricFamily(
            names.EPP_HEALTHY,
            "1 while a backend may be chosen. 0 while it does not answer scrapes, is not ready, is "
            "ejected or paused, and from a failed connection to its next successful scrape.",
            labels=("backend",),
        )
        rate = GaugeMetricFamily(
            "tandem_epp_prefill_tokens_per_second",
            "Prompt tokens that a backend computes per second, by the fit of its prefills for a "
            "prompt of 1,000 tokens; absent until the first measurement.",
            labels=("backend",),
        )
        warming = GaugeMetricFamily(
            names.EPP_WARMING,
            "Pairs of pods whose first hand-off is under way; other pairs are preferred meanwhile.",
        )
        age = GaugeMetricFamily(
            "tandem_epp_scrape_age_seconds",
            "Seconds since the EPP last read a backend's metrics: up to 2 for an idle backend, 0.1 "
            "or a little more for a busy one; absent until the first time.",
            labels=("backend",),
        )
        now = time()
        index = GaugeMetricFamily(
            "tandem_epp_prefix_index_bytes",
            "Memory of the prefix index over all backends, in bytes, estimated from its entries.",
            value=self._fleet.prefixes.bytes,
        )
        limit = GaugeMetricFamily(
            "tandem_epp_prefix_index_limit_bytes",
            "Memory that the prefix index may take, in bytes; at the limit it forgets prompts.",
            value=self._fleet.prefixes.limit_bytes,
        )
        scale = GaugeMetricFamily(
            "tandem_epp_token_scale",
            "Tokens of a text over a quarter of its bytes, by model, as engines counted the latest "
            "prompts; absent until the first count.",
            labels=("model",),
        )
        for model, value in self._fleet.token_scales:
            scale.add_metric((model,), value)
        # Computed at the scrape: a backend that left the fleet leaves the metrics with it.
        warming.add_metric((), sum(len(pod.unwarmed_prefills) for pod in self._fleet))
        for pod in self._fleet:
            in_flight.add_metric((pod.name,), pod.in_flight - pod.remote_in_flight)
            healthy.add_metric((pod.name,), pod.ready and pod.health.is_available)
            if pod.estimates.prefill.count:
                seconds = pod.estimates.prefill.cost.seconds(_TYPICAL_PROMPT)
                rate.add_metric((pod.name,), _TYPICAL_PROMPT / seconds if seconds else 0.0)
            if pod.gauges is not None:
                age.add_metric((pod.name,), now - pod.scraped_at)
        return (in_flight, healthy, rate, warming, index, limit, scale, age)


class HeldCollector(Collector):
    """What clients make the EPP hold."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "tandem_epp_held_bytes",
            "Bytes held for clients: request bodies that arrive, answers that a gateway does not "
            "take, and 8 KiB for each stream of the http2 server.",
            value=self._held.size,
        )
        yield GaugeMetricFamily(
            "tandem_epp_held_limit_bytes",
            "Bytes that may be held for clients; beyond it request bodies are answered with 503.",
            value=self._held.limit,
        )


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
