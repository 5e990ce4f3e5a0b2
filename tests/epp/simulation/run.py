"""Simulates requests on pods behind a router, and measures what they saw."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tandem_loadtest.figures.distributions import percentile

from .engine import Engine, Work
from .routers import Router
from .workload import Request

RATE = 10_000.0
"""Prompt tokens per second of an average pod."""
CACHE_TOKENS = 1_000_000
"""Tokens that a pod caches."""
SCRAPE_SECONDS = 0.5
"""Time between two scrapes."""


def engines(count: int, seed: int) -> list[Engine]:
    """`count` pods whose rates differ by up to ±30 %."""
    random = Random(seed)
    return [
        Engine(
            rate=RATE * random.uniform(0.7, 1.3), cache_tokens=CACHE_TOKENS, seed=seed * 1000 + i
        )
        for i in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Result:
    """What happened to the requests."""

    works: Sequence[Work]
    chosen: Sequence[int]
    """Index of the pod of each request."""
    pods: Sequence[Engine]

    def waiting(self) -> list[float]:
        """TTFT of each request less the time that its own uncached prefill takes on its pod, since
        no router can shorten that. Seconds, at least 0."""
        return [
            max(
                0.0,
                w.first_token - w.arrived - (w.prompt_tokens - w.hit_tokens) / self.pods[i].rate,
            )
            for w, i in zip(self.works, self.chosen, strict=True)
            if w.first_token is not None
        ]

    def waiting_percentile(self, percent: float) -> float:
        """A percentile of `waiting`."""
        return percentile(sorted(self.waiting()), percent)

    def hit_tokens(self) -> int:
        """Prompt tokens that were in a cache."""
        return sum(w.hit_tokens for w in self.works)


def simulate(requests: Sequence[Request], pods: Sequence[Engine], router: Router) -> Result:
    """Send `requests`, which are in order of time, to the pods that `router` chooses."""
    works, chosen = [], []
    # First tokens and ends that lie after the present moment: a step may end after an arrival.
    later: list[tuple[float, int, bool, Work]] = []
    next_scrape = 0.0
    for index, request in enumerate(requests):
        while next_scrape <= request.at:
            _advance(pods, router, later, next_scrape)
            router.on_scrape(next_scrape)
            next_scrape += SCRAPE_SECONDS
        _advance(pods, router, later, request.at)
        work = request.work(index)
        pod = router.choose(work, request.at)
        pods[pod].add(work)
        works.append(work)
        chosen.append(pod)
    while any(pod.running or pod.waiting for pod in pods):
        _advance(pods, router, later, next_scrape)
        router.on_scrape(next_scrape)
        next_scrape += SCRAPE_SECONDS
    return Result(works, chosen, pods)


def _advance(
    pods: Sequence[Engine],
    router: Router,
    later: list[tuple[float, int, bool, Work]],
    now: float,
) -> None:
    """Simulate the pods up to `now`, and tell the router what happened until then, in order."""
    for pod in pods:
        for change in pod.advance(now):
            heapq.heappush(later, (change.time, change.work.index, change.is_end, change.work))
    while later and later[0][0] <= now:
        time, _, is_end, work = heapq.heappop(later)
        if is_end:
            router.on_end(work, time)
        else:
            router.on_first_token(work, time)
