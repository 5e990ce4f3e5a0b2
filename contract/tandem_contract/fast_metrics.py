"""Counters and histograms without locks, exported through prometheus_client.

    paths = CounterVec("x_total", "Requests ended.", ["path"], registry=registry)
    unified = paths.child("unified")        # once, at start
    unified.inc()                           # per request

Only the event loop's thread updates them, so they need no lock: prometheus_client's own metrics
cost ten times as much per update. A family has at most `limit` children; further label values are
counted together under `other`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

OTHER: Final = "other"
_LIMIT: Final = 1000
"""Children of a family: bounds memory and the size of a scrape when label values are pod names."""


class Counter:
    """One value. Prometheus expects that it never falls, except to zero at a restart."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class Histogram:
    """How many values fell into each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        """Upper bounds of the buckets, inclusive, ascending; one more bucket is unbounded."""
        self.counts = [0.0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def fold(self, bound: float, count: float) -> None:
        """Add `count` values to the bucket of `bound`. The caller adds their sum to `sum`."""
        self.counts[bisect_left(self.bounds, bound)] += count

    def cumulative(self) -> list[tuple[str, float]]:
        """`(bound, number of values up to it)`, as Prometheus writes buckets."""
        total, buckets = 0.0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        return buckets


class CounterVec(Collector):
    """A counter family: one `Counter` for each set of label values."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
        limit: int = _LIMIT,
    ) -> None:
        self._name, self._help, self._labels = name, help_text, labels
        self._limit = limit
        self._children: dict[tuple[str, ...], Counter] = {}
        registry.register(self)

    def child(self, *values: str) -> Counter:
        """The counter of these label values, in the order of the labels."""
        if (child := self._children.get(values)) is None:
            # Label values that have a child keep it; only new ones share `other`.
            if len(self._children) >= self._limit:
                values = tuple(OTHER for _ in values)
            child = self._children.setdefault(values, Counter())
        return child

    def collect(self) -> Iterable[Metric]:
        # Runs on the event loop's thread, like the updates: no child is added meanwhile.
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, child in self._children.items():
            family.add_metric(values, child.value)
        yield family


class HistogramVec(Collector):
    """A histogram family: one `Histogram` for each set of label values."""

    def __init__(
        self,
        name: str,
        help_text: str,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
        limit: int = _LIMIT,
    ) -> None:
        self._name, self._help, self._labels, self._bounds = name, help_text, labels, bounds
        self._limit = limit
        self._children: dict[tuple[str, ...], Histogram] = {}
        registry.register(self)

    def child(self, *values: str) -> Histogram:
        """The histogram of these label values, in the order of the labels."""
        if (child := self._children.get(values)) is None:
            if len(self._children) >= self._limit:
                values = tuple(OTHER for _ in values)
            child = self._children.setdefault(values, Histogram(self._bounds))
        return child

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, child in self._children.items():
            family.add_metric(values, child.cumulative(), child.sum)
        yield family
