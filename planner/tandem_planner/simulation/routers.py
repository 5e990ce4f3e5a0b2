"""Which pods get a request: what a router is to the simulation, and plain ones."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final, NamedTuple

from .engine import Engine
from .work import Work

_PROMPT_WEIGHT: Final = 50
"""Tokens of answers that count as one of a prompt: what a decode takes of a step beside a
prefill."""


class Route(NamedTuple):
    """Indexes of the pods of a request."""

    decode: int
    prefill: int | None = None
    """None: the decode pod computes the prompt."""


class Pools(NamedTuple):
    """Indexes of the pods of each role."""

    prefills: Sequence[int]
    decodes: Sequence[int]


class Page(NamedTuple):
    """What the metrics page of a pod says."""

    running: int
    """Requests in the batch."""
    waiting: int
    used: float
    """Share of the KV cache."""
    cache_tokens: int
    totals: Mapping[str, float]
    """Counters, by the names in `engine.COUNTED`."""


At = Callable[[float, Callable[[], None]], None]
"""Plans an action for a time."""


class Router:
    """Chooses pods, and learns from what it can see. Times are simulated seconds."""

    replicas: int = 1
    """Processes that decide, each on one request at a time."""

    def start(self, at: At) -> None:
        """The simulation begins."""

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        """The pods for a request that met `replica`."""
        raise NotImplementedError

    def on_computed(self, work: Work, now: float) -> None:
        """The prefill pod of a split request has computed the prompt."""

    def on_response(self, work: Work, status: int, now: float) -> None:
        """The response headers of a request pass; with status 200, at the first token."""

    def on_end(self, work: Work, now: float) -> None:
        """The stream of a request ends."""

    def on_scrape(self, pages: Sequence[Page], now: float) -> None:
        """The metrics pages of all pods arrive."""


class Policy(Router):
    """What routers share that look at the pods themselves, or at nothing."""

    def __init__(self, engines: Sequence[Engine], seed: int) -> None:
        self.engines, self.random = engines, Random(seed)

    def allowed(self, work: Work) -> Sequence[int]:
        """The pods that the gateway allows."""
        return range(len(self.engines)) if work.only is None else [work.only]

    def least(self, pods: Sequence[int], cost: Callable[[int], float]) -> int:
        """The pod with the lowest cost; ties at random."""
        costs = [cost(pod) for pod in pods]
        lowest = min(costs)
        return self.random.choice([p for p, c in zip(pods, costs, strict=True) if c == lowest])


class RoundRobin(Policy):
    """One pod after the other."""

    _next = 0

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        """The next pod."""
        self._next += 1
        return Route(self._next % len(self.engines))


class LeastLoaded(Policy):
    """The pod with the fewest requests, which it knows exactly; ties at random."""

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        """The least loaded pod."""
        engines = self.engines
        loads = [engine.running + len(engine.waiting) for engine in engines]
        return Route(self.least(range(len(engines)), loads.__getitem__))


class LeastWork(Policy):
    """The pod with the least to do, in tokens that it knows exactly; of equal ones the first.

    A prompt counts until its first token, with what will not be cached when its turn comes: so
    cached prefixes draw alike prompts. An answer counts, prompt included, until its end; where pods
    do both, _PROMPT_WEIGHT times less. It looks at no engine but for what it caches.
    """

    def __init__(self, engines: Sequence[Engine], pools: Pools | None = None) -> None:
        """`pools`: every request is split; None: pods do both."""
        super().__init__(engines, seed=0)
        self._pools = pools
        self._tokens = [0] * len(engines)
        self._computing: dict[int, tuple[int, int]] = {}
        """Request whose prompt is not computed → its pod, and what it counts there."""
        self._answering: dict[int, tuple[int, int]] = {}
        """The same of requests that have not ended, and of the pods that answer."""

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        """The pods."""
        if self._pools is None:
            choice = Route(self._place_prompt(work, range(len(self.engines))))
        else:
            prefill = self._place_prompt(work, self._pools.prefills)
            choice = Route(min(self._pools.decodes, key=self._tokens.__getitem__), prefill)
        tokens = work.prompt_tokens + work.output_tokens
        self._tokens[choice.decode] += tokens
        self._answering[work.index] = choice.decode, tokens
        return choice

    def on_computed(self, work: Work, now: float) -> None:
        """Its prompt is no more to be computed."""
        pod, tokens = self._computing.pop(work.index)
        self._tokens[pod] -= tokens

    def on_response(self, work: Work, status: int, now: float) -> None:
        """As `on_computed`, where its pod does both."""
        if self._pools is None:
            self.on_computed(work, now)

    def on_end(self, work: Work, now: float) -> None:
        """Its answer is complete."""
        pod, tokens = self._answering.pop(work.index)
        self._tokens[pod] -= tokens

    def _place_prompt(self, work: Work, pods: Sequence[int]) -> int:
        tokens = self._tokens
        own = 0 if work.is_remote else _PROMPT_WEIGHT * work.prompt_tokens
        if work.blocks and own:
            cached = {p: _PROMPT_WEIGHT * self.engines[p].tokens_in_turn(work) for p in pods}
            pod = min(pods, key=lambda p: tokens[p] - cached[p])
            own -= cached[pod]
        else:
            pod = min(pods, key=tokens.__getitem__)
        tokens[pod] += own
        self._computing[work.index] = pod, own
        return pod
