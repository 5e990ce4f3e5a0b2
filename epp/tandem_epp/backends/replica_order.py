"""Which of an EPP's replicas this one is."""

from typing import NamedTuple


class ReplicaOrder(NamedTuple):
    """The position of this replica among those that are connected, in an order that all know."""

    rank: int = 0
    """From 0."""
    replicas: int = 1
    """How many there are, this one included."""
