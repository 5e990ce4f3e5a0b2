"""What other replicas may have placed on pods without this one knowing of it yet.

A placement reaches the other replicas after a few milliseconds. Replicas that decide on a burst at
the same time, from the same figures, would all choose the same pods. So pods are dealt to replicas
in the order of names, and a pod of another replica costs more while requests come fast:

    unseen × (prefill of this request + average prefill there)

seconds, since either may have to wait for the other. `unseen` is how many requests another replica
placed on each of its pods within the last WINDOW: as many as this one placed, over the pods that it
owns. It is close to 0 unless requests come in bursts, and never rules a pod out.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from tandem_planner.cost import TIE
from tandem_planner.figure_table import FigureTable

from ..backends.fleet_figures import FleetFigures
from ..backends.replica_order import ReplicaOrder

WINDOW: Final = 0.005
"""Seconds for which a placement may be unknown to other replicas: two to three times what
benchmarks/exchange.py measures. Too low: replicas collide in bursts; too high: each avoids the
others' pods without need."""
_WEIGHT: Final = 0.02
"""Weight of the newest decision in the average: the first requests of a burst look like any other,
but met others before."""


class UnseenPlacements:
    """How close together this replica's decisions are."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        """Times of the decisions within WINDOW."""
        self._average = 0.0
        """Decisions within WINDOW before a decision, on average."""

    def count_decision(self, now: float) -> float:
        """A decision is made `now`, in seconds: how many came shortly before, or usually do."""
        recent = self._recent
        while recent and recent[0] <= now - WINDOW:
            recent.popleft()
        before = len(recent)
        recent.append(now)
        self._average += _WEIGHT * (before - self._average)
        return max(float(before), self._average)


def with_unseen(  # noqa: PLR0917 - the pods, and what is known of the replicas
    table: FigureTable,
    pods: FleetFigures,
    rows: Sequence[int],
    turns: Sequence[int],
    order: ReplicaOrder,
    placed: float,
) -> FigureTable:
    """`table` with the cost of what may be unseen on the pods in `rows`, if every replica `placed`
    as many requests lately. `turns` are the pods' positions in an order that all replicas share."""
    # All of a replica's requests are on its share of the pods.
    unseen = placed * order.replicas / len(rows)
    if unseen * pods.longest_prefill < TIE:
        return table
    changed = table.copy()
    for row, turn in zip(rows, turns, strict=True):
        if turn % order.replicas != order.rank:
            own, prefill = table.pods[row], pods.pods[row].estimates.mean_prefill
            changed.write(
                row, own._replace(queued=own.queued + unseen * prefill, stall=own.stall + unseen)
            )
    return changed
