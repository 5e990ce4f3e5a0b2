"""What clients saw of simulated requests: percentiles, attainment, goodput. Seconds."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor
from statistics import fmean

from .engine import Engine
from .routers import Route
from .work import Request, Work


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet, in seconds; None: anything."""

    ttft: float | None = None
    itl: float | None = None
    """Mean between two tokens of one answer; an answer of one token meets it."""
    e2e: float | None = None

    @property
    def text(self) -> str:
        """TTFT and ITL, such as `2 s/50 ms`."""
        parts = [] if self.ttft is None else [f"{self.ttft:g} s"]
        return "/".join(parts if self.itl is None else [*parts, f"{1e3 * self.itl:g} ms"])

    def is_met(self, ttft: float, itl: float | None, e2e: float = 0.0) -> bool:
        """Whether a request meets all of it; `itl`: None for an answer of one token."""
        return (
            (self.ttft is None or ttft <= self.ttft)
            and (self.itl is None or (itl or 0.0) <= self.itl)
            and (self.e2e is None or e2e <= self.e2e)
        )


@dataclass(slots=True, eq=False)
class Outcome:
    """A request and what became of it."""

    request: Request
    sent: float
    """When the client sent it."""
    work: Work
    """The prompt's computation; its end is that of the prefill leg where the request is split."""
    route: Route
    status: int = 200
    first_token: float | None = None
    """When the client has its first token."""
    ended: float | None = None
    answer: Work | None = None
    """The decode leg of a split request."""

    @property
    def ttft(self) -> float:
        """Until the first token. Raises ValueError when there is none."""
        if self.first_token is None:
            raise ValueError(f"request {self.work.index} has no first token")
        return self.first_token - self.sent

    @property
    def itl(self) -> float | None:
        """Mean between two tokens; None for an answer of one token."""
        return (self.answer or self.work).itl

    @property
    def e2e(self) -> float:
        """Until the last token. Raises ValueError when there is none."""
        if self.ended is None:
            raise ValueError(f"request {self.work.index} did not end")
        return self.ended - self.sent

    def meets(self, slo: Slo) -> bool:
        """Whether the client had its tokens in time."""
        return self.status == 200 and slo.is_met(self.ttft, self.itl, self.e2e)


@dataclass(frozen=True, slots=True)
class Result:
    """What happened to the requests, in order of arrival."""

    served: Sequence[Outcome]
    pods: Sequence[Engine]

    def waiting(self) -> list[float]:
        """TTFT of each request less the time that its own uncached prefill takes on its pod while
        nothing else runs, since no router can shorten that. At least 0."""
        return [max(0.0, s.ttft - self._prefill_seconds(s)) for s in self.answered()]

    def answered(self) -> list[Outcome]:
        """Those that did not fail."""
        return [served for served in self.served if served.status == 200]

    def waiting_percentile(self, percent: float) -> float:
        """A percentile of `waiting`."""
        return percentile(self.waiting(), percent)

    def ttft_percentile(self, percent: float) -> float:
        """A percentile of TTFT."""
        return percentile((s.ttft for s in self.answered()), percent)

    def itl_percentile(self, percent: float) -> float:
        """A percentile of the requests' mean ITL."""
        return percentile((s.itl for s in self.served if s.itl is not None), percent)

    def gap_percentile(self, percent: float) -> float:
        """A percentile of all gaps between two tokens: what stalls show. The smallest that so many
        of them do not exceed; 0 without any. Of the whole run."""
        gaps = sorted(gap for pod in self.pods for gap in pod.gaps)
        left = sum(count for _, count in gaps) * percent / 100
        for seconds, count in gaps:
            left -= count
            if left <= 0:
                return seconds
        return 0.0

    def ttft_mean(self) -> float:
        """Mean TTFT."""
        return fmean(s.ttft for s in self.answered())

    def goodput(self, slo: Slo) -> float:
        """Share of all requests that meet `slo`; a failed one does not."""
        return sum(s.meets(slo) for s in self.served) / len(self.served)

    def split(self) -> float:
        """Share of the requests that one pod computed and another answered."""
        return sum(s.answer is not None for s in self.served) / len(self.served)

    def hit_tokens(self) -> int:
        """Prompt tokens that were in a cache."""
        return sum(s.work.hit_tokens for s in self.served)

    def hit_ratio(self) -> float:
        """`hit_tokens` as a share of all prompt tokens."""
        return self.hit_tokens() / sum(s.work.prompt_tokens for s in self.served)

    def growth(self) -> float:
        """Seconds that TTFT grows by in a second, from the first third of the requests to the last:
        above 0, pods do not keep up."""
        third = len(self.served) // 3
        first, last = self.served[:third], self.served[-third:]
        if not third or (seconds := _mean_sent(last) - _mean_sent(first)) <= 0.0:
            return 0.0
        return (fmean(s.ttft for s in last) - fmean(s.ttft for s in first)) / seconds

    def _prefill_seconds(self, served: Outcome) -> float:
        decode, prefill = served.route
        pod = self.pods[decode if prefill is None else prefill]
        return pod.prefill_seconds(served.work.hit_tokens, served.work.prompt_tokens)


def _mean_sent(served: Sequence[Outcome]) -> float:
    return fmean(each.sent for each in served)


def percentile(values: Iterable[float], percent: float) -> float:
    """The percentile of `values`, linear between ranks (numpy's default), as that of
    `tandem bench`. Raises IndexError without a value."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = ordered[floor(rank)], ordered[ceil(rank)]
    # Rounding could exceed the larger value by a bit.
    return min(high, low + (high - low) * (rank - floor(rank)))


@dataclass(frozen=True, slots=True)
class Measures:
    """Of the requests of one run."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    """Of the requests' means."""
    itl_p99: float
    gap_p99: float
    """Of all gaps between two tokens."""
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
    """As `Result.growth`."""


def measure(result: Result, slo: Slo) -> Measures:
    """Of requests, at least one, none of which failed."""
    served = result.served
    ttfts, e2es = sorted(s.ttft for s in served), sorted(s.e2e for s in served)
    itls = sorted(s.itl or 0.0 for s in served)
    several = [itl for itl in itls if itl] or [0.0]
    return Measures(
        ttft_p50=percentile(ttfts, 50),
        ttft_p99=percentile(ttfts, 99),
        itl_p50=percentile(several, 50),
        itl_p99=percentile(several, 99),
        gap_p99=result.gap_percentile(99),
        e2e_p50=percentile(e2es, 50),
        e2e_p99=percentile(e2es, 99),
        attainment=result.goodput(slo),
        late_first=_share_above(ttfts, slo.ttft),
        slow=_share_above(itls, slo.itl),
        late_last=_share_above(e2es, slo.e2e),
        hits=result.hit_ratio(),
        growth=result.growth(),
    )


def _share_above(ordered: Sequence[float], limit: float | None) -> float:
    return 0.0 if limit is None else (len(ordered) - bisect_right(ordered, limit)) / len(ordered)
