"""The engine's metrics under vLLM's names, in a registry of their own.

The engine calls the `record_*` methods, the server times sequences with `SequenceTimes`, and gauges
are read from the engine's `stats` at each scrape.
"""

import time
from collections.abc import Callable
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from tandem_contract import metrics as names
from tandem_contract.timing import Timing

from .blocks import BlockEvent
from .observer import Stats
from .tier_metrics import LABELS, TierMetrics
from .types import FinishReason, PullResult

_RANK: Final = "0"
"""Value of the label `engine`: the data-parallel rank; this engine has only one."""
_TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_E2E_BUCKETS: Final = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TRANSFER_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0,
)  # fmt: skip
_TOKEN_BUCKETS: Final = tuple(scale * 10.0**power for power in range(6) for scale in (1, 2, 5))
_BYTES_BUCKETS: Final = tuple(2.0**power for power in range(11, 36, 2))


class EngineMetrics(TierMetrics):
    """Every metric the engine exports; an `EngineObserver`.

    `on_kv_event` gets the block events, which are not metrics.
    """

    def __init__(
        self, model_name: str, on_kv_event: Callable[[BlockEvent], None] | None = None
    ) -> None:
        # Without this, each counter and histogram adds a series with its creation time.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
        self.registry = CollectorRegistry()
        # From the process start time the EPP sees a restart, after which the caches are empty.
        ProcessCollector(registry=self.registry)
        self._on_kv_event = on_kv_event
        self._labels = (model_name, _RANK)
        super().__init__(self.registry, self._labels)
        self._prefix_queries = self._counter(names.ENGINE_PREFIX_QUERIES, "Prompt tokens looked up")
        self._prefix_hits = self._counter(names.ENGINE_PREFIX_HITS, "Prompt tokens found cached")
        self._external_queries = self._counter(
            names.ENGINE_EXTERNAL_QUERIES, "Prompt tokens asked of a producer"
        )
        self._external_hits = self._counter(
            names.ENGINE_EXTERNAL_HITS, "Prompt tokens whose KV a producer sent"
        )
        self._prompt = self._counter(names.ENGINE_PROMPT_TOKENS, "Prompt tokens processed")
        by_source = Counter(
            names.ENGINE_PROMPT_BY_SOURCE,
            "Prompt tokens by where their KV came from",
            (*LABELS, "source"),
            registry=self.registry,
        )
        self._by_source = {
            source: by_source.labels(*self._labels, source) for source in names.PromptSource
        }
        self._generated_tokens = self._counter(names.ENGINE_GENERATION_TOKENS, "Tokens generated")
        self._preemptions = self._counter(
            names.ENGINE_PREEMPTIONS, "Sequences set back because blocks ran out"
        )
        self._pull_seconds = self._histogram(
            names.ENGINE_XFER_SECONDS, "Seconds a KV pull took", _TRANSFER_BUCKETS
        )
        self._pull_bytes = self._histogram(
            names.ENGINE_XFER_BYTES, "Bytes a KV pull brought", _BYTES_BUCKETS
        )
        self._pull_failures = self._counter(names.ENGINE_XFER_FAILED, "KV pulls that failed")
        self._expired = self._counter(
            names.ENGINE_KV_EXPIRED, "Requests whose KV no reader fetched before its lease ended"
        )
        self._ttft = self._histogram(
            names.ENGINE_TTFT_SECONDS, "Seconds from arrival to the first token", _TTFT_BUCKETS
        )
        self._itl = self._histogram(
            names.ENGINE_ITL_SECONDS, "Seconds between tokens of a sequence", _ITL_BUCKETS
        )
        self._e2e = self._histogram(
            names.ENGINE_E2E_SECONDS, "Seconds from arrival to the last token", _E2E_BUCKETS
        )
        self._queue = self._histogram(
            names.ENGINE_QUEUE_SECONDS, "Seconds a sequence waited for its first step", _E2E_BUCKETS
        )
        self._prefill = self._histogram(
            names.ENGINE_PREFILL_SECONDS,
            "Seconds from a sequence's first step to its first token",
            _E2E_BUCKETS,
        )
        self._decode = self._histogram(
            names.ENGINE_DECODE_SECONDS,
            "Seconds from a sequence's first token to its last one",
            _E2E_BUCKETS,
        )
        self._prefill_tokens = self._histogram(
            names.ENGINE_PREFILL_TOKENS,
            "Prompt tokens computed for a sequence, neither cached nor pulled",
            _TOKEN_BUCKETS,
        )
        self._success = Counter(
            names.ENGINE_SUCCESS,
            "Sequences ended, by reason",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        # Export zeros from the start: rate() misses the first value of a late series.
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*self._labels, reason)

    def watch(self, stats: Callable[[], Stats], *, block_size: int, num_blocks: int) -> None:
        """Export the gauges, read from `stats` at each scrape."""
        self._gauge(names.ENGINE_RUNNING, "Sequences running", lambda: stats().running)
        self._gauge(
            names.ENGINE_WAITING,
            "Sequences waiting, those waiting for remote KV included",
            lambda: stats().waiting,
        )
        waiting = Gauge(
            names.ENGINE_WAITING_BY_REASON,
            "Sequences waiting, by what for",
            (*LABELS, "reason"),
            registry=self.registry,
        )
        waiting.labels(*self._labels, "capacity").set_function(
            lambda: stats().waiting - stats().waiting_for_kv
        )
        waiting.labels(*self._labels, "deferred").set_function(lambda: stats().waiting_for_kv)
        fetching = Gauge(
            names.ENGINE_KV_FETCH,
            "Sequences whose KV is loaded from another engine, by stage",
            (*LABELS, "stage"),
            registry=self.registry,
        )
        loading = fetching.labels(*self._labels, names.KV_FETCH_LOADING)
        loading.set_function(lambda: stats().waiting_for_kv)
        self._gauge(names.ENGINE_KV_USAGE, "KV blocks in use, 0 to 1", lambda: stats().kv_usage)
        self._gauge(
            names.ENGINE_HELD,
            "Finished prompts whose KV waits for a reader",
            lambda: stats().held_requests,
        )
        Gauge(
            names.ENGINE_CACHE_CONFIG,
            "The KV cache's size, in its labels; always 1",
            (*LABELS, "block_size", "num_gpu_blocks"),
            registry=self.registry,
        ).labels(*self._labels, str(block_size), str(num_blocks)).set(1)

    # Called by the engine (EngineObserver).

    def record_prefix_lookup(self, queries: int, hits: int) -> None:
        """Count prompt tokens looked up and found in the prefix cache."""
        self._prefix_queries.inc(queries)
        self._prefix_hits.inc(hits)

    def record_external_lookup(self, queries: int, hits: int) -> None:
        """Count prompt tokens to be pulled from a producer, and those loaded."""
        self._external_queries.inc(queries)
        self._external_hits.inc(hits)

    def record_prompt(self, computed: int, cached: int, external: int) -> None:
        """Count a complete prompt's tokens by where their KV came from."""
        self._prompt.inc(computed + cached + external)
        self._by_source[names.PromptSource.COMPUTED].inc(computed)
        self._by_source[names.PromptSource.CACHED].inc(cached)
        self._by_source[names.PromptSource.EXTERNAL].inc(external)

    def record_generated_tokens(self, tokens: int) -> None:
        """Count generated tokens."""
        self._generated_tokens.inc(tokens)

    def record_preemption(self) -> None:
        """Count a preemption."""
        self._preemptions.inc()

    def record_pull(self, pulled: PullResult) -> None:
        """Count a successful KV pull, its bytes and seconds."""
        self._pull_seconds.observe(pulled.seconds)
        self._pull_bytes.observe(pulled.bytes)

    def record_pull_failure(self) -> None:
        """Count a failed KV pull."""
        self._pull_failures.inc()

    def record_kv_expiry(self) -> None:
        """Count a lease that ended before the KV was read."""
        self._expired.inc()

    def record_kv_event(self, event: BlockEvent) -> None:
        """Pass on a change of the prefix cache."""
        if self._on_kv_event is not None:
            self._on_kv_event(event)

    # Called by the server.

    def start_sequence(self) -> "SequenceTimes":
        """Start timing a sequence that arrives now."""
        return SequenceTimes(self)

    def observe_first_token(self, seconds: float) -> None:
        """Observe the seconds from arrival to the first token."""
        self._ttft.observe(seconds)

    def observe_next_token(self, seconds: float) -> None:
        """Observe the seconds between two deliveries of one sequence."""
        self._itl.observe(seconds)

    def observe_end(
        self, reason: FinishReason, seconds: float, decoding: float, timing: Timing | None
    ) -> None:
        """Count a sequence that ended `seconds` after its arrival and decoded for `decoding`
        seconds; `timing` is that of its first token. vLLM observes the prefill at the end, too."""
        self._success.labels(*self._labels, reason).inc()
        self._e2e.observe(seconds)
        if timing is not None:
            self._queue.observe(timing.queue or 0.0)
            self._prefill.observe(timing.compute or 0.0)
            self._decode.observe(decoding)
            self._prefill_tokens.observe(timing.computed or 0)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, LABELS, registry=self.registry, buckets=buckets)
        return histogram.labels(*self._labels)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        gauge = Gauge(name, text, LABELS, registry=self.registry)
        gauge.labels(*self._labels).set_function(value)


class SequenceTimes:
    """Times one sequence: its arrival, and its first and last delivery."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._arrived = time.perf_counter()
        self._first: float | None = None
        self._last: float | None = None

    def observe_tokens(self) -> None:
        """Observe a delivery of tokens."""
        now = time.perf_counter()
        if self._last is None:
            self._first = now
            self._metrics.observe_first_token(now - self._arrived)
        else:
            self._metrics.observe_next_token(now - self._last)
        self._last = now

    def observe_end(self, reason: FinishReason, timing: Timing | None = None) -> None:
        """Observe the end of the sequence; `timing` is that of its first token, if it got one."""
        first, last = self._first, self._last
        decoding = last - first if first is not None and last is not None else 0.0
        self._metrics.observe_end(reason, time.perf_counter() - self._arrived, decoding, timing)
