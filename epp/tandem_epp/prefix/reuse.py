"""How soon one pod's cached prompts are used again, compared with how long they stay in its cache.

Ages are counted in tokens that the pod's cache takes in. A prompt is evicted when about as many
tokens as the cache holds came after its last use, so an age is a share of that, and no clock is
needed.
"""

from typing import Final

from tandem_planner.cost import eviction

_TURNS: Final = 4.0
"""Capacities of tokens taken in after which older uses count half. Fewer: the few prompts that a
tiny cache holds say little. More: it takes longer to notice other clients."""


class Reuse:
    """The uses of what one pod caches."""

    __slots__ = ("_ages", "_taken", "_used", "clock", "harm")

    def __init__(self) -> None:
        self.clock = 0
        """Tokens that the cache has taken in."""
        self.harm = 0.0
        """By `tandem_planner.cost.eviction`; 0 until the cache was full once."""
        self._taken = self._used = self._ages = 0.0
        """Tokens taken in and tokens used again of late; ages of these, as shares."""

    def on_used(self, tokens: int, used_at: int, capacity: int) -> None:
        """`tokens` are used again that were last used when the clock was at `used_at`."""
        self._used += tokens
        self._ages += tokens * min(1.0, (self.clock - used_at) / max(1, capacity))

    def on_taken(self, tokens: int, capacity: int) -> None:
        """`tokens` are new in the cache."""
        self.clock += tokens
        self._taken += tokens
        if self._taken > _TURNS * capacity:
            self._taken, self._used, self._ages = self._taken / 2, self._used / 2, self._ages / 2
        if self.clock > capacity and self._used:
            self.harm = eviction(self._used / (self._used + self._taken), self._ages / self._used)
