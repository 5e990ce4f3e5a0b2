"""Policies to compare the picker with, beside the plain ones of tandem_planner."""

from collections.abc import Sequence

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
from tandem_planner.simulation.routers import Policy, Route
from tandem_planner.simulation.work import Work

from .pods import BUDGET, speed_of


class LeastTokens(Policy):
    """The pod with the fewest prompt tokens of requests in flight, whatever it caches; ties at
    random."""

    def __init__(self, engines: Sequence[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self._tokens = [0] * len(engines)
        self._placed: dict[int, int] = {}

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        """The pod with the fewest tokens."""
        pod = self._placed[work.index] = self.least(self.allowed(work), self._tokens.__getitem__)
        self._tokens[pod] += work.prompt_tokens
        return Route(pod)

    def on_end(self, work: Work, now: float) -> None:
        """Its tokens are no longer in flight."""
        self._tokens[self._placed.pop(work.index)] -= work.prompt_tokens


class ExactCost(Policy):
    """Minimises the picker's cost, but for the term `congestion`, with perfect knowledge of speeds,
    queues, caches and lengths of answers, over unified pods. No bound: the cost is what it is, and
    nothing that comes later is known (`clairvoyant.Clairvoyant` knows)."""

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
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
        return Route(choose(request, candidates, self.random).decodes[0])


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
