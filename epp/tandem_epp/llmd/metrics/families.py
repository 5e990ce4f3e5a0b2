"""One metric under its name in llm-d 0.10 and, as llm-d does, under its older name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tandem_contract.fast_metrics import Histogram

PREFIX: Final = "llm_d_epp_"

Labels = Mapping[str, str]
T = TypeVar("T")

FLOW: Final = {"fairness_id": "default-flow", "priority": "0"}
"""llm-d's labels of a request without a flow, which there are none of here, and without a
priority."""


@dataclass(frozen=True, slots=True)
class Pool:
    """What labels call the pods; empty: unknown."""

    name: str = ""
    """The InferencePool's name."""
    namespace: str = ""
    """The pods' namespace."""


NO_POOL: Final = Pool()


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one metric and their labels."""

    name: str
    """After `llm_d_epp_`, with `_total` for a counter."""
    labels: tuple[str, ...]
    text: str
    """The help text."""
    older: str = ""
    """The older name, complete; empty: there is none."""
    older_labels: tuple[str, ...] = ()

    def all(self) -> list[tuple[str, tuple[str, ...], str]]:
        """Every name with its labels and its help text."""
        names = [(PREFIX + self.name, self.labels, self.text)]
        if self.older:
            text = f"{self.text} Older name of {PREFIX}{self.name}."
            names.append((self.older, self.older_labels, text))
        return names


def gauges(names: Names, rows: Iterable[tuple[Labels, float]]) -> list[Metric]:
    """The gauge under all of its names. A name may have fewer labels than the rows: rows that are
    alike in those are added up."""
    values = list(rows)
    families: list[Metric] = []
    for name, labels, text in names.all():
        family = GaugeMetricFamily(name, text, labels=labels)
        for key, alike in _grouped(labels, values):
            family.add_metric(key, sum(alike))
        families.append(family)
    return families


def counters(names: Names, rows: Iterable[tuple[Labels, float]]) -> list[Metric]:
    """The counter, likewise."""
    values = list(rows)
    families: list[Metric] = []
    for name, labels, text in names.all():
        family = CounterMetricFamily(name, text, labels=labels)
        for key, alike in _grouped(labels, values):
            family.add_metric(key, sum(alike))
        families.append(family)
    return families


def histograms(names: Names, rows: Iterable[tuple[Labels, Histogram]]) -> list[Metric]:
    """The histogram, likewise."""
    values = list(rows)
    families: list[Metric] = []
    for name, labels, text in names.all():
        family = HistogramMetricFamily(name, text, labels=labels)
        for key, alike in _grouped(labels, values):
            total = _added(alike)
            family.add_metric(key, total.cumulative(), sum_value=total.sum)
        families.append(family)
    return families


def _grouped(
    labels: Sequence[str], rows: Iterable[tuple[Labels, T]]
) -> Iterable[tuple[tuple[str, ...], list[T]]]:
    """Values of `labels`, and what the rows with these values have."""
    groups: dict[tuple[str, ...], list[T]] = {}
    for row, value in rows:
        groups.setdefault(tuple(row[label] for label in labels), []).append(value)
    return groups.items()


def _added(parts: Sequence[Histogram]) -> Histogram:
    if len(parts) == 1:
        return parts[0]
    total = Histogram(parts[0].bounds)
    total.sum = sum(part.sum for part in parts)
    total.counts = [sum(counts) for counts in zip(*(part.counts for part in parts), strict=True)]
    return total
