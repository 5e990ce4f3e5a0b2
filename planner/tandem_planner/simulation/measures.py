"""What clients saw of simulated requests: percentiles, attainment, goodput."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean

from .cluster import Outcome
from .engine import Engine


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet, in seconds; None: anything."""

    ttft: float | None = None
    itl: float | None = None
    """Mean between two tokens of one answer; an answer of one token meets it."""
    e2e: float | None = None

    def is_met(self, outcome: Outcome) -> bool:
        """Whether a request meets all of it."""
        return (
            (self.ttft is None or outcome.ttft <= self.ttft)
            and (self.itl is None or (outcome.itl or 0.0) <= self.itl)
            and (self.e2e is None or outcome.e2e <= self.e2e)
        )


@dataclass(frozen=True, slots=True)
class Measures:
    """Of the requests of one run. Seconds."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    """Of the requests' means."""
    itl_p99: float
    gap_p99: float
    """Of all gaps between two tokens: what stalls show."""
    e2e_p50: float
    e2e_p99: float
    attainment: float
    """Share of the requests that meet the SLO."""
    late_first: float
    """Share that misses its TTFT."""
    slow: float
    """Share that misses its ITL."""
    late_last: float
    """Share that misses its time to the last token."""
    hits: float
    """Share of the prompt tokens that were in a cache."""
    growth: float
    """Seconds that TTFT grows by in a second of the run: above 0, pods do not keep up."""


def measure(outcomes: Sequence[Outcome], answering: Sequence[Engine], slo: Slo) -> Measures:
    """Of `outcomes`, at least one; `answering`: the pods whose gaps count."""
    ttfts = sorted(outcome.ttft for outcome in outcomes)
    itls = sorted(outcome.itl for outcome in outcomes if outcome.itl is not None) or [0.0]
    e2es = sorted(outcome.e2e for outcome in outcomes)
    count, prompts = len(outcomes), sum(o.request.prompt_tokens for o in outcomes)
    return Measures(
        ttft_p50=percentile(ttfts, 50),
        ttft_p99=percentile(ttfts, 99),
        itl_p50=percentile(itls, 50),
        itl_p99=percentile(itls, 99),
        gap_p99=_gap_percentile(answering, 99),
        e2e_p50=percentile(e2es, 50),
        e2e_p99=percentile(e2es, 99),
        attainment=sum(map(slo.is_met, outcomes)) / count,
        late_first=sum(slo.ttft is not None and o.ttft > slo.ttft for o in outcomes) / count,
        slow=sum(slo.itl is not None and (o.itl or 0.0) > slo.itl for o in outcomes) / count,
        late_last=sum(slo.e2e is not None and o.e2e > slo.e2e for o in outcomes) / count,
        growth=_growth(outcomes),
        hits=sum(o.hit_tokens for o in outcomes) / prompts,
    )


def _growth(outcomes: Sequence[Outcome]) -> float:
    """From the first third of the requests to the last."""
    third = len(outcomes) // 3
    first, last = outcomes[:third], outcomes[-third:]
    if not third or (seconds := _mean_at(last) - _mean_at(first)) <= 0.0:
        return 0.0
    return (_mean_ttft(last) - _mean_ttft(first)) / seconds


def _mean_at(outcomes: Sequence[Outcome]) -> float:
    return fmean(outcome.request.at for outcome in outcomes)


def _mean_ttft(outcomes: Sequence[Outcome]) -> float:
    return fmean(outcome.ttft for outcome in outcomes)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of `values`, in rising order, that `percent` of them do not exceed."""
    return values[max(0, ceil(len(values) * percent / 100) - 1)]


def _gap_percentile(pods: Sequence[Engine], percent: float) -> float:
    gaps = sorted(gap for pod in pods for gap in pod.gaps)
    left = sum(count for _, count in gaps) * percent / 100
    for seconds, count in gaps:
        left -= count
        if left <= 0:
            return seconds
    return 0.0
