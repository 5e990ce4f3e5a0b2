"""The sidecar's Prometheus metrics, `disaggregated_*` and `tandem_sidecar_*`.

Label values are bounded: paths, phases, results, outcomes and kinds are enumerations, backends are
pods that answered, reasons come from the sidecar or from a signed plan. Beyond a family's limit,
values are counted as `other`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib.metadata import version
from time import time
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_contract import metrics as names
from tandem_contract.fast_metrics import OTHER, CounterVec, HistogramVec
from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.timing import Timing

from .moves import MoveCause, MoveReport, MoveResult
from .record import MoveMethod, Phase, Result

FIRST_BYTE_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 30, 60, 120,
)  # fmt: skip
"""Bucket bounds in seconds of prefill legs and first bytes. Objectives for the time to first token
lie between 0.1 s and 10 s. There, neighbouring bounds differ by a factor of about 1.5, which limits
the error of a quantile to the same factor."""
DECODE_BUCKETS: Final = (
    0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1800,
)  # fmt: skip
"""Bucket bounds in seconds of decode legs: a token takes 5 to 50 ms, and an answer has one to
tens of thousands of tokens."""
TRANSFER_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
"""Bucket bounds in seconds of KV transfers. They include every bound of vLLM's own histogram, so
that `EngineCounters` can add its buckets without moving a value to another bucket."""

GAP_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 60,
)  # fmt: skip
"""Bucket bounds in seconds of the gap in a stream that moves: a failed connection is noticed at
once, a silent engine after seconds, and then the next one computes the prompt."""
_RESULTS: Final = {
    MoveMethod.NONE: (MoveResult.NO_ENGINE, MoveResult.IMPOSSIBLE),
    MoveMethod.AGAIN: (MoveResult.DONE, MoveResult.DIFFERED),
}
"""Results that are counted from 0 on, those of alerts among them, since the first of a series is no
increase; of other methods: done."""
_RECOMPUTING: Final = (MoveMethod.CONTINUED, MoveMethod.AGAIN)

FAILED_LOADS: Final = "tandem_sidecar_failed_loads_total"
REPORTS_TIMES: Final = "tandem_sidecar_engine_tells_times"
"""These two are read by `EngineCounters`; with several workers the supervisor reads them from the
workers' metrics pages."""

_MAX_REASONS: Final = 32
_REASON: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")

Sample = tuple[tuple[str, ...], float]
"""Label values, and the value of the gauge."""


class _CallbackGauge(Collector):
    """A gauge whose samples are computed at each scrape."""

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str], read: Callable[[], Iterable[Sample]]
    ) -> None:
        self._name, self._help, self._labels, self._read = name, help_text, labels, read

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self._name, self._help, labels=self._labels)
        for labels, value in self._read():
            family.add_metric(labels, value)
        yield family


class Metrics:
    """The metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        requests = CounterVec(
            names.REQUESTS,
            "Generation requests ended, by the path that served them.",
            [names.ROUTING_PATH_LABEL],
            registry=registry,
        )
        unserved = CounterVec(
            names.UNSERVED,
            "Those of disaggregated_requests_total that were answered with an error of the sidecar,"
            " because no engine answered; by the path that was tried.",
            [names.ROUTING_PATH_LABEL],
            registry=registry,
        )
        errors = CounterVec(
            names.ERRORS,
            "Failures by phase; one request may count several and still be answered.",
            [names.PHASE_LABEL],
            registry=registry,
        )
        # All enumerated label values exist from the start: rate() misses the first increment of a
        # series that appears with it.
        self.requests = {path: requests.child(path.value) for path in RoutingPath}
        self.unserved = {path: unserved.child(path.value) for path in RoutingPath}
        self.errors = {phase: errors.child(phase.value) for phase in ErrorPhase}
        self.prefill = HistogramVec(
            names.PREFILL_SECONDS,
            "Seconds from sending a prefill leg to its complete answer; failed legs are left out.",
            FIRST_BYTE_BUCKETS,
            [names.BACKEND_LABEL],
            registry=registry,
        )
        self.decode = HistogramVec(
            names.DECODE_SECONDS,
            "Seconds from sending a decode leg to the end of its answer; failed legs are left out.",
            DECODE_BUCKETS,
            [names.BACKEND_LABEL],
            registry=registry,
        )
        self.transfer = HistogramVec(
            names.KV_TRANSFER_SECONDS,
            "Seconds that a KV transfer took, measured by the decode engine.",
            TRANSFER_BUCKETS,
            registry=registry,
        ).child()
        self.fallbacks = CounterVec(
            names.FALLBACKS,
            "Requests that were planned as prefill and decode on two pods and served by one.",
            registry=registry,
        ).child()
        self.failed_loads = CounterVec(
            FAILED_LOADS,
            "Decode legs that had KV to load and were answered with an error; each is also counted"
            " as an error of phase kv_transfer.",
            registry=registry,
        ).child()
        self.streamed = CounterVec(
            names.STREAMED_HANDOFFS,
            "Hand-offs answered whose KV moved while the prefill computed it.",
            registry=registry,
        ).child()
        self.engine_reports_times: bool | None = None
        """Whether the decode engine's answers carry `x-tandem-timing`; None: it has not answered
        yet."""
        self._add_sidecar_metrics(registry)
        build = [((version("tandem-llm"),), 1.0)]
        self.add_gauge(
            "tandem_sidecar_build_info",
            "The version that runs; always 1.",
            lambda: build,
            ["version"],
        )
        started = [((), time())]
        self.add_gauge(
            names.PROCESS_START_TIME, "Start of the process, in Unix seconds.", lambda: started
        )
        self.add_gauge(
            REPORTS_TIMES,
            "1: KV transfer times come with the decode engine's answers; 0: they are read from the"
            " engine's own histogram; absent: it has not answered yet.",
            self._reports_times,
        )

    def _reports_times(self) -> list[Sample]:
        reports = self.engine_reports_times
        return [] if reports is None else [((), float(reports))]

    def _add_sidecar_metrics(self, registry: CollectorRegistry) -> None:
        self._retries = CounterVec(
            "tandem_sidecar_retries_total",
            "Legs that were retried, on another prefill pod or without the hand-off, by how the"
            " failed leg ended.",
            ["result"],
            registry=registry,
        )
        self._legs = CounterVec(
            "tandem_sidecar_legs_total",
            "Requests to engines that ended, by phase and result.",
            ["phase", "result"],
            registry=registry,
        )
        self.legs = {
            phase: {result: self._legs.child(phase.value, result.value) for result in Result}
            for phase in Phase
        }
        self.retried = {result: self._retries.child(result.value) for result in Result}
        self.outcomes = CounterVec(
            "tandem_sidecar_outcomes_total",
            "Requests ended, by outcome: answered, failed, cut, abandoned.",
            ["outcome"],
            registry=registry,
        )
        first_byte = HistogramVec(
            "tandem_sidecar_first_byte_seconds",
            "Seconds from reading a generation request to writing the first byte of its answer.",
            FIRST_BYTE_BUCKETS,
            [names.ROUTING_PATH_LABEL],
            registry=registry,
        )
        self.first_byte = {path: first_byte.child(path.value) for path in RoutingPath}
        prompt_tokens = CounterVec(
            "tandem_sidecar_prompt_tokens_total",
            "Prompt tokens by the usage of the answers: found in the engine's prefix cache,"
            " computed, or unknown where the usage does not say which. Answers without a"
            " usage are left out.",
            ["source"],
            registry=registry,
        )
        self.cached_tokens = prompt_tokens.child("cached")
        self.computed_tokens = prompt_tokens.child("computed")
        self.unknown_tokens = prompt_tokens.child("unknown")
        self.client_left = CounterVec(
            "tandem_sidecar_client_left_total",
            "Clients that left before the end of their answer, by moment.",
            ["moment"],
            registry=registry,
        )
        self._moves = CounterVec(
            "tandem_sidecar_stream_moves_total",
            "Requests given to another engine because theirs failed or drains, each time, by cause,"
            " method and result; method none: those that no engine went on with.",
            ["cause", "method", "result"],
            registry=registry,
        )
        for cause in MoveCause:
            for method in MoveMethod:
                for result in _RESULTS.get(method, [MoveResult.DONE]):
                    self._moves.child(cause, method, result)
        self._gaps = HistogramVec(
            "tandem_sidecar_stream_gap_seconds",
            "Seconds between the last bytes that a client got from one engine and the first of the"
            " next, by what made the stream move.",
            GAP_BUCKETS,
            ["cause"],
            registry=registry,
        )
        recomputed = CounterVec(
            "tandem_sidecar_stream_recomputed_tokens_total",
            "Tokens that other engines were given to compute once more, by method: continued,"
            " prompt and answer as one prompt, of which a cache may have a part; again, those of"
            " the answer that the client had, an event counting as one.",
            ["method"],
            registry=registry,
        )
        self._recomputed = {method: recomputed.child(method) for method in _RECOMPUTING}
        self.ignored_candidates = CounterVec(
            "tandem_sidecar_ignored_candidates_total",
            "Prefill addresses named without a signature and outside --prefill-allow.",
            registry=registry,
        ).child()
        self._unified = CounterVec(
            "tandem_sidecar_unified_total",
            "Requests served by one engine, by reason.",
            ["reason"],
            registry=registry,
            # Signed plans contain reasons, too, and those of another EPP are not known here.
            limit=_MAX_REASONS,
        )

    def count_unified(self, reason: str) -> None:
        """Count a request that one engine served, by the reason for it."""
        self._unified.child(_reason_label(reason)).inc()

    def count_move(self, report: MoveReport) -> None:
        """Count a request that was given to another engine, or could not be."""
        self._moves.child(report.cause, report.method, report.result or OTHER).inc()
        if report.gap is not None:
            self._gaps.child(report.cause).observe(report.gap)
        if report.recomputed:
            self._recomputed[report.method].inc(report.recomputed)

    def count_prompt(self, timing: Timing) -> None:
        """Count the prompt tokens of an answered request."""
        if timing.cached is not None and timing.computed is not None:
            self.cached_tokens.inc(timing.cached)
            self.computed_tokens.inc(timing.computed)
        elif timing.prompt is not None:
            self.unknown_tokens.inc(timing.prompt)

    def add_gauge(
        self,
        name: str,
        help_text: str,
        read: Callable[[], Iterable[Sample]],
        labels: Sequence[str] = (),
    ) -> None:
        """Export a gauge that `read` computes at each scrape; `read` bounds its label values."""
        self.registry.register(_CallbackGauge(name, help_text, labels, read))

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


@lru_cache(maxsize=4 * _MAX_REASONS)
def _reason_label(reason: str) -> str:
    return reason if _REASON.fullmatch(reason) else OTHER
