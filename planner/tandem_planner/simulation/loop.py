"""Requests on simulated pods behind a router: the loop of events, from arrivals to last tokens.

    result = simulate(requests, pods, router)

A request arrives, the router decides, a gate may hold it before that, and one or two pods serve it:
a split request is computed on one pod and answered by another, which has a `link` over which it
gets the KV. The router hears of first tokens and ends, and reads the pods' metrics, as late as
`Timing` says. Deterministic: the same requests, pods and router give the same result, bit by bit.

Pods without a link are simulated up to the next event before those with one: what they hand off may
come before it. So hand-offs come at their own time. What else the caller does when a request ends
(`on_end`) comes up to a `tick` late.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from random import Random
from typing import Final, NamedTuple, Protocol

from tandem_planner.cost import HANDOFF_SECONDS

from .engine import Engine
from .measures import Outcome, Result
from .routers import Page, Router
from .work import Change, Request, Work

ERROR_SECONDS: Final = 0.005
"""Seconds after which a failing pod answers 500."""
DECISION_SECONDS: Final = 3e-4
DECISION_SECONDS_PER_TOKEN: Final = 7e-8
"""Seconds of a decision: each replica of the EPP makes one at a time. They fit what
`EndpointPicker.place` takes for these prompts on two cores: 0.4 ms for 1,000 tokens, 2 ms for
25,000. Without them, requests of one instant would be decided at one instant."""
TICK: Final = 0.02
"""Seconds between two moments at which the end of a request can cause another one."""
_END: Final = 1e12
"""Seconds: later than any request ends."""


class Timing(NamedTuple):
    """When a router learns of what happens, and how long it takes, in seconds."""

    scrape: float = 0.5
    """Between two scrapes; infinite: it reads no metrics."""
    page_age: float = 0.2
    """Of a metrics page when the router sees it."""
    decision: float = 1.0
    """Times the seconds that a decision takes."""
    report: float = 0.0
    """From a first token, an error or an end to the router."""


TIMING: Final = Timing()
AT_ONCE: Final = Timing(scrape=inf, decision=0.0)
"""Of a router that takes no time and reads no metrics."""


class Arrival(NamedTuple):
    """A request that has no pod yet."""

    request: Request
    sent: float
    """When the client sent it."""
    replica: int
    """Of the router, that it met."""


class Gate(Protocol):
    """Holds requests before the router chooses."""

    def start(self, simulation: "Simulation") -> None:
        """The simulation begins."""

    def meet(self, arrival: Arrival, now: float) -> None:
        """Call the simulation's `place` for the arrival, now or later, or `refuse`."""


@dataclass(eq=False)
class Simulation:
    """Pods, a router, and what will happen."""

    pods: Sequence[Engine]
    router: Router
    on_end: Callable[[Outcome, float], None] = lambda served, now: None
    """Called when a request has ended: it may `send` another one."""
    failing: set[int] = field(default_factory=set)
    """Indexes of pods that answer every request with 500."""
    timing: Timing = TIMING
    gate: Gate | None = None
    is_lazy: bool = False
    """Whether a pod that only decodes is simulated no further than it must: much faster, for
    routers that look at no pod."""
    served: list[Outcome] = field(default_factory=list)
    _later: list[tuple[float, int, Change | Callable[[], None]]] = field(default_factory=list)
    """Heap: time, a number for ties, and what happens: on a pod, or whatever is planned."""
    _numbers: Iterator[int] = field(default_factory=count)
    _busy: dict[int, float] = field(default_factory=dict)
    """Replica of the router → when it has decided on the last request that met it."""
    _random: Random = field(default_factory=lambda: Random(0))
    """Draws the replica that a request meets."""
    _unfinished: int = 0

    def __post_init__(self) -> None:
        everything = range(len(self.pods))
        receivers = [pod for pod in everything if self.pods[pod].link is not None]
        senders = [pod for pod in everything if pod not in receivers]
        self._order = [pods for pods in (senders, receivers) if pods]
        """Pods that compute prompts for others, then those that get KV."""
        self._quiet = [0.0] * len(self.pods)
        """A time before which nothing happens on the pod."""

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Plan `action` for `time`."""
        heapq.heappush(self._later, (time, next(self._numbers), action))

    def send(self, request: Request, time: float) -> None:
        """A client sends `request` at `time`, whatever its own time says."""
        self._unfinished += 1
        self.at(time, partial(self._arrive, request, time))

    def run(self, requests: Iterable[Request] = (), *, tick: float | None = None) -> Result:
        """Send `requests` at their own times, and simulate until every request has ended. `tick`:
        seconds between two moments at which the end of a request can cause another one (closed
        loops)."""
        for request in requests:
            self.send(request, request.at)
        self.router.start(self.at)
        if self.gate is not None:
            self.gate.start(self)
        if self.timing.scrape < inf:
            # The EPP is not ready before it has scraped every pod once.
            self.router.on_scrape([_page(pod) for pod in self.pods], 0.0)
            self._scrape(0.0)
        if tick is not None:
            self._repeat(0.0, tick)
        while self._unfinished:
            for pods in self._order:
                self._advance_to_next(pods)
            event = heapq.heappop(self._later)[2]
            if isinstance(event, Change):
                self._on_change(event)
            else:
                event()
        return Result(self.served, self.pods)

    def _repeat(self, time: float, tick: float) -> None:
        self.at(time + tick, partial(self._repeat, time + tick, tick))

    def _advance_to_next(self, pods: Sequence[int]) -> None:
        """Simulate `pods` up to the next event."""
        until, _, event = self._later[0] if self._later else (_END, 0, None)
        if self.is_lazy and isinstance(event, Change):
            # The router hears of it, and looks at no pod.
            return
        for pod in pods:
            if self._quiet[pod] <= until:
                self._advance(pod, until)

    def _advance(self, pod: int, until: float) -> None:
        for change in self.pods[pod].advance(until):
            heapq.heappush(self._later, (change.time, next(self._numbers), change))
        if self.is_lazy:
            self._quiet[pod] = self.pods[pod].quiet_until()

    def _arrive(self, request: Request, now: float) -> None:
        replicas = self.router.replicas
        replica = self._random.randrange(replicas) if replicas > 1 else 0
        seconds = DECISION_SECONDS + request.prompt_tokens * DECISION_SECONDS_PER_TOKEN
        seconds *= self.timing.decision
        decided = self._busy[replica] = max(now, self._busy.get(replica, 0.0)) + seconds
        decide = partial(self._decide, Arrival(request, now, replica), decided)
        if seconds:
            self.at(decided, decide)
        else:
            decide()

    def _decide(self, arrival: Arrival, now: float) -> None:
        if self.gate is None:
            self.place(arrival, now)
        else:
            self.gate.meet(arrival, now)

    def refuse(self) -> None:
        """A request that the gate has met gets no pod."""
        self._unfinished -= 1

    def place(self, arrival: Arrival, now: float) -> Outcome:
        """The router chooses. Raises ValueError if it hands off to a pod that cannot receive."""
        request = arrival.request
        work = request.work(len(self.served), now)
        route = self.router.choose(work, now, arrival.replica)
        served = Outcome(request, arrival.sent, work, route)
        self.served.append(served)
        if route.decode in self.failing:
            self.at(now + ERROR_SECONDS, partial(self._fail, served, now + ERROR_SECONDS))
        elif route.prefill is None:
            self._add(route.decode, work)
        elif self.pods[route.decode].link is None or self.pods[route.prefill].link is not None:
            raise ValueError("a hand-off goes from a pod without a link to one with a link")
        else:
            served.answer = request.work(work.index, now)
            # The prefill leg generates one token.
            work.output_tokens = 1
            self._add(route.prefill, work)
        return served

    def _add(self, pod: int, work: Work) -> None:
        if self.is_lazy:
            self._advance(pod, work.arrived)
        self.pods[pod].add(work)
        self._quiet[pod] = 0.0

    def _fail(self, served: Outcome, now: float) -> None:
        served.status = 500
        self._report(now, self.router.on_response, served.work, 500)
        self._end(served, now)

    def _on_change(self, change: Change) -> None:
        now, is_end, work = change
        served = self.served[work.index]
        if served.answer is None or work is served.answer:
            if is_end:
                self._end(served, now)
            else:
                served.first_token = now
                self._report(now, self.router.on_response, served.work, 200)
        elif not is_end:
            self._hand_off(served, served.answer, now)

    def _report(self, now: float, hear: Callable[..., None], *what: object) -> None:
        """The router hears of what happens now."""
        if delay := self.timing.report:
            self.at(now + delay, partial(hear, *what, now + delay))
        else:
            hear(*what, now)

    def _hand_off(self, served: Outcome, answer: Work, now: float) -> None:
        self.router.on_computed(served.work, now)
        answer.arrived, answer.is_remote = now + HANDOFF_SECONDS, True
        if served.work.started is not None:
            answer.prefill_seconds = now - served.work.started
        self.at(answer.arrived, partial(self._add, served.route.decode, answer))

    def _end(self, served: Outcome, now: float) -> None:
        served.ended = now
        self._unfinished -= 1
        self._report(now, self.router.on_end, served.work)
        self.on_end(served, now)

    def _scrape(self, now: float) -> None:
        pages = [_page(pod) for pod in self.pods]
        shown = now + self.timing.page_age
        self.at(shown, lambda: self.router.on_scrape(pages, shown))
        following = now + self.timing.scrape
        self.at(following, partial(self._scrape, following))


def simulate(
    requests: Sequence[Request],
    pods: Sequence[Engine],
    router: Router,
    *,
    timing: Timing = TIMING,
    is_lazy: bool = False,
) -> Result:
    """Send `requests` at their own times to the pods that `router` chooses."""
    return Simulation(pods, router, timing=timing, is_lazy=is_lazy).run(requests)


def _page(pod: Engine) -> Page:
    used = min(1.0, pod.pool.used / pod.pool.capacity)
    return Page(pod.running, len(pod.waiting), used, pod.pool.capacity, pod.totals.copy())
