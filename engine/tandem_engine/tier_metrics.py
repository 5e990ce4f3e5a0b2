"""Metrics of the KV tiers: host memory and external storage."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem_contract import metrics as names
from tandem_kvstore.errors import Reason
from tandem_kvstore.guard.breaker import BreakerState

from .types import Tier

LABELS: Final = ("model_name", "engine")
"""Labels of every metric of the engine."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class TierMetrics:
    """What the tiers report; the part of `EngineObserver` that concerns them."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        self._tier_registry, self._tier_labels = registry, labels
        self._tier_loaded = self._by(names.ENGINE_TIER_LOADED, "Tokens whose KV was loaded", Tier)
        self._tier_stored = self._by(names.ENGINE_TIER_STORED, "Tokens whose KV was written", Tier)
        self._not_loaded = self._by(
            names.ENGINE_STORAGE_NOT_LOADED, "Chunks that were not loaded from storage", Reason
        )
        self._not_stored = self._by(
            names.ENGINE_STORAGE_NOT_STORED, "Chunks that were not written to storage", Reason
        )
        self._load_bytes = Counter(
            names.ENGINE_STORAGE_LOAD_BYTES, "Bytes loaded from storage", LABELS, registry=registry
        ).labels(*labels)
        self._load_seconds = Histogram(
            names.ENGINE_STORAGE_LOAD_SECONDS,
            "Seconds from the look-up in storage to the last verified block",
            LABELS,
            registry=registry,
            buckets=_SECONDS,
        ).labels(*labels)
        self._host_bytes = self._tier_gauge(
            names.ENGINE_HOST_TIER_BYTES, "Bytes of KV in host memory"
        )
        self._breaker = Gauge(
            names.ENGINE_STORAGE_BREAKER,
            "Circuit breaker of the external storage: 0 closed, 1 half-open, 2 open; absent until"
            " the storage was used",
            LABELS,
            registry=registry,
        )
        self._failure = Gauge(
            names.ENGINE_STORAGE_FAILURE,
            "1 for the newest failure of the external storage, 0 for those before",
            (*LABELS, "message"),
            registry=registry,
        )
        self._failure_message: str | None = None

    def record_tier_load(self, tier: Tier, tokens: int) -> None:
        """Count tokens whose KV was loaded from a tier."""
        self._tier_loaded[tier].inc(tokens)

    def record_tier_store(self, tier: Tier, tokens: int) -> None:
        """Count tokens whose KV was written to a tier."""
        self._tier_stored[tier].inc(tokens)

    def record_host_tier(self, size: int) -> None:
        """Show the size of the host tier."""
        self._host_bytes.set(size)

    def record_breaker(self, state: BreakerState) -> None:
        """Show the state of the circuit breaker."""
        self._breaker.labels(*self._tier_labels).set(state)

    def record_failure(self, message: str) -> None:
        """Show the newest failure of the storage."""
        if self._failure_message is not None:
            self._failure.labels(*self._tier_labels, self._failure_message).set(0)
        self._failure.labels(*self._tier_labels, message).set(1)
        self._failure_message = message

    def record_load(self, chunks: int, size: int, seconds: float) -> None:
        """Count a load from storage, its bytes and seconds."""
        self._load_bytes.inc(size)
        self._load_seconds.observe(seconds)

    def record_not_loaded(self, chunks: int, reason: Reason) -> None:
        """Count chunks that were computed instead of loaded."""
        self._not_loaded[reason].inc(chunks)

    def record_stored(self, size: int, seconds: float, *, is_new: bool) -> None:
        """A chunk was written: counted in tokens by `record_tier_store`."""

    def record_not_stored(self, reason: Reason) -> None:
        """Count a chunk that was not written."""
        self._not_stored[reason].inc()

    def _tier_gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(name, text, LABELS, registry=self._tier_registry)
        return gauge.labels(*self._tier_labels)

    def _by(self, name: str, text: str, values: type[Tier] | type[Reason]) -> dict[str, Counter]:
        """A counter for each value of one label, with zeros from the start."""
        label = values.__name__.lower()
        counter = Counter(name, text, (*LABELS, label), registry=self._tier_registry)
        return {value: counter.labels(*self._tier_labels, value) for value in values}
