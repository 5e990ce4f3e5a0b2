"""Counts and distributions that cost the data path an addition, read out when Prometheus asks.

    paths = Counts("x_total", "Requests ended.", ["path"], registry=registry)
    unified = paths.child("unified")        # once, kept
    unified.inc()                           # per request

One event loop writes them, so they take no lock; prometheus_client's own would cost ten times this.
A family holds at most `limit` children: whoever comes later is counted as `other`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

OTHER: Final = "other"
_LIMIT: Final = 1000


class Count:
    """A number that grows, or a level that moves."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        self.value -= amount


class Distribution:
    """How often values fell below each of some bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        """Upper, inclusive, ascending; the last bucket, without one, is the rest."""
        self.counts = [0.0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def fold(self, bound: float, count: float) -> None:
        """Add `count` values of at most `bound`; their sum is added apart from it."""
        self.counts[bisect_left(self.bounds, bound)] += count

    def cumulative(self) -> list[tuple[str, float]]:
        """`(bound, values up to it)` as Prometheus writes buckets."""
        total, buckets = 0.0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        return buckets


class Counts(Collector):
    """A counter or gauge by labels."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
        gauge: bool = False,
        limit: int = _LIMIT,
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._family = GaugeMetricFamily if gauge else CounterMetricFamily
        self._limit = limit
        self._children: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def child(self, *values: str) -> Count:
        """The count of these label values."""
        if (child := self._children.get(values)) is None:
            if len(self._children) >= self._limit:
                values = tuple(OTHER for _ in values)
            child = self._children.setdefault(values, Count())
        return child

    def collect(self) -> Iterable[Metric]:
        family = self._family(self._name, self._text, labels=self._labels)
        for values, child in self._children.items():
            family.add_metric(values, child.value)
        yield family


class Distributions(Collector):
    """A histogram by labels."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
        limit: int = _LIMIT,
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._limit = limit
        self._children: dict[tuple[str, ...], Distribution] = {}
        registry.register(self)

    def child(self, *values: str) -> Distribution:
        """The distribution of these label values."""
        if (child := self._children.get(values)) is None:
            if len(self._children) >= self._limit:
                values = tuple(OTHER for _ in values)
            child = self._children.setdefault(values, Distribution(self._bounds))
        return child

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, child in self._children.items():
            family.add_metric(values, child.cumulative(), child.sum)
        yield family
