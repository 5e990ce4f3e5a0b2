"""One metric under its name in llm-d 0.10 and, as llm-d does, under its older name; and the names
of the metrics of requests, with labels and help texts.
"""

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


_MODEL: Final = ("model_name", "target_model_name")
_FLOW: Final = (*_MODEL, "fairness_id", "priority")
_PLUGIN: Final = ("plugin_name", "plugin_type")
_OBJECTIVE: Final = "inference_objective_"

TOTAL: Final = Names(
    "request_total", _FLOW, "Requests that name a model and were placed.",
    f"{_OBJECTIVE}request_total", (*_MODEL, "priority"),
)  # fmt: skip
ERRORS: Final = Names(
    "request_error_total", (*_FLOW, "error_code"),
    "Requests that the EPP refused, by reason, and answers with 4xx and 5xx (ModelServerError).",
    f"{_OBJECTIVE}request_error_total", (*_MODEL, "error_code"),
)  # fmt: skip
RUNNING: Final = Names(
    "request_running", _FLOW, "Requests that were placed and have not ended.",
    f"{_OBJECTIVE}running_requests", ("model_name",),
)  # fmt: skip
DURATION: Final = Names(
    "request_duration_seconds", _FLOW, "Seconds from the request's complete body to its end.",
    f"{_OBJECTIVE}request_duration_seconds", _MODEL,
)  # fmt: skip
TTFT: Final = Names(
    "request_ttft_seconds", (*_FLOW, "streaming"),
    "Seconds from the request's complete body to the first token of a stream.",
)  # fmt: skip
INPUT: Final = Names(
    "request_input_tokens", _FLOW,
    "Prompt tokens, as the engine counted them where the answer's head tells, else as estimated.",
    f"{_OBJECTIVE}input_tokens", _MODEL,
)  # fmt: skip
CACHED: Final = Names(
    "request_cached_tokens", _FLOW, "Prompt tokens read from the engine's cache, where it tells.",
    f"{_OBJECTIVE}prompt_cached_tokens", _MODEL,
)  # fmt: skip
PREDICTED: Final = Names(
    "request_predicted_ttft_seconds", (*_PLUGIN, *_MODEL),
    "Predicted seconds to the first token; see tandem_epp_ttft_prediction_error.",
    f"{_OBJECTIVE}request_predicted_ttft_seconds", _MODEL,
)  # fmt: skip
ATTEMPTS: Final = Names(
    "scheduler_attempts_total",
    ("status", "target_model_name", "endpoint_name", "namespace", "port"),
    "Choices of pods, by the decode pod that was chosen; status failure: no pod could be.",
    "inference_extension_scheduler_attempts_total",
    ("status", "target_model_name", "pod_name", "namespace", "port"),
)
DECISIONS: Final = Names(
    "disagg_decision_total", (*_PLUGIN, "model_name", "decision_type"),
    "Placed requests, by whether prefill and decode run on two pods.",
    "llm_d_inference_scheduler_disagg_decision_total", ("model_name", "decision_type"),
)  # fmt: skip
REWRITES: Final = Names(
    "model_rewrite_decisions_total", ("model_rewrite_name", "model_name", "target_model"),
    "Placed requests that another model serves, because an InferenceModelRewrite says so.",
    "inference_extension_model_rewrite_decisions_total",
    ("model_rewrite_name", "model_name", "target_model"),
)  # fmt: skip
HIT_RATIO: Final = Names(
    "prefix_indexer_hit_ratio", _PLUGIN,
    "Share of a prompt that the prefix index found on the decode pod.",
    "inference_extension_prefix_indexer_hit_ratio", (),
)  # fmt: skip
