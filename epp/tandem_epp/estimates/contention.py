"""Replicas that choose at once: each prefers pods of its own as far as that happens.

What a replica places is known to the others some milliseconds later. Requests that several replicas
meet within that time would all get the pod that is the best then. So each replica has a part of the
pods, one of as many as there are replicas, in the order of their names; and a prompt on a pod of
another replica's part costs in addition

    share × the mean prefill of that pod

`share`: how many of this replica's placements were lately followed by another replica's before that
one can have known of it. The product is about what a request waits that meets another one there.
Requests that come one by one make the share, and with it the term, small.
"""

from typing import Final

CONCURRENT_SECONDS: Final = 0.005
"""Seconds from a placement in which another replica's is taken for one that did not know of it:
nine of ten events arrive in less (`benchmarks.exchange`)."""
_WEIGHT: Final = 0.1
"""Weight of the newest placement in the share."""


class Contention:
    """That of one replica."""

    def __init__(self) -> None:
        self.share = 0.0
        """Of this replica's placements that another one followed at once; a moving average."""
        self.rank, self.replicas = 0, 1
        """This replica's place among all, and their number."""
        self._placed_at: float | None = None
        self._is_followed = False

    def place(self, now: float) -> None:
        """This replica placed a request."""
        if self._placed_at is not None:
            self.share += _WEIGHT * (self._is_followed - self.share)
        self._placed_at, self._is_followed = now, False

    def follow(self, now: float) -> None:
        """It is told now of another replica's placement."""
        if self._placed_at is not None and now - self._placed_at <= CONCURRENT_SECONDS:
            self._is_followed = True

    def seconds(self, turn: int, mean_prefill: float) -> float:
        """What a request on the pod whose number is `turn` costs in addition."""
        if self.replicas <= 1 or turn % self.replicas == self.rank:
            return 0.0
        return self.share * mean_prefill
