"""Rows of the registry: llm-d's policies and detectors for flow control, and one of Tandem's."""

from typing import Any, Final

from tandem_contract.go_flags import parse_duration

from ...flow.ceilings import HoldbackCeilings, SoftCeilings, StaticCeilings
from ...flow.detectors import ConcurrencyDetector, UtilizationDetector
from .flow_parameters import (
    ConcurrencyDetectorParameters,
    HoldbackParameters,
    StaticLimitParameters,
    UtilizationDetectorParameters,
)
from .parameters import AnyParameters, NoParameters
from .plugin_types import Kind, Plugin

PREDICTED_DETECTOR: Final = "predicted-cost-detector"
UTILIZATION_DETECTOR: Final = "utilization-detector"
GLOBAL_STRICT: Final = "global-strict-fairness-policy"
FCFS: Final = "fcfs-ordering-policy"
STATIC_LIMIT: Final = "static-usage-limit-policy"


class PredictedDetector:
    """What `predicted-cost-detector` makes: the predictions say it, which flow control does without
    a detector."""


def _utilization(parameters: UtilizationDetectorParameters) -> UtilizationDetector:
    staleness = parse_duration(parameters.metricsStalenessThreshold)
    if staleness <= 0:
        raise ValueError("metricsStalenessThreshold must be above 0")
    return UtilizationDetector(
        parameters.queueDepthThreshold,
        parameters.kvCacheUtilThreshold,
        staleness,
        parameters.headroom,
    )


def _holdback(parameters: HoldbackParameters) -> HoldbackCeilings:
    lowest, highest = parameters.minCeiling, parameters.maxCeiling
    if lowest >= highest:
        raise ValueError(f"minCeiling {lowest:g} must be below maxCeiling {highest:g}")
    return HoldbackCeilings(lowest, highest, parameters.domain == "value")


FLOW: Final[tuple[Plugin[Any], ...]] = (
    Plugin(
        PREDICTED_DETECTOR, Kind.DETECTOR, NoParameters,
        "Tandem's: requests wait while the predictions say that no backend has room; no thresholds",
        lambda *_: PredictedDetector(),
    ),
    Plugin(
        UTILIZATION_DETECTOR, Kind.DETECTOR, UtilizationDetectorParameters,
        "backends are saturated by their queues and KV caches on average, with what was placed"
        " since the last scrape; llm-d's default in flow control",
        lambda p, _: _utilization(p),
    ),
    Plugin(
        "concurrency-detector", Kind.DETECTOR, ConcurrencyDetectorParameters,
        "backends are saturated by requests or prompt tokens in flight on average",
        lambda p, _: ConcurrencyDetector(
            p.maxConcurrency, p.maxTokenConcurrency, p.concurrencyMode, p.headroom
        ),
    ),
    Plugin(
        GLOBAL_STRICT, Kind.FAIRNESS, NoParameters,
        "in flow control, a priority's requests go as if one tenant had sent them; llm-d's default",
        lambda *_: "none",
    ),
    Plugin(
        "round-robin-fairness-policy", Kind.FAIRNESS, NoParameters,
        "in flow control, the tenants of a priority take turns",
        lambda *_: "requests",
    ),
    Plugin(
        "program-aware-fairness", Kind.FAIRNESS, AnyParameters,
        "in flow control, the tenants of a priority get equal shares of tokens, of prompt and"
        " answer; its parameters are ignored",
        lambda *_: "tokens",
    ),
    Plugin(
        FCFS, Kind.ORDERING, NoParameters,
        "in flow control, the request that came first goes first; llm-d's default",
        lambda *_: "arrival",
    ),
    Plugin(
        "edf-ordering-policy", Kind.ORDERING, NoParameters,
        "in flow control, the request whose time to wait ends first goes first",
        lambda *_: "deadline",
    ),
    Plugin(
        "slo-deadline-ordering-policy", Kind.ORDERING, NoParameters,
        "in flow control, the request goes first whose target for the time to the first token ends"
        " first; those without one go last",
        lambda *_: "ttft",
    ),
    Plugin(
        STATIC_LIMIT, Kind.USAGE_LIMIT, StaticLimitParameters,
        "in flow control, the saturation from which on requests wait; llm-d's default, with 1",
        lambda p, _: StaticCeilings(p.threshold),
    ),
    Plugin(
        "priority-holdback-policy", Kind.USAGE_LIMIT, HoldbackParameters,
        "in flow control, low priorities wait from a lower saturation on",
        lambda p, _: _holdback(p),
    ),
    Plugin(
        "soft-reflective-ceiling-policy", Kind.USAGE_LIMIT, NoParameters,
        "in flow control, low priorities go in a share of the time that falls with the saturation",
        lambda *_: SoftCeilings(),
    ),
)  # fmt: skip
