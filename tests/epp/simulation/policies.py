"""What a router is to the simulation, and policies to compare the picker with."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, Protocol

from tandem_epp.backends.pods import ScrapeResult

from .engine import Engine
from .work import Work


class Choice(NamedTuple):
    """Indexes of the pods of a request."""

    decode: int
    prefill: int | None = None
    """None: the decode pod computes the prompt."""


class Router(Protocol):
    """Chooses pods and learns from what it can see in reality. Times are simulated seconds."""

    def choose(self, work: Work, now: float) -> Choice:
        """The pods for a request."""

    def on_response(self, work: Work, status: int, now: float) -> None:
        """The response headers of a request pass; with status 200, at the first token."""

    def on_end(self, work: Work, now: float) -> None:
        """The stream of a request ends."""

    def on_scrape(self, pages: Sequence[ScrapeResult], now: float) -> None:
        """The metrics pages of all pods arrive."""


class Policy:
    """A router that learns nothing."""

    def __init__(self, engines: Sequence[Engine], seed: int) -> None:
        self.engines, self.random = engines, Random(seed)

    def on_response(self, work: Work, status: int, now: float) -> None:
        """Nothing."""

    def on_end(self, work: Work, now: float) -> None:
        """Nothing."""

    def on_scrape(self, pages: Sequence[ScrapeResult], now: float) -> None:
        """Nothing."""


class RoundRobin(Policy):
    """One pod after the other."""

    _next = 0

    def choose(self, work: Work, now: float) -> Choice:
        """The next pod."""
        self._next += 1
        return Choice(self._next % len(self.engines))


class LeastLoaded(Policy):
    """The pod with the fewest requests, which it knows exactly; ties at random."""

    def choose(self, work: Work, now: float) -> Choice:
        """The least loaded pod."""
        loads = [engine.running + len(engine.waiting) for engine in self.engines]
        least = min(loads)
        return Choice(self.random.choice([i for i, load in enumerate(loads) if load == least]))


class Oracle(Policy):
    """Minimises the seconds until the first token, with perfect knowledge of rates, queues and
    caches, plus the harm that the prefill does to the decodes running there."""

    def choose(self, work: Work, now: float) -> Choice:
        """The cheapest pod; ties at random."""
        costs = [self._cost(engine, work) for engine in self.engines]
        least = min(costs)
        return Choice(self.random.choice([i for i, cost in enumerate(costs) if cost <= least]))

    def _cost(self, engine: Engine, work: Work) -> float:
        prefill = engine.speed.prefill_seconds(engine.cached_tokens(work), work.prompt_tokens)
        stall = 0.1 * prefill * len(engine.decoding)
        decode = 4 * engine.speed.per_decode * len(engine.decoding) * work.output_tokens
        return engine.remaining_prefill_seconds() + prefill + stall + decode
