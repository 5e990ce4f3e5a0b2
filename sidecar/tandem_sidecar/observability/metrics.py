"""What the sidecar exports: the seed's six under their names, and a few of its own.

Label values are bounded: paths, phases, results, outcomes and kinds are enumerations, backends are
the pods that answered, reasons are words of ours or of a signed plan; above a family's limit they
are `other`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_contract import metrics as names
from tandem_contract.paths import ErrorPhase, RoutingPath

from .fast_metrics import OTHER, Counts, Distributions
from .record import Phase, Result

FIRST_BYTE_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 30, 60, 120,
)  # fmt: skip
"""Of prefill legs and first bytes. Objectives for the first token lie between 0.1 s and 10 s: there
bounds are a factor of 1.5 or so apart, and so is the error of a quantile."""
DECODE_BUCKETS: Final = (
    0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1800,
)  # fmt: skip
"""A token takes 5 to 50 ms and an answer has one to tens of thousands of them."""
TRANSFER_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
"""Every bound that vLLM's own histogram has is among them, so that folding it in moves nothing."""

FAILED_LOADS: Final = "tandem_sidecar_failed_loads_total"
TELLS_TIMES: Final = "tandem_sidecar_engine_tells_times"
"""Read by whoever folds the engine's own counters in, of several workers the supervisor."""

_MAX_REASONS: Final = 32
_REASON: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")

Sample = tuple[tuple[str, ...], float]
"""Label values, and the figure."""


class _Reading(Collector):
    """A gauge read when Prometheus asks."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], read: Callable[[], Iterable[Sample]]
    ) -> None:
        self._name, self._text, self._labels, self._read = name, text, labels, read

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for values, figure in self._read():
            family.add_metric(values, figure)
        yield family


class Metrics:
    """One process's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        requests = Counts(
            names.REQUESTS,
            "Generation requests ended, by the path that served them.",
            [names.ROUTING_PATH_LABEL],
            registry=registry,
        )
        errors = Counts(
            names.ERRORS,
            "Failures by phase; one request may count several, and still be answered.",
            [names.PHASE_LABEL],
            registry=registry,
        )
        self.requests = {path: requests.child(path.value) for path in RoutingPath}
        self.errors = {phase: errors.child(phase.value) for phase in ErrorPhase}
        self.prefill = Distributions(
            names.PREFILL_SECONDS,
            "Seconds from sending a prefill leg to its whole answer; failed ones are left out.",
            FIRST_BYTE_BUCKETS,
            [names.BACKEND_LABEL],
            registry=registry,
        )
        self.decode = Distributions(
            names.DECODE_SECONDS,
            "Seconds from sending a decode leg to its answer's end; failed ones are left out.",
            DECODE_BUCKETS,
            [names.BACKEND_LABEL],
            registry=registry,
        )
        self.transfer = Distributions(
            names.KV_TRANSFER_SECONDS,
            "Seconds a KV transfer took, as the decode engine measured it.",
            TRANSFER_BUCKETS,
            registry=registry,
        ).child()
        self.fallbacks = Counts(
            names.FALLBACKS,
            "Requests that were to be split and were served without.",
            registry=registry,
        ).child()
        self.failed_loads = Counts(
            FAILED_LOADS,
            "Decode legs answered with an error where KV had been handed over; each is among the"
            " errors of phase kv_transfer.",
            registry=registry,
        ).child()
        self.engine_tells: bool | None = None
        """Whether the decode engine's answers tell of transfer times; None: it has not answered."""
        self._sidecars_own(registry)
        running = [((version("tandem-llm"),), 1.0)]
        self.watch(
            "tandem_sidecar_build_info",
            "What runs, by its version; always 1.",
            lambda: running,
            ["version"],
        )
        self.watch(
            TELLS_TIMES,
            "1: the decode engine's answers tell of transfer times; 0: they do not, and its own"
            " histogram is folded in; absent: it has not answered yet.",
            lambda: [] if self.engine_tells is None else [((), float(self.engine_tells))],
        )

    def _sidecars_own(self, registry: CollectorRegistry) -> None:
        self._retries = Counts(
            "tandem_sidecar_retries_total",
            "Legs sent again, to the next prefill pod or without the hand-off, by how the one"
            " before ended.",
            ["result"],
            registry=registry,
        )
        self._legs = Counts(
            "tandem_sidecar_legs_total",
            "Requests to engines ended, by what for and how.",
            ["phase", "result"],
            registry=registry,
        )
        self.legs = {
            phase: {result: self._legs.child(phase.value, result.value) for result in Result}
            for phase in Phase
        }
        self.retried = {result: self._retries.child(result.value) for result in Result}
        self.outcomes = Counts(
            "tandem_sidecar_outcomes_total",
            "Requests ended, by how: answered, failed, cut, abandoned.",
            ["outcome"],
            registry=registry,
        )
        first_byte = Distributions(
            "tandem_sidecar_first_byte_seconds",
            "Seconds from a generation request read to its answer's first byte written.",
            FIRST_BYTE_BUCKETS,
            [names.ROUTING_PATH_LABEL],
            registry=registry,
        )
        self.first_byte = {path: first_byte.child(path.value) for path in RoutingPath}
        self.client_left = Counts(
            "tandem_sidecar_client_left_total",
            "Clients that left before their answer's end, by when.",
            ["moment"],
            registry=registry,
        )
        self.ignored_candidates = Counts(
            "tandem_sidecar_ignored_candidates_total",
            "Prefill addresses named without a signature and outside --prefill-allow.",
            registry=registry,
        ).child()
        self._unified = Counts(
            "tandem_sidecar_unified_total",
            "Requests served by one engine, by why.",
            ["reason"],
            registry=registry,
            limit=_MAX_REASONS,
        )

    def unified(self, reason: str) -> None:
        """Count a request that one engine serves."""
        self._unified.child(_label(reason)).inc()

    def watch(
        self,
        name: str,
        text: str,
        read: Callable[[], Iterable[Sample]],
        labels: Sequence[str] = (),
    ) -> None:
        """Export a gauge that is read at each scrape; who reads bounds its label values."""
        self.registry.register(_Reading(name, text, labels, read))

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


@lru_cache(maxsize=4 * _MAX_REASONS)
def _label(reason: str) -> str:
    return reason if _REASON.fullmatch(reason) else OTHER
