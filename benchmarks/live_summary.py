"""What the EPP's decisions say of a run: errors of the predicted TTFT, waiting, hit ratio. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem_contract.metrics_page import MetricsPage
from tandem_contract.trace import DecisionTrace
from tandem_loadtest.figures.distributions import percentile

ALL = "all"
"""Name of all paths together."""


def prediction_errors(decisions: Iterable[DecisionTrace]) -> dict[str, list[float]]:
    """Path → |predicted - measured| ÷ measured of each stream's TTFT; `all`: of all paths."""
    errors: dict[str, list[float]] = {ALL: []}
    for decision in decisions:
        predicted, measured, path = decision.predicted_ttft, decision.measured_ttft, decision.path
        if predicted is not None and measured and path is not None:
            error = abs(predicted - measured) / measured
            errors[ALL].append(error)
            errors.setdefault(path, []).append(error)
    return errors


def predicted_itl(decisions: Iterable[DecisionTrace]) -> float | None:
    """Median of the predicted ITL, in seconds; None: none was predicted."""
    values = [d.predicted_itl for d in decisions if d.predicted_itl is not None]
    return statistics.median(values) if values else None


def biases(decisions: Iterable[DecisionTrace]) -> dict[str, float]:
    """Path → median of measured - predicted TTFT, in seconds: what predictions leave out."""
    by_path: dict[str, list[float]] = {}
    for decision in decisions:
        predicted, measured = decision.predicted_ttft, decision.measured_ttft
        if predicted is not None and measured and decision.path is not None:
            by_path.setdefault(decision.path, []).append(measured - predicted)
    return {path: statistics.median(values) for path, values in sorted(by_path.items())}


def noise(seconds: Sequence[float]) -> float:
    """Median of |x - median| ÷ x: the error of predicting the median of requests that are equal.
    No prediction does better on this machine."""
    middle = statistics.median(seconds)
    return statistics.median(abs(x - middle) / x for x in seconds)


@dataclass(frozen=True, slots=True)
class Latencies:
    """How one run went. Times in seconds."""

    ttft_p50: float
    ttft_p99: float
    waiting_p50: float
    waiting_p99: float
    """Of TTFT less the time for which the engine computed the prompt, by its own report."""
    hit_ratio: float
    """Cached share of all prompt tokens, on the pods that computed the prompts."""


def latencies(decisions: Sequence[DecisionTrace]) -> Latencies:
    """The figures of a run by the EPP's records. Raises ValueError if no stream was answered."""
    ttfts, waits, cached, prompts = [], [], 0, 0
    for decision in decisions:
        if (ttft := decision.measured_ttft) is None:
            continue
        ttfts.append(ttft)
        if (timing := decision.timing) is None:
            continue
        if timing.compute is not None:
            waits.append(max(0.0, ttft - timing.compute))
        if timing.cached is not None and timing.computed is not None:
            cached += timing.cached
            prompts += timing.cached + timing.computed
    if not ttfts or not waits or not prompts:
        raise ValueError("no stream was answered with the engine's report of its prefill")
    ttfts.sort()
    waits.sort()
    return Latencies(
        percentile(ttfts, 50),
        percentile(ttfts, 99),
        percentile(waits, 50),
        percentile(waits, 99),
        cached / prompts,
    )


def histogram_median(before: MetricsPage, after: MetricsPage, name: str) -> float | None:
    """Median of what the histogram `name` observed between two scrapes, over all labels, with
    linear interpolation within a bucket; None: nothing, or beyond the last bucket."""
    buckets = _difference(before, after, f"{name}_bucket")
    bounds = sorted((float(bound), count) for bound, count in buckets.items())
    half = bounds[-1][1] / 2 if bounds else 0.0
    lower, below = 0.0, 0.0
    for bound, count in bounds:
        if half and count >= half:
            if bound == float("inf"):
                return None
            return lower + (bound - lower) * (half - below) / (count - below)
        lower, below = bound, count
    return None


def _difference(before: MetricsPage, after: MetricsPage, name: str) -> Mapping[str, float]:
    start = before.totals_by_label(name, "le")
    return {
        bound: count - start.get(bound, 0.0)
        for bound, count in after.totals_by_label(name, "le").items()
    }
