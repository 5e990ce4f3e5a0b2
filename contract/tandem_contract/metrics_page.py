"""Parses a metrics page in Prometheus' text format, and sums its samples."""

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Self

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


class MetricsPage:
    """The samples of one page."""

    def __init__(self, samples: tuple[Sample, ...] = ()) -> None:
        self._samples = samples

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError if `text` is not in Prometheus' text format."""
        families = text_string_to_metric_families(text)
        return cls(tuple(sample for family in families for sample in family.samples))

    @cached_property
    def totals(self) -> Mapping[str, float]:
        """Sample name → sum over all label values."""
        totals: defaultdict[str, float] = defaultdict(float)
        for sample in self._samples:
            totals[sample.name] += sample.value
        return dict(totals)

    def totals_by_label(self, name: str, label: str) -> dict[str, float]:
        """Value of `label` → sum of the samples `name` that have it; "" for samples without it."""
        totals: defaultdict[str, float] = defaultdict(float)
        for sample in self._samples:
            if sample.name == name:
                totals[sample.labels.get(label, "")] += sample.value
        return dict(totals)

    def labels(self, name: str) -> Mapping[str, str]:
        """The labels of the last sample `name`, as of an info metric; empty without one."""
        return next((dict(s.labels) for s in reversed(self._samples) if s.name == name), {})
