"""The connector's metrics on vLLM's /metrics page.

    SchedulerSide ──► Counts ──► StorageStats ──vLLM──► StoragePromMetrics ──► prometheus_client

vLLM sends stats from the engine to the API servers as dictionaries of plain values.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tandem_contract import vllm_storage as names
from tandem_kvstore.errors import Reason
from tandem_kvstore.guard.breaker import BreakerState

_LOAD_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


def _empty() -> dict[str, Any]:
    return {
        "loaded_tokens": 0, "loaded_bytes": 0, "stored_tokens": 0, "load_seconds": [],
        "transfer_seconds": [], "failed_transfers": 0,
        "not_loaded": {}, "not_stored": {}, "breaker": None, "failure": None,
    }  # fmt: skip


class Counts:
    """Counts since the last `take`. Locked, because look-ups count in the store's thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._data = _empty()
        self._is_empty = True

    def add_loaded(self, tokens: int, size: int, seconds: float) -> None:
        with self._lock:
            self._is_empty = False
            self._data["loaded_tokens"] += tokens
            self._data["loaded_bytes"] += size
            self._data["load_seconds"].append(seconds)

    def add_stored(self, tokens: int) -> None:
        with self._lock:
            self._is_empty = False
            self._data["stored_tokens"] += tokens

    def add_transfer(self, seconds: float) -> None:
        with self._lock:
            self._is_empty = False
            self._data["transfer_seconds"].append(seconds)

    def add_failed_transfer(self) -> None:
        with self._lock:
            self._is_empty = False
            self._data["failed_transfers"] += 1

    def add_not_loaded(self, chunks: int, reason: Reason) -> None:
        self._add("not_loaded", reason, chunks)

    def add_not_stored(self, reason: Reason) -> None:
        self._add("not_stored", reason, 1)

    def set_breaker(self, state: BreakerState) -> None:
        with self._lock:
            self._is_empty = False
            self._data["breaker"] = int(state)

    def set_failure(self, message: str) -> None:
        with self._lock:
            self._is_empty = False
            self._data["failure"] = message

    def take(self) -> dict[str, Any] | None:
        """The counts since the last call; None: nothing happened."""
        with self._lock:
            if self._is_empty:
                return None
            data, self._data, self._is_empty = self._data, _empty(), True
            return data

    def _add(self, name: str, reason: Reason, count: int) -> None:
        with self._lock:
            self._is_empty = False
            reasons = self._data[name]
            reasons[reason.value] = reasons.get(reason.value, 0) + count


class StorageStats(KVConnectorStats):
    """The counts of an interval."""

    def reset(self) -> None:
        self.data = _empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        if not self.data:
            self.reset()
        for name in (
            *("loaded_tokens", "loaded_bytes", "stored_tokens", "load_seconds"),
            *("transfer_seconds", "failed_transfers"),
        ):
            self.data[name] += other.data[name]
        for name in ("not_loaded", "not_stored"):
            for reason, count in other.data[name].items():
                self.data[name][reason] = self.data[name].get(reason, 0) + count
        for name in ("breaker", "failure"):
            if other.data[name] is not None:
                self.data[name] = other.data[name]
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds = self.data["load_seconds"]
        return {
            "Tokens loaded from storage": self.data["loaded_tokens"],
            "Tokens stored": self.data["stored_tokens"],
            "Mean seconds of a load": sum(seconds) / len(seconds) if seconds else 0.0,
            "Chunks not loaded": sum(self.data["not_loaded"].values()),
            "Chunks not stored": sum(self.data["not_stored"].values()),
        }

    def is_empty(self) -> bool:
        return not self.data or self.data == _empty()


class StoragePromMetrics(KVConnectorPromMetrics):
    """The metrics, one set for each engine behind an API server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def counter(name: str, text: str, *labels: str) -> Any:
            return metric_types[Counter](
                name=name, documentation=text, labelnames=[*labelnames, *labels]
            )

        self._loaded = counter(names.LOADED_TOKENS, "Prompt tokens whose KV came from storage.")
        self._bytes = counter(names.LOADED_BYTES, "Bytes of KV that came from storage.")
        self._stored = counter(names.STORED_TOKENS, "Tokens whose KV was written to storage.")
        self._not_loaded = counter(
            names.NOT_LOADED_CHUNKS, "Chunks that were computed, by the reason.", "reason"
        )
        self._not_stored = counter(
            names.NOT_STORED_CHUNKS, "Chunks that were not written, by the reason.", "reason"
        )

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Any:
            return metric_types[Histogram](
                name=name,
                documentation=text,
                buckets=list(bounds),
                labelnames=labelnames,
            )

        self._seconds = histogram(
            names.LOAD_SECONDS, "Seconds of a load from storage.", _LOAD_BOUNDS
        )
        self._transfers = histogram(
            names.TRANSFER_SECONDS,
            "Seconds of a hand-off's look-up and load on a decode engine.",
            names.TRANSFER_BUCKETS,
        )
        self._failed = counter(
            names.FAILED_TRANSFERS, "Hand-offs whose KV was not loaded as a whole."
        )
        self._breaker = metric_types[Gauge](
            name=names.BREAKER_STATE,
            documentation="Circuit breaker of the store: 0 closed, 1 half-open, 2 open.",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
        self._failure = metric_types[Gauge](
            name=names.FAILURE,
            documentation="1 for the newest failure of the store, 0 for those before.",
            labelnames=[*labelnames, "message"],
            multiprocess_mode="mostrecent",
        )
        self._failure_message: dict[int, str] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        self._loaded.labels(*labels).inc(transfer_stats_data["loaded_tokens"])
        self._bytes.labels(*labels).inc(transfer_stats_data["loaded_bytes"])
        self._stored.labels(*labels).inc(transfer_stats_data["stored_tokens"])
        for reason, count in transfer_stats_data["not_loaded"].items():
            self._not_loaded.labels(*labels, reason).inc(count)
        for reason, count in transfer_stats_data["not_stored"].items():
            self._not_stored.labels(*labels, reason).inc(count)
        for seconds in transfer_stats_data["load_seconds"]:
            self._seconds.labels(*labels).observe(seconds)
        for seconds in transfer_stats_data["transfer_seconds"]:
            self._transfers.labels(*labels).observe(seconds)
        self._failed.labels(*labels).inc(transfer_stats_data["failed_transfers"])
        if transfer_stats_data["breaker"] is not None:
            self._breaker.labels(*labels).set(transfer_stats_data["breaker"])
        if (message := transfer_stats_data["failure"]) is not None:
            before = self._failure_message.get(engine_idx)
            if before is not None and before != message:
                self._failure.labels(*labels, before).set(0)
            self._failure.labels(*labels, message).set(1)
            self._failure_message[engine_idx] = message
