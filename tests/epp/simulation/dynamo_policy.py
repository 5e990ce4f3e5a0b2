"""Dynamo's KV router.

Source: ai-dynamo/dynamo at 01690d4 (lib/kv-router: scheduling/selector.rs, conditional_disagg.rs)
and its page "Configuration and Tuning". In words, with blocks counted as tokens:

    cost = scale × max(0, prefilling + prompt - credit × cached) + decoding

`prefilling` are uncached prompt tokens that were placed on the worker and have no first token yet,
`decoding` the distinct prompt tokens of its requests in flight, this one included; answers do not
count. The lowest cost wins (temperature 0). With decay, the credit of a worker shrinks by
1 / (1 + decay × excess), where excess is how much more `prefilling` it has than the least loaded
one, in prompts of this length.

Of separate pools the prefill worker is chosen without `decoding`, and the decode worker by the
prompt tokens of its requests alone. Conditional disaggregation first takes the decode worker with
the lowest max(0, decoding - cached), and computes the prompt there when fewer than 2,048 of its
tokens are uncached and less than 0.7 of it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.routers import Policy, Pools, Route
from tandem_planner.simulation.work import Work

from .placed_prefixes import PlacedPrefixes

_BYPASS_TOKENS: Final = 2048
_BYPASS_SHARE: Final = 0.7


@dataclass(frozen=True, slots=True)
class DynamoSettings:
    """Flags of the frontend; defaults are Dynamo's."""

    credit: float = 1.0
    """router-kv-overlap-score-credit."""
    decay: float = 0.0
    """router-kv-overlap-score-credit-decay."""
    scale: float = 1.0
    """router-prefill-load-scale."""
    predicted: float = 0.0
    """router-predicted-ttl-secs: seconds for which a placed prompt counts as cached before the
    worker's KV events say so; 0: none."""
    is_conditional: bool = False
    """router-conditional-disagg."""


class DynamoCost(Policy):
    """Better informed than a real one: KV events and the ends of prefills are known at once."""

    def __init__(
        self,
        engines: Sequence[Engine],
        seed: int,
        *,
        settings: DynamoSettings | None = None,
        pools: Pools | None = None,
    ) -> None:
        super().__init__(engines, seed)
        self._settings, self._pools = settings or DynamoSettings(), pools
        self._placed = PlacedPrefixes(len(engines), engines[0].pool.capacity // BLOCK)
        self._prefilling = [0] * len(engines)
        self._active: list[Counter[int]] = [Counter() for _ in engines]
        """Blocks of each worker's requests in flight."""
        self._prompts = [0] * len(engines)
        """Prompt tokens of each worker's requests in flight, shared ones counted for each."""
        self._computing: dict[int, tuple[int, int]] = {}
        """Request without a computed prompt → worker that computes it, and the tokens counted."""
        self._answering: dict[int, int] = {}

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        """The workers."""
        if self._pools is None:
            choice = self._unified(work, now)
        else:
            choice = self._separate(work, now, self._pools)
        self._place(work, choice, now)
        return choice

    def on_computed(self, work: Work, now: float) -> None:
        """A remote prefill ends before the client has its first token."""
        self._end_prefill(work.index)

    def on_response(self, work: Work, status: int, now: float) -> None:
        """Its prefill is complete."""
        self._end_prefill(work.index)

    def on_end(self, work: Work, now: float) -> None:
        """Its blocks are free."""
        pod = self._answering.pop(work.index)
        self._prompts[pod] -= work.prompt_tokens
        active = self._active[pod]
        active.subtract(work.blocks)
        for block in work.blocks:
            if not active[block]:
                del active[block]

    def _end_prefill(self, index: int) -> None:
        if (counted := self._computing.pop(index, None)) is not None:
            self._prefilling[counted[0]] -= counted[1]

    def _unified(self, work: Work, now: float) -> Route:
        pods = self.allowed(work)
        least = min(self._prefilling[pod] for pod in pods)
        return Route(
            self.least(
                pods,
                lambda pod: self._prefill_cost(pod, work, least, now) + self._decoding(pod, work),
            )
        )

    def _separate(self, work: Work, now: float, pools: Pools) -> Route:
        if self._settings.is_conditional:
            credit = self._settings.credit
            warm = self.least(
                pools.decodes,
                lambda p: max(0.0, self._decoding(p, work) - credit * self._cached(p, work, now)),
            )
            uncached = work.prompt_tokens - self._cached(warm, work, now)
            if uncached < _BYPASS_TOKENS and uncached < _BYPASS_SHARE * work.prompt_tokens:
                return Route(warm)
        least = min(self._prefilling[pod] for pod in pools.prefills)
        prefill = self.least(pools.prefills, lambda pod: self._prefill_cost(pod, work, least, now))
        # Transferred blocks count for each request: the router does not assume their reuse.
        return Route(self.least(pools.decodes, lambda pod: self._prompts[pod]), prefill)

    def _place(self, work: Work, choice: Route, now: float) -> None:
        computing = choice.decode if choice.prefill is None else choice.prefill
        # The decode pool's router does not count prompt tokens, also those of a bypass.
        if self._pools is None or choice.prefill is not None:
            tokens = work.prompt_tokens - self._cached(computing, work, now)
            self._prefilling[computing] += tokens
            self._computing[work.index] = (computing, tokens)
        self._placed.add(computing, work.blocks, now)
        self._answering[work.index] = choice.decode
        self._active[choice.decode].update(work.blocks)
        self._prompts[choice.decode] += work.prompt_tokens

    def _prefill_cost(self, pod: int, work: Work, least: int, now: float) -> float:
        settings = self._settings
        excess = (self._prefilling[pod] - least) / work.prompt_tokens
        credit = settings.credit / (1.0 + settings.decay * excess)
        cached = credit * self._cached(pod, work, now)
        return settings.scale * max(0.0, self._prefilling[pod] + work.prompt_tokens - cached)

    def _decoding(self, pod: int, work: Work) -> int:
        active = self._active[pod]
        added = sum(block not in active for block in work.blocks)
        unrecorded = max(0, ceil(work.prompt_tokens / BLOCK) - len(work.blocks))
        return BLOCK * (len(active) + added + unrecorded)

    def _cached(self, pod: int, work: Work, now: float) -> int:
        cached = self.engines[pod].cached_tokens(work)
        if not self._settings.predicted:
            return cached
        since = now - self._settings.predicted
        return max(cached, min(self._placed.tokens(pod, work, since), work.prompt_tokens - 1))
