"""What first tokens take beyond what is computed for each pod: HTTP, the steps of proxies, and in a
hand-off its further round trips. The same for all pods of a path, and learned for each path from
the latest requests; the median, because a request that waited unexpectedly says nothing.

    beyond = measured - queue - compute - transfer - join    by the engines' own report, of the
                                                             transfer what is waited for
    beyond = measured - (wait + prefill + transfer + join)   without one, by the predicted terms

The first is exact. The second one also has in it by how much the wait was mispredicted.

A hand-off takes what the split path has beyond that of one engine: it is the term `handoff` of the
cost, so a split is chosen by what splits take here.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from math import isfinite
from statistics import median
from typing import Final

from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_planner.cost import HANDOFF_SECONDS, STREAMED_SHARE

_LATEST: Final = 32
"""Requests of which the median is taken. More: steadier, and slower to follow a change."""
_LEAST: Final = 4
"""Requests from which a median is used."""
_MOST_HANDOFF: Final = 0.1
"""Seconds that a hand-off is believed to take at most. Without reports, a wait that is mispredicted
counts too: unlimited, a busy hour would end all splits."""
_FRESH_SECONDS: Final = 600.0
"""Seconds after the latest split for which it counts what splits took: a path that is avoided, and
so not measured, is tried again."""
_SPLIT: Final = RoutingPath.PREFILL_THEN_DECODE
_PATHS: Final = frozenset(RoutingPath)
_ONE_ENGINE: Final = (RoutingPath.UNIFIED, RoutingPath.FAST_DECODE)


def beyond_terms(measured: float, terms: float, join: float, report: Timing) -> float:
    """What a first token took beyond the terms, in seconds. `measured`: what it took in all;
    `terms`: what was predicted for the chosen pods, without the hand-off; `join`: the part of it
    that no engine reports."""
    if report.queue is None or report.compute is None:
        return measured - terms
    return measured - report.queue - report.compute - waited_seconds(report) - join


def waited_seconds(report: Timing) -> float:
    """The part of the reported transfer that the first token waited for, in seconds: all of it,
    but in a streamed hand-off only what came after the prefill's answer, STREAMED_SHARE of it where
    the sidecar does not say."""
    transfer = report.transfer or 0.0
    if not report.streamed:
        return transfer
    if report.waited is None:
        return transfer * STREAMED_SHARE
    return min(report.waited, transfer)


class FirstTokenOverheads:
    """Path → seconds that a first token takes beyond the terms of the cost."""

    def __init__(self) -> None:
        self._latest: dict[RoutingPath, deque[float]] = {}
        self._seconds: dict[RoutingPath, float] = {}
        self._learned_at: dict[RoutingPath, float] = {}
        """When each path was last learned from, in Unix seconds."""
        self._handoff = self._assumed = HANDOFF_SECONDS
        """What `handoff` returns while splits are fresh, and after that."""

    def seconds(self, path: RoutingPath) -> float:
        """What to expect, the hand-off included; at least 0. Until it is measured, HANDOFF_SECONDS
        for a split, else 0."""
        return self._seconds.get(path, HANDOFF_SECONDS if path is _SPLIT else 0.0)

    def handoff(self, now: float) -> float:
        """What a split takes more than one engine, at `now` (Unix seconds). HANDOFF_SECONDS until
        both are measured, but never more than all that a split takes."""
        is_fresh = now - self._learned_at.get(_SPLIT, 0.0) <= _FRESH_SECONDS
        return self._handoff if is_fresh else self._assumed

    @property
    def latest(self) -> Iterator[tuple[RoutingPath, tuple[float, ...], float]]:
        """Of each path that was learned from: what its latest requests took, the oldest first, and
        when the last one did, in Unix seconds."""
        for path, seconds in self._latest.items():
            yield path, tuple(seconds), self._learned_at[path]

    def take_over(self, path: str, seconds: Sequence[float], at: float) -> None:
        """Another replica learned `seconds`, the oldest first, the last one `at` (Unix seconds).
        Ignored if this one has learned of the path, and for a path that it does not know."""
        if path not in self._latest:
            for each in seconds[-_LATEST:]:
                self.learn(path, each, at)

    def learn(self, path: str, seconds: float, now: float) -> None:
        """A request took `seconds` beyond the terms, as known at `now` (Unix seconds). Ignored if
        that is no number, and for a path that this version does not know: a replica told it."""
        if path not in _PATHS or not isfinite(seconds):
            return
        path = RoutingPath(path)
        latest = self._latest.setdefault(path, deque(maxlen=_LATEST))
        latest.append(seconds)
        self._learned_at[path] = now
        if len(latest) >= _LEAST:
            self._seconds[path] = max(0.0, median(latest))
            self._compare()

    def _compare(self) -> None:
        split = self.seconds(_SPLIT)
        alone = next((self._seconds[path] for path in _ONE_ENGINE if path in self._seconds), None)
        self._assumed = self._handoff = min(HANDOFF_SECONDS, split)
        if alone is not None:
            self._handoff = min(_MOST_HANDOFF, max(0.0, split - alone))
