"""Metrics pages as vLLM 0.32 writes them: its names, labels, types and order of families, through
the same client library."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tandem_contract import metrics as names

BUCKETS = tuple(2.0**power for power in range(-8, 12))
LABELS = ("model_name", "engine")


class VllmPage:
    """The metrics of a process with one or more data-parallel ranks."""

    def __init__(self, engines: Iterable[int] = (0,), model: str = "m} 7") -> None:
        self.registry = CollectorRegistry()
        self.engines = tuple(map(str, engines))
        self.model = model
        self.started = Gauge(names.PROCESS_START_TIME, "Start time.", registry=self.registry)
        self.started.set(1.7e9)
        self.running = self._gauge(names.ENGINE_RUNNING)
        self.waiting = self._gauge(names.ENGINE_WAITING)
        self.by_reason = self._gauge(names.ENGINE_WAITING_BY_REASON, "reason")
        self.kv_usage = self._gauge(names.ENGINE_KV_USAGE)
        self.hits = self._counter(names.ENGINE_PREFIX_HITS)
        self.external_hits = self._counter(names.ENGINE_EXTERNAL_HITS)
        self.preemptions = self._counter(names.ENGINE_PREEMPTIONS)
        self.prompt = self._counter(names.ENGINE_PROMPT_TOKENS)
        self.by_source = self._counter(names.ENGINE_PROMPT_BY_SOURCE, "source")
        self.generated = self._counter(names.ENGINE_GENERATION_TOKENS)
        self.itl = self._histogram(names.ENGINE_ITL_SECONDS)
        self.queue = self._histogram(names.ENGINE_QUEUE_SECONDS)
        self.prefill = self._histogram(names.ENGINE_PREFILL_SECONDS)
        self.decode = self._histogram(names.ENGINE_DECODE_SECONDS)
        self.prefill_tokens = self._histogram(names.ENGINE_PREFILL_TOKENS)
        self.config = self._gauge(
            names.ENGINE_CACHE_CONFIG, "block_size", "cache_dtype", "num_gpu_blocks"
        )
        for number, engine in enumerate(self.engines):
            self.config.labels(model, engine, "32", "auto", str(512 + number)).set(1)
            for gauge in (self.running, self.waiting, self.kv_usage):
                gauge.labels(model, engine).set(0)
            for reason in ("capacity", "deferred"):
                self.by_reason.labels(model, engine, reason).set(0)
            for histogram in (
                self.itl, self.queue, self.prefill, self.decode, self.prefill_tokens,
            ):  # fmt: skip
                histogram.labels(model, engine)

    def adapters(self, slots: int, running: str, waiting: str, at: float) -> None:
        """Report that these adapters are in use at `at`, Unix seconds."""
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        if not hasattr(self, "lora"):
            self.lora = Gauge(names.ENGINE_ADAPTERS, "LoRA.", labels, registry=self.registry)
        self.lora.labels(str(slots), running, waiting).set(at)

    def body(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, *labels: str) -> Gauge:
        return Gauge(name, f"{name} of an engine.", (*LABELS, *labels), registry=self.registry)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(name, f"{name} so far.", (*LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        return Histogram(name, f"{name} so far.", LABELS, registry=self.registry, buckets=BUCKETS)
