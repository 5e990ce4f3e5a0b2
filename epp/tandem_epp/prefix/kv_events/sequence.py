"""What the number of a batch means, from its predecessor. Pure.

An engine numbers its batches from 0 since its start. Numbers alone do not tell a duplicate (sent
again by a replay) from the first batches of a restarted engine, so timestamps decide: a restarted
engine's batches are younger.

    no batch yet, number 0             next
    last + 1                           next
    above last + 1                     gap: replay from `last` on
    up to last, not younger than last  duplicate
    up to last, younger                restart: the caches are empty; replay from 0
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto


class BatchOrder(Enum):
    """What to do with a batch."""

    NEXT = auto()
    DUPLICATE = auto()
    GAP = auto()
    RESTART = auto()


@dataclass(frozen=True, slots=True)
class Position:
    """The last batch that was applied."""

    number: int = -1
    """-1 before the first."""
    timestamp: float = 0.0
    """Unix seconds by the engine's clock."""


def judge(last: Position, number: int, timestamp: float) -> BatchOrder:
    """What the batch with this number means after `last`."""
    if number == last.number + 1:
        return BatchOrder.NEXT
    if number > last.number:
        return BatchOrder.GAP
    return BatchOrder.RESTART if timestamp > last.timestamp else BatchOrder.DUPLICATE


def continues(last: Position, batches: Sequence[Position]) -> bool:
    """Whether `batches`, the answer to a replay from `last.number` on, continues what came before.

    It must begin with the last batch itself: that shows that the same engine answers.
    """
    return bool(batches) and batches[0] == last and unbroken_count(batches) == len(batches)


def is_whole(batches: Sequence[Position]) -> bool:
    """Whether `batches`, the answer to a replay from 0 on, are all batches since the engine's
    start."""
    if not batches:
        return True
    return batches[0].number == 0 and unbroken_count(batches) == len(batches)


def unbroken_count(batches: Sequence[Position]) -> int:
    """The number of leading batches that follow each other."""
    first = batches[0].number if batches else 0
    return next((i for i, batch in enumerate(batches) if batch.number != first + i), len(batches))
