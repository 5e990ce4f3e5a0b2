"""A router that knows what no router can: a bound to measure the picker against.

It knows the length of every answer, the state of every pod, how fast each computes, and all
requests of the next `horizon` seconds. For each request it tries every pod: it simulates the pod to
its end, with the requests planned for it, and takes the one whose cost grows least. Requests within
the horizon are planned in order as they come into sight, and each is tried again when it arrives.
What it does not know is the noise of steps. It is a search, not a proof: with more of it the bound
may rise.
"""

from collections.abc import Sequence
from typing import Final

from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.measures import Slo
from tandem_planner.simulation.routers import Policy, Route
from tandem_planner.simulation.work import Request, Work

_END: Final = 1e9
"""Seconds: later than any request ends."""
_TTFT_WEIGHT: Final = 0.01
_ITL_WEIGHT: Final = 1.0
"""Cost of a second, where a missed target costs 1: they decide between pods that miss as few."""


class Clairvoyant(Policy):
    """Misses as few targets as its search finds, over unified pods."""

    def __init__(
        self,
        engines: Sequence[Engine],
        seed: int,
        *,
        requests: Sequence[Request],
        slo: Slo,
        horizon: float = 3.0,
    ) -> None:
        """`requests` in order of their times, as they will be sent."""
        super().__init__(engines, seed)
        self._requests, self._slo, self._horizon = requests, slo, horizon
        self._planned: list[list[int]] = [[] for _ in engines]
        """Pod → requests in sight that it will get, in order."""
        self._in_sight = 0
        self._costs: dict[tuple[int, tuple[int, ...]], float] = {}
        """Of a pod with planned requests, at this moment."""

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        """The pod whose cost grows least."""
        requests = self._requests
        self._costs.clear()
        while self._in_sight < len(requests) and requests[self._in_sight].at <= now + self._horizon:
            self._plan(self._in_sight, now)
            self._in_sight += 1
        pod = self._plan(work.index, now)
        self._planned[pod].remove(work.index)
        return Route(pod)

    def _plan(self, index: int, now: float) -> int:
        """Plan the request for the pod whose cost grows least."""
        for planned in self._planned:
            if index in planned:
                planned.remove(index)
        only = self._requests[index].only
        pods = range(len(self.engines)) if only is None else [only]
        pod = self.least(pods, lambda pod: self._growth(pod, index, now))
        self._planned[pod].append(index)
        self._planned[pod].sort()
        return pod

    def _growth(self, pod: int, index: int, now: float) -> float:
        planned = self._planned[pod]
        more = tuple(sorted([*planned, index]))
        return self._cost(pod, more, now) - self._cost(pod, tuple(planned), now)

    def _cost(self, pod: int, planned: tuple[int, ...], now: float) -> float:
        """What the requests that the pod has, and those planned for it, will cost."""
        if (pod, planned) not in self._costs:
            self._costs[pod, planned] = self._simulated(pod, planned, now)
        return self._costs[pod, planned]

    def _simulated(self, pod: int, planned: Sequence[int], now: float) -> float:
        engine = self.engines[pod].fork()
        works = [*engine.works()]
        for index in planned:
            request = self._requests[index]
            at = max(now, request.at)
            engine.advance(at)
            work = request.work(index, at)
            engine.add(work)
            works.append(work)
        engine.advance(_END)
        return sum(map(self._cost_of, works))

    def _cost_of(self, work: Work) -> float:
        if work.first_token is None:
            raise ValueError(f"request {work.index} did not end")
        ttft, itl = work.first_token - work.arrived, work.itl or 0.0
        return (not self._slo.is_met(ttft, itl)) + _TTFT_WEIGHT * ttft + _ITL_WEIGHT * itl
