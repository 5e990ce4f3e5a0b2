"""Parses a metrics page in Prometheus' text format, and sums its samples."""

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Final, Self

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_DISTRIBUTIONS: Final = ("histogram", "summary")


class MetricsPage:
    """The samples of one page."""

    def __init__(
        self, samples: tuple[Sample, ...] = (), types: Mapping[str, str] | None = None
    ) -> None:
        """`types`: sample name → type of its metric, as the page says it."""
        self._samples = samples
        self._types = types or {}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError if `text` is not in Prometheus' text format."""
        families = list(text_string_to_metric_families(text))
        return cls(
            tuple(sample for family in families for sample in family.samples),
            {sample.name: family.type for family in families for sample in family.samples},
        )

    @cached_property
    def totals(self) -> Mapping[str, float]:
        """Sample name → sum over all label values."""
        totals: defaultdict[str, float] = defaultdict(float)
        for sample in self._samples:
            totals[sample.name] += sample.value
        return dict(totals)

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals of what only rises: counters, and count and sum of histograms and summaries."""
        return {
            name: value
            for name, value in self.totals.items()
            if (kind := self._types.get(name)) == "counter"
            or (kind in _DISTRIBUTIONS and name.endswith(("_count", "_sum")))
        }

    @property
    def gauges(self) -> Mapping[str, float]:
        """Totals of gauges; without the creation times of counters, which are no measurement."""
        return {
            name: value
            for name, value in self.totals.items()
            if self._types.get(name) == "gauge" and not name.endswith(("_created", "_info"))
        }

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
