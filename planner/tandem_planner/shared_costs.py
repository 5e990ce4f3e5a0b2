"""The same cost for engines that their samples do not tell apart. Pure.

Alike engines take the same time, but what is learned of each has an error of its own. So those that
do not differ by more than these errors share one fit: that of the engine in the middle, where each
counts as much as it is known exactly (its inverse squared error).
"""

from collections.abc import Sequence
from operator import mul

from .learned_cost import CostT, LearnedCost


def share_costs(fits: Sequence[LearnedCost[CostT]]) -> list[bool]:
    """Let alike engines share, one of `fits` each; returns for each whether its `best` changed."""
    measured = [fit for fit in fits if fit.count and not fit.is_cold]
    # An engine alone of its kind shares with no other one.
    other = _middle(measured) if measured and len(fits) > 1 else None
    return [fit.share(other) for fit in fits]


def _middle(fits: Sequence[LearnedCost[CostT]]) -> LearnedCost[CostT]:
    """The weighted median, by what a typical request takes."""
    costs = [fit.cost for fit in fits]
    typical = [sum(column) for column in zip(*(fit.window.typical for fit in fits), strict=True)]
    weights = [fit.window.tolerance**-2 for fit in fits]
    left = sum(weights) / 2
    order = sorted(range(len(fits)), key=lambda i: sum(map(mul, costs[i], typical)))
    for i in order:
        left -= weights[i]
        if left <= 0.0:
            return fits[i]
    return fits[order[-1]]
