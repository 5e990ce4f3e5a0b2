"""llm-d's choice by the plugins that its guides configure since llm-d 0.6.

Source: llm-d-router at ebab687 (prefix-cache-affinity-filter, token-load-scorer,
inflight-load-producer, active-request-scorer), and llm-d's guides optimized-baseline and
pd-disaggregation. In words:

- Pods with at least `threshold` of the prompt in their prefix cache are kept, if there are any,
  unless the best of them would take more than `penalty` seconds longer to a first token than the
  best other. That time is the pod's tokens in flight over `throughput`, one figure for all pods.
- Of the pods that are left, the one with the fewest tokens in flight, those of this request
  included. Only uncached tokens count, from the placement to the client's first token.
- Of separate pools the decode pod has the fewest requests; the prefill pod is chosen as above.
  Guides split every request; a decider splits those with enough uncached tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.routers import Policy, Pools, Route
from tandem_planner.simulation.work import Work
from tandem_planner.step_cost import prompt_seconds

from .placed_prefixes import PlacedPrefixes
from .pods import BUDGET, SPEED


@dataclass(frozen=True, slots=True)
class LlmdSettings:
    """Parameters of the plugins; defaults are llm-d's but for the throughput."""

    threshold: float = 0.8
    """affinityThreshold."""
    penalty: float = 18.0
    """maxTTFTPenaltyMs, in seconds."""
    throughput: float = BUDGET / prompt_seconds(SPEED, 0, BUDGET, BUDGET)
    """peakPrefillThroughput, tokens per second: what llm-d's calibration measures of a pod of the
    simulation's mean speed, one chunk over its TTFT."""
    min_uncached: int = 0
    """nonCachedTokens: requests with fewer on their decode pod are not split; 0: all are."""


class LlmdDefault(Policy):
    """The index is approximate, as in the guides, and has the true size of the caches."""

    def __init__(
        self,
        engines: Sequence[Engine],
        seed: int,
        *,
        settings: LlmdSettings | None = None,
        pools: Pools | None = None,
    ) -> None:
        super().__init__(engines, seed)
        self._settings, self._pools = settings or LlmdSettings(), pools
        self._prefixes = PlacedPrefixes(len(engines), engines[0].pool.capacity // BLOCK)
        self._tokens = [0] * len(engines)
        """Uncached tokens in flight of each pod."""
        self._requests = [0] * len(engines)
        self._computing: dict[int, tuple[int, int]] = {}
        """Request without its first token → the pod that computes it, and the tokens counted."""
        self._answering: dict[int, int] = {}
        """Request → its decode pod."""

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        """The pods."""
        if self._pools is None:
            choice = Route(self._computing_pod(work, self.allowed(work)))
        else:
            decode = self.least(self._pools.decodes, lambda pod: self._requests[pod])
            is_split = self._uncached(decode, work) >= self._settings.min_uncached
            choice = Route(decode)
            if is_split:
                choice = Route(decode, self._computing_pod(work, self._pools.prefills))
        self.place(work, choice, now)
        return choice

    def on_response(self, work: Work, status: int, now: float) -> None:
        """Its tokens are computed."""
        pod, tokens = self._computing.pop(work.index)
        self._tokens[pod] -= tokens

    def on_end(self, work: Work, now: float) -> None:
        """It is no longer in flight."""
        self._requests[self._answering.pop(work.index)] -= 1

    def about_equal(self, work: Work, error: float) -> Sequence[int]:
        """The unified pods that it may choose if it knows tokens up to a share of `error`."""
        pods = self._sticky(work, self.allowed(work))
        loads = [self._tokens[pod] + self._uncached(pod, work) for pod in pods]
        most = min(loads) * (1 + error) / (1 - error)
        return [pod for pod, load in zip(pods, loads, strict=True) if load <= most]

    def place(self, work: Work, choice: Route, now: float) -> None:
        """Count the request on the pods of `choice`."""
        computing = choice.decode if choice.prefill is None else choice.prefill
        tokens = self._uncached(computing, work)
        self._tokens[computing] += tokens
        self._computing[work.index] = (computing, tokens)
        self._requests[choice.decode] += 1
        self._answering[work.index] = choice.decode
        for pod in {computing, choice.decode}:
            self._prefixes.add(pod, work.blocks, now)

    def _computing_pod(self, work: Work, pods: Sequence[int]) -> int:
        return self.least(
            self._sticky(work, pods), lambda pod: self._tokens[pod] + self._uncached(pod, work)
        )

    def _sticky(self, work: Work, pods: Sequence[int]) -> Sequence[int]:
        """The pods that prefix-cache-affinity-filter keeps."""
        needed = self._settings.threshold * work.prompt_tokens
        sticky = [pod for pod in pods if self._prefixes.tokens(pod, work) >= needed]
        others = [pod for pod in pods if pod not in sticky]
        if not sticky or not others:
            return pods
        seconds = [min(self._tokens[p] for p in kind) for kind in (sticky, others)]
        penalty = (seconds[0] - seconds[1]) / self._settings.throughput
        return pods if penalty > self._settings.penalty else sticky

    def _uncached(self, pod: int, work: Work) -> int:
        return work.prompt_tokens - self._prefixes.tokens(pod, work)
