"""What first tokens take beyond the terms of the cost: HTTP, the steps of proxies, the first decode
step after a hand-off. The same for all pods of a path, and learned for each path from the latest
requests; the median, because a request that waited unexpectedly says nothing.

    overhead = measured - queue - compute - transfer - handoff    by the engines' own report
    overhead = measured - terms                                   without one

The first is exact. The second one also has in it by how much the wait was mispredicted.
"""

from collections import deque
from statistics import median
from typing import Final

from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_planner.cost import HANDOFF_SECONDS

_LATEST: Final = 32
"""Requests of which the median is taken. More: steadier, and slower to follow a change."""
_LEAST: Final = 4
"""Requests from which a median is used."""


def overhead_of(measured: float, terms: float, report: Timing, *, is_split: bool) -> float:
    """What a first token took beyond the terms, in seconds. `measured`: what it took in all;
    `terms`: what they predicted."""
    if report.queue is None or report.compute is None:
        return measured - terms
    handoff = HANDOFF_SECONDS if is_split else 0.0
    return measured - report.queue - report.compute - (report.transfer or 0.0) - handoff


class FirstTokenOverheads:
    """Path → seconds that a first token takes beyond the terms of the cost."""

    def __init__(self) -> None:
        self._latest: dict[RoutingPath, deque[float]] = {}
        self._seconds: dict[RoutingPath, float] = {}

    def seconds(self, path: RoutingPath) -> float:
        """At least 0, and 0 until it is measured."""
        return self._seconds.get(path, 0.0)

    def learn(self, path: RoutingPath, seconds: float) -> None:
        """The overhead of a request was `seconds`."""
        latest = self._latest.setdefault(path, deque(maxlen=_LATEST))
        latest.append(seconds)
        if len(latest) >= _LEAST:
            self._seconds[path] = max(0.0, median(latest))
