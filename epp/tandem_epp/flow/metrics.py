"""Metrics of flow control."""

from prometheus_client import CollectorRegistry, Gauge

from tandem_contract.fast_metrics import CounterVec, HistogramVec
from tandem_contract.metrics import EPP_FLOW_ASKED

from ..backends.fleet import UNLISTED
from .requests import Demand

_SECONDS = (0.005, 0.02, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)


class FlowMetrics:
    """What waits, and how it ended, by priority."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._held = Gauge(
            "tandem_epp_flow_held",
            "Requests that wait because no pod has room, by priority.",
            ("priority",),
            registry=registry,
        )
        self._bytes = Gauge(
            "tandem_epp_flow_held_bytes", "Bytes of their bodies.", registry=registry
        )
        self._requests = Gauge(
            "tandem_epp_flow_model_requests",
            "Requests that wait for pods of a model, also while it has none: what a scaler has to "
            "serve. Empty: of a request that names no model; other: one that no pod lists.",
            ("model",),
            registry=registry,
        )
        self._tokens = Gauge(
            "tandem_epp_flow_model_tokens",
            "Tokens of their prompts and expected answers, as far as no pod has their KV.",
            ("model",),
            registry=registry,
        )
        self._asked = Gauge(
            EPP_FLOW_ASKED,
            "Seconds for which a request may wait, when a gateway that sends bodies in BUFFERED "
            "mode was last asked to wait for so long; 0: none was.",
            registry=registry,
        )
        self._ended = CounterVec(
            "tandem_epp_flow_ended_total",
            "Requests that waited, or were to wait, by what became of them: went (to a pod); left "
            "(the client did); flow_full, flow_displaced, flow_expired, flow_shed, flow_stopping: "
            "refused.",
            ("priority", "result"),
            registry=registry,
        )
        self._seconds = HistogramVec(
            "tandem_epp_flow_seconds",
            "Seconds that requests waited before they went to a pod.",
            _SECONDS,
            ("priority",),
            registry=registry,
        )

    def held(self, priority: int, requests: int, size: int) -> None:
        """So many requests of this priority wait, and bodies of `size` bytes of all."""
        self._held.labels(str(priority)).set(requests)
        self._bytes.set(size)

    def asked(self, seconds: float) -> None:
        """A gateway was asked to wait for `seconds`."""
        self._asked.set(seconds)

    def demand(self, model: str | None, demand: Demand) -> None:
        """So much waits for `model`, as `Fleet.model_key` has it."""
        label = "other" if model == UNLISTED else model or ""
        self._requests.labels(label).set(demand.requests)
        self._tokens.labels(label).set(demand.tokens)

    def ended(self, priority: int, result: str, seconds: float) -> None:
        """A request waits no longer, after `seconds`."""
        self._ended.child(str(priority), result).inc()
        if result == "went":
            self._seconds.child(str(priority)).observe(seconds)
