"""What the sidecar exports: the seed's six under their names, and a few of its own.

Label values are bounded: routing paths and phases are enumerations, backends are the pods that
answered, reasons are words of ours or of a signed plan, above `_MAX_REASONS` of them `other`.
"""

import re
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tandem_contract import metrics as names
from tandem_contract.paths import ErrorPhase, RoutingPath

_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TRANSFER_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_MAX_REASONS: Final = 32
_MAX_BACKENDS: Final = 1000
_REASON: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


class Metrics:
    """One process's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        requests = Counter(
            names.REQUESTS,
            "Generation requests ended, by the path that served them.",
            [names.ROUTING_PATH_LABEL],
            registry=self.registry,
        )
        errors = Counter(
            names.ERRORS,
            "Failures by phase; one request may count several, and still be answered.",
            [names.PHASE_LABEL],
            registry=self.registry,
        )
        self.requests = {path: requests.labels(path.value) for path in RoutingPath}
        self.errors = {phase: errors.labels(phase.value) for phase in ErrorPhase}
        self._prefill = Histogram(
            names.PREFILL_SECONDS,
            "Seconds from sending a prefill leg to its whole answer; failed ones are left out.",
            [names.BACKEND_LABEL],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._decode = Histogram(
            names.DECODE_SECONDS,
            "Seconds from sending a decode leg to its answer's end.",
            [names.BACKEND_LABEL],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.transfer = Histogram(
            names.KV_TRANSFER_SECONDS,
            "Seconds a KV transfer took, as the decode engine measured it.",
            buckets=_TRANSFER_BUCKETS,
            registry=self.registry,
        )
        self.fallbacks = Counter(
            names.FALLBACKS,
            "Requests that were to be split and were served without.",
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "tandem_sidecar_in_flight", "Requests being served.", registry=self.registry
        )
        self.retries = Counter(
            "tandem_sidecar_retries_total",
            "Legs sent again after a failed one: to the next prefill pod, or decoded locally.",
            registry=self.registry,
        )
        self.ignored_candidates = Counter(
            "tandem_sidecar_ignored_candidates_total",
            "Prefill addresses named without a signature and outside --prefill-allow.",
            registry=self.registry,
        )
        self._unified = Counter(
            "tandem_sidecar_unified_total",
            "Requests served by one engine, by why.",
            ["reason"],
            registry=self.registry,
        )
        self._reasons: set[str] = set()
        self._backends: set[str] = set()

    def unified(self, reason: str) -> None:
        """Count a request that one engine serves."""
        known = reason in self._reasons
        if not known and (len(self._reasons) >= _MAX_REASONS or not _REASON.fullmatch(reason)):
            reason = "other"
        self._reasons.add(reason)
        self._unified.labels(reason).inc()

    def prefill(self, backend: str, seconds: float) -> None:
        """Observe an answered prefill leg."""
        self._prefill.labels(self._backend(backend)).observe(seconds)

    def decode(self, backend: str, seconds: float) -> None:
        """Observe an ended decode leg."""
        self._decode.labels(self._backend(backend)).observe(seconds)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _backend(self, name: str) -> str:
        if name not in self._backends:
            if len(self._backends) >= _MAX_BACKENDS:
                return "other"
            self._backends.add(name)
        return name
