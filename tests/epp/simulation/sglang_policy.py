"""SGLang's router with its default policy, cache_aware.

Source: sgl-project/sglang at 053b63f (sgl-model-gateway: policies/cache_aware.rs). In words:

- The load of a worker is its number of requests in flight. Where the largest is more than 64 above
  the smallest and more than 1.5 times it, the worker with the smallest takes the request.
- Else the worker with the longest match takes it, if that is more than 0.3 of the prompt; of equal
  ones that which had the prefix last. Else the worker with the smallest load.
- A tree for each worker remembers the prompts sent there, up to 2²⁶ characters, which is far more
  than a pod caches.

Of separate pools every request is split: prefill workers are chosen as above, decode workers by
power_of_two, the less loaded of two drawn at random, as the documentation of its disaggregation
does.
"""

from collections.abc import Sequence
from typing import Final

from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.routers import Policy, Pools, Route
from tandem_planner.simulation.work import Work

from .placed_prefixes import PlacedPrefixes

_CACHE_THRESHOLD: Final = 0.3
_BALANCE_ABS: Final = 64
_BALANCE_REL: Final = 1.5
_TREE_TOKENS: Final = 2**26 // 4
"""Four characters per token."""


class SglangCacheAware(Policy):
    """One tree over the whole prompts, in blocks of the trace instead of characters."""

    def __init__(self, engines: Sequence[Engine], seed: int, *, pools: Pools | None = None) -> None:
        super().__init__(engines, seed)
        self._pools = pools
        self._prefixes = PlacedPrefixes(len(engines), _TREE_TOKENS // BLOCK)
        self._loads = [0] * len(engines)
        self._placed: dict[int, Route] = {}

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        """The workers."""
        if self._pools is None:
            choice = Route(self._computing_pod(work, self.allowed(work)))
        else:
            pair = self.random.sample(self._pools.decodes, 2)
            decode = self.least(pair, lambda pod: self._loads[pod])
            choice = Route(decode, self._computing_pod(work, self._pools.prefills))
        computing = choice.decode if choice.prefill is None else choice.prefill
        self._prefixes.add(computing, work.blocks, now)
        self._placed[work.index] = choice
        self._count(choice, 1)
        return choice

    def on_end(self, work: Work, now: float) -> None:
        """It is no longer in flight."""
        self._count(self._placed.pop(work.index), -1)

    def _count(self, choice: Route, change: int) -> None:
        for pod in choice:
            if pod is not None:
                self._loads[pod] += change

    def _computing_pod(self, work: Work, pods: Sequence[int]) -> int:
        loads = [self._loads[pod] for pod in pods]
        low, high = min(loads), max(loads)
        if high - low <= _BALANCE_ABS or high <= _BALANCE_REL * low:
            tokens = {pod: self._prefixes.tokens(pod, work) for pod in pods}
            warm = max(pods, key=lambda pod: (tokens[pod], self._prefixes.last_used(pod, work)))
            if tokens[warm] > _CACHE_THRESHOLD * work.prompt_tokens:
                return warm
        return self.least(pods, lambda pod: self._loads[pod])
