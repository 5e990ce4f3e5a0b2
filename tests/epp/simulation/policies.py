"""What a router is to the simulation, and policies to compare the picker with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from tandem_epp.backends.engine_page import ScrapeResult
from tandem_planner.choice import Candidates, choose
from tandem_planner.cost import (
    DECODE_WEIGHT,
    PodFigures,
    RequestFigures,
    stall_share,
)
from tandem_planner.figure_table import FigureTable
from tandem_planner.objective import ITL_WEIGHT
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.work import Work

from .speed import BUDGET, speed_of


class Choice(NamedTuple):
    """Indexes of the pods of a request."""

    decode: int
    prefill: int | None = None
    """None: the decode pod computes the prompt."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Indexes of the pods of each role."""

    prefills: Sequence[int]
    decodes: Sequence[int]


At = Callable[[float, Callable[[], None]], None]
"""Plans an action for a time."""


class Router(Protocol):
    """Chooses pods and learns from what it can see in reality. Times are simulated seconds."""

    @property
    def replicas(self) -> int:
        """Processes that decide, each on one request at a time."""

    def start(self, at: At) -> None:
        """The simulation begins."""

    def choose(self, work: Work, now: float, replica: int = 0) -> Choice:
        """The pods for a request that met `replica`."""

    def on_response(self, work: Work, status: int, now: float) -> None:
        """The response headers of a request pass; with status 200, at the first token."""

    def on_end(self, work: Work, now: float) -> None:
        """The stream of a request ends."""

    def on_scrape(self, pages: Sequence[ScrapeResult], now: float) -> None:
        """The metrics pages of all pods arrive."""


class OneProcess:
    """A router that decides on each request as it comes."""

    replicas = 1

    def start(self, at: At) -> None:
        """Nothing."""


class Policy(OneProcess):
    """A router that learns nothing, and what policies share."""

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

    def on_response(self, work: Work, status: int, now: float) -> None:
        """Nothing."""

    def on_end(self, work: Work, now: float) -> None:
        """Nothing."""

    def on_scrape(self, pages: Sequence[ScrapeResult], now: float) -> None:
        """Nothing."""


class RoundRobin(Policy):
    """One pod after the other."""

    _next = 0

    def choose(self, work: Work, now: float, replica: int = 0) -> Choice:
        """The next pod."""
        self._next += 1
        return Choice(self._next % len(self.engines))


class LeastLoaded(Policy):
    """The pod with the fewest requests, which it knows exactly; ties at random."""

    def choose(self, work: Work, now: float, replica: int = 0) -> Choice:
        """The least loaded pod."""
        return Choice(self.least(range(len(self.engines)), self._load))

    def _load(self, pod: int) -> int:
        engine = self.engines[pod]
        return engine.running + len(engine.waiting)


class LeastTokens(Policy):
    """The pod with the fewest prompt tokens of requests in flight, whatever it caches; ties at
    random."""

    def __init__(self, engines: Sequence[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self._tokens = [0] * len(engines)
        self._placed: dict[int, int] = {}

    def choose(self, work: Work, now: float, replica: int = 0) -> Choice:
        """The pod with the fewest tokens."""
        pod = self._placed[work.index] = self.least(self.allowed(work), self._tokens.__getitem__)
        self._tokens[pod] += work.prompt_tokens
        return Choice(pod)

    def on_end(self, work: Work, now: float) -> None:
        """Its tokens are no longer in flight."""
        self._tokens[self._placed.pop(work.index)] -= work.prompt_tokens


class ExactCost(Policy):
    """Minimises the picker's cost, but for the term `congestion`, with perfect knowledge of speeds,
    queues, caches and lengths of answers, over unified pods. No bound: the cost is what it is, and
    nothing that comes later is known (`clairvoyant.Clairvoyant` knows)."""

    def choose(self, work: Work, now: float, replica: int = 0) -> Choice:
        """The cheapest pod; ties at random."""
        request = RequestFigures(work.prompt_tokens, float(work.output_tokens), now)
        everything = range(len(self.engines))
        cached = [engine.tokens_in_turn(work) for engine in self.engines]
        candidates = Candidates(
            pods=FigureTable([_figures(engine) for engine in self.engines]),
            cached=cached,
            cached_if_computing=cached,
            decodes=everything if work.only is None else [work.only],
        )
        return Choice(choose(request, candidates, self.random).decodes[0])


def _figures(engine: Engine) -> PodFigures:
    """What the picker estimates, without error."""
    speed, requests = speed_of(engine), engine.running + len(engine.waiting)
    coming = sum(w.prompt_tokens - w.expected for w in engine.waiting)
    context = engine.context / len(engine.decoding) if engine.decoding else 0.0
    slope = speed.per_decode + speed.per_context * context
    loads = [work for _, _, work in engine.loading]
    here = [*engine.decoding, *engine.prefilling, *loads, *engine.waiting]
    return PodFigures(
        queued=engine.remaining_prefill_seconds(),
        fixed=speed.fixed,
        per_token=speed.per_token + engine.decode_step_seconds() / BUDGET,
        per_pair=speed.per_pair,
        stall=ITL_WEIGHT * sum(stall_share(w.output_tokens) for w in here),
        itl_harm=DECODE_WEIGHT * slope * requests,
        free_tokens=engine.pool.capacity - engine.pool.used - coming,
    )
