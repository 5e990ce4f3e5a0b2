"""Simulates requests on pods behind a router, and measures what they saw."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from statistics import fmean
from typing import Final, NamedTuple

from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.estimates.engine_figures import EngineCounters, Gauges
from tandem_loadtest.figures.distributions import percentile
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.store import KV_BYTES
from tandem_planner.simulation.work import Work

from .policies import Choice, Router
from .speed import SPEED
from .workload import Request

CACHE_TOKENS: Final = 1_000_000
"""Tokens of KV that a pod holds, cached or in use."""
SCRAPE_SECONDS: Final = 0.5
"""Time between two scrapes."""
SCRAPE_DELAY: Final = 0.2
"""Age of a metrics page when the router sees it."""
TRANSFER_RATE: Final = 5e9
"""Bytes per second that a decode pod reads from prefill pods."""
HANDOFF_SECONDS: Final = 0.01
"""Seconds of a hand-off without its transfer: two more HTTP exchanges."""
ERROR_SECONDS: Final = 0.005
"""Seconds after which a failing pod answers 500."""
BLOCK_TOKENS: Final = 64
"""KV block size that the pods report."""
DECISION_SECONDS: Final = 3e-4
DECISION_SECONDS_PER_TOKEN: Final = 7e-8
"""Seconds of a decision: each replica of the EPP makes one at a time. They fit what
`EndpointPicker.place` takes for these prompts on two cores: 0.4 ms for 1,000 tokens, 2 ms for
25,000. Without them, requests of one instant would be decided at one instant."""


class Timing(NamedTuple):
    """When a router learns of what happens, and how long it takes, in seconds."""

    scrape: float = SCRAPE_SECONDS
    page_age: float = SCRAPE_DELAY
    decision: float = 1.0
    """Times the seconds that a decision takes."""
    report: float = 0.0
    """From a first token, an error or an end to the router."""


TIMING: Final = Timing()
TICK: Final = 0.02
"""Seconds between two moments at which what happened on the pods can cause new requests there."""


def engines(count: int, seed: int, *, cache_tokens: int = CACHE_TOKENS) -> list[Engine]:
    """`count` pods whose rates of prefill and decode differ by up to ±30 %, independently."""
    random = Random(seed)
    pods = []
    for i in range(count):
        decode = SPEED.times(random.uniform(0.7, 1.3))
        prefill = SPEED.times(random.uniform(0.7, 1.3))
        speed = decode._replace(per_token=prefill.per_token, per_pair=prefill.per_pair)
        pods.append(Engine(speed, cache_tokens=cache_tokens, seed=seed * 1000 + i))
    return pods


class Slo(NamedTuple):
    """What a request must meet, in seconds."""

    ttft: float
    itl: float
    """Mean between two tokens; an answer of one token meets it."""

    @property
    def text(self) -> str:
        """Such as `2 s/50 ms`."""
        return f"{self.ttft:g} s/{1e3 * self.itl:g} ms"


@dataclass(slots=True, eq=False)
class Served:
    """A request and what became of it."""

    sent: float
    """When the client sent it."""
    work: Work
    """The prompt's computation; its end is that of the prefill leg where the request is split."""
    choice: Choice
    status: int = 200
    first_token: float | None = None
    """When the client has its first token."""
    ended: float | None = None
    answer: Work | None = None
    """The decode leg of a split request."""

    @property
    def ttft(self) -> float:
        """Seconds until the first token. Raises ValueError when there is none."""
        if self.first_token is None:
            raise ValueError(f"request {self.work.index} has no first token")
        return self.first_token - self.sent

    @property
    def itl(self) -> float | None:
        """Mean seconds between two tokens; None for an answer of one token."""
        return (self.answer or self.work).itl

    def meets(self, slo: Slo) -> bool:
        """Whether the client had its tokens in time."""
        return self.status == 200 and self.ttft <= slo.ttft and (self.itl or 0.0) <= slo.itl


@dataclass(frozen=True, slots=True)
class Result:
    """What happened to the requests, in order of arrival."""

    served: Sequence[Served]
    pods: Sequence[Engine]

    def waiting(self) -> list[float]:
        """TTFT of each request less the time that its own uncached prefill takes on its pod while
        nothing else runs, since no router can shorten that. Seconds, at least 0."""
        return [max(0.0, s.ttft - self._prefill_seconds(s)) for s in self.served if s.status == 200]

    def waiting_percentile(self, percent: float) -> float:
        """A percentile of `waiting`."""
        return percentile(sorted(self.waiting()), percent)

    def ttft_percentile(self, percent: float) -> float:
        """A percentile of TTFT, in seconds."""
        return percentile(sorted(s.ttft for s in self.served if s.status == 200), percent)

    def itl_percentile(self, percent: float) -> float:
        """A percentile of the requests' mean ITL, in seconds."""
        return percentile(sorted(s.itl for s in self.served if s.itl is not None), percent)

    def ttft_mean(self) -> float:
        """Mean TTFT, in seconds."""
        return fmean(s.ttft for s in self.served if s.status == 200)

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

    def _prefill_seconds(self, served: Served) -> float:
        decode, prefill = served.choice
        pod = self.pods[decode if prefill is None else prefill]
        return pod.prefill_seconds(served.work.hit_tokens, served.work.prompt_tokens)


@dataclass(eq=False)
class Simulation:
    """Pods, a router, and what will happen."""

    pods: Sequence[Engine]
    router: Router
    on_end: Callable[[Served, float], None] = lambda served, now: None
    """Called when a request has ended: it may `send` another one."""
    failing: set[int] = field(default_factory=set)
    """Indexes of pods that answer every request with 500."""
    timing: Timing = TIMING
    served: list[Served] = field(default_factory=list)
    _later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    """Heap: time, a number for ties, what happens then."""
    _numbers: Iterator[int] = field(default_factory=count)
    _links: dict[int, float] = field(default_factory=dict)
    """Decode pod → when its last transfer ends."""
    _busy: dict[int, float] = field(default_factory=dict)
    """Replica of the router → when it has decided on the last request that met it."""
    _random: Random = field(default_factory=lambda: Random(0))
    """Draws the replica that a request meets."""
    _unfinished: int = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Plan `action` for `time`."""
        heapq.heappush(self._later, (time, next(self._numbers), action))

    def send(self, request: Request, time: float) -> None:
        """A client sends `request` at `time`, whatever its own time says."""
        self._unfinished += 1
        self.at(time, lambda: self._arrive(request, time))

    def run(self, *, tick: float | None = None) -> Result:
        """Simulate until every request has ended. `tick`: seconds between two moments at which
        events of the pods can cause others there (hand-offs, closed loops)."""
        self.router.start(self.at)
        # The EPP is not ready before it has scraped every pod once.
        self.router.on_scrape([_page(pod) for pod in self.pods], 0.0)
        self._scrape(0.0)
        if tick is not None:
            self._repeat(0.0, tick)
        while self._unfinished:
            self._advance(self._later[0][0])
            _, _, action = heapq.heappop(self._later)
            action()
        return Result(self.served, self.pods)

    def _repeat(self, time: float, tick: float) -> None:
        self.at(time + tick, lambda: self._repeat(time + tick, tick))

    def _advance(self, until: float) -> None:
        for pod in self.pods:
            for time, is_end, work in pod.advance(until):
                served = self.served[work.index]
                happen = self._on_pod_end if is_end else self._on_pod_token
                # A default argument binds the values of this iteration.
                self.at(time, lambda h=happen, s=served, w=work, t=time: h(s, w, t))  # type: ignore[misc]

    def _arrive(self, request: Request, now: float) -> None:
        replica = self._random.randrange(self.router.replicas)
        seconds = DECISION_SECONDS + request.prompt_tokens * DECISION_SECONDS_PER_TOKEN
        seconds *= self.timing.decision
        decided = self._busy[replica] = max(now, self._busy.get(replica, 0.0)) + seconds
        self.at(decided, lambda: self._place(request, replica, now, decided))

    def _place(self, request: Request, replica: int, sent: float, now: float) -> None:
        work = request.work(len(self.served), now)
        served = Served(sent, work, self.router.choose(work, now, replica))
        self.served.append(served)
        decode, prefill = served.choice
        if decode in self.failing:
            self.at(now + ERROR_SECONDS, lambda: self._fail(served, now + ERROR_SECONDS))
        elif prefill is None:
            self.pods[decode].add(work)
        else:
            served.answer = request.work(work.index, now)
            # The prefill leg generates one token.
            work.output_tokens = 1
            self.pods[prefill].add(work)

    def _fail(self, served: Served, now: float) -> None:
        served.status = 500
        self._report(now, lambda at: self.router.on_response(served.work, 500, at))
        self._end(served, now)

    def _on_pod_token(self, served: Served, work: Work, now: float) -> None:
        if served.answer is None or work is served.answer:
            served.first_token = now
            self._report(now, lambda at: self.router.on_response(served.work, 200, at))
        else:
            self._transfer(served, served.answer, now)

    def _report(self, now: float, tell: Callable[[float], None]) -> None:
        """The router hears of what happens now."""
        if delay := self.timing.report:
            self.at(now + delay, lambda: tell(now + delay))
        else:
            tell(now)

    def _transfer(self, served: Served, answer: Work, now: float) -> None:
        decode = served.choice.decode
        missing = answer.prompt_tokens - self.pods[decode].cached_tokens(answer)
        begin = max(now + HANDOFF_SECONDS, self._links.get(decode, 0.0))
        end = begin + missing * KV_BYTES / TRANSFER_RATE
        self._links[decode] = end
        self.at(end, lambda: self._begin_answer(served, answer, end))

    def _begin_answer(self, served: Served, answer: Work, now: float) -> None:
        answer.arrived, answer.is_remote = now, True
        self.pods[served.choice.decode].add(answer)

    def _on_pod_end(self, served: Served, work: Work, now: float) -> None:
        if served.answer is None or work is served.answer:
            self._end(served, now)

    def _end(self, served: Served, now: float) -> None:
        served.ended = now
        self._unfinished -= 1
        self._report(now, lambda at: self.router.on_end(served.work, at))
        self.on_end(served, now)

    def _scrape(self, now: float) -> None:
        pages = [_page(pod) for pod in self.pods]
        shown = now + self.timing.page_age
        self.at(shown, lambda: self.router.on_scrape(pages, shown))
        following = now + self.timing.scrape
        self.at(following, lambda: self._scrape(following))


def simulate(
    requests: Sequence[Request],
    pods: Sequence[Engine],
    router: Router,
    *,
    tick: float | None = None,
) -> Result:
    """Send `requests` at their own times to the pods that `router` chooses. `tick` as in
    `Simulation.run`; needed if it splits requests."""
    simulation = Simulation(pods, router)
    for request in requests:
        simulation.send(request, request.at)
    return simulation.run(tick=tick)


def gauges(pod: Engine) -> Gauges:
    """What the metrics page of a pod says of its load."""
    usage = min(1.0, pod.pool.used / pod.pool.capacity)
    return Gauges(float(pod.running), float(len(pod.waiting)), usage)


def _page(pod: Engine) -> ScrapeResult:
    blocks = pod.pool.capacity // BLOCK_TOKENS
    return ScrapeResult(gauges(pod), b"1", BLOCK_TOKENS, blocks, EngineCounters(**pod.totals))
