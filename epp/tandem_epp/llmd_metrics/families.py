"""One metric under its name in llm-d 0.10 and, as llm-d does, under its older name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tandem_contract.fast_metrics import Histogram

PREFIX: Final = "llm_d_epp_"

Labels = Mapping[str, str]

FLOW: Final = {"fairness_id": "default-flow", "priority": "0"}
"""llm-d's labels of a request without a flow or a priority: there are none here."""


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
    """The gauge under all of its names."""
    values = list(rows)
    families: list[Metric] = []
    for name, labels, text in names.all():
        family = GaugeMetricFamily(name, text, labels=labels)
        for row, value in values:
            family.add_metric([row[label] for label in labels], value)
        families.append(family)
    return families


def counters(names: Names, rows: Iterable[tuple[Labels, float]]) -> list[Metric]:
    """The counter under all of its names. The older one may have fewer labels: rows with the same
    are added up."""
    values = list(rows)
    families: list[Metric] = []
    for name, labels, text in names.all():
        sums: dict[tuple[str, ...], float] = {}
        for row, value in values:
            key = tuple(row[label] for label in labels)
            sums[key] = sums.get(key, 0.0) + value
        family = CounterMetricFamily(name, text, labels=labels)
        for key, total in sums.items():
            family.add_metric(key, total)
        families.append(family)
    return families


def histograms(names: Names, rows: Iterable[tuple[Labels, Histogram]]) -> list[Metric]:
    """The histogram under all of its names."""
    values = list(rows)
    families: list[Metric] = []
    for name, labels, text in names.all():
        family = HistogramMetricFamily(name, text, labels=labels)
        for row, histogram in values:
            family.add_metric(
                [row[label] for label in labels], histogram.cumulative(), sum_value=histogram.sum
            )
        families.append(family)
    return families
