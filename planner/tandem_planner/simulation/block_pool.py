"""The KV blocks of a simulated pod: used ones, and cached ones by least recent use, as in vLLM.

Used and cached blocks share one capacity. A cached block that no request uses is evicted when room
is needed, the end of a prompt before its start.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

BLOCK: Final = 512
"""Tokens per block: the granularity of the traces. Real blocks are smaller."""


class BlockPool:
    """Blocks by id, and tokens that only their own request can use."""

    def __init__(self, tokens: int) -> None:
        self.capacity = tokens
        self.private = 0
        """Tokens of used KV without an id: answers, ends of prompts, prompts not yet computed."""
        self._users: dict[int, int] = {}
        """Cached block in use → number of requests that use it."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that no request uses, the first to evict first."""

    @property
    def used(self) -> int:
        """Tokens that requests use."""
        return len(self._users) * BLOCK + self.private

    def copy(self) -> "BlockPool":
        """A pool in the same state."""
        pool = BlockPool(self.capacity)
        pool.private = self.private
        pool._users, pool._idle = self._users.copy(), self._idle.copy()
        return pool

    def __contains__(self, block: int) -> bool:
        return block in self._users or block in self._idle

    def has_room(self, tokens: int) -> bool:
        """Whether `tokens` more can be used, after eviction."""
        return self.used + tokens <= self.capacity

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are cached."""
        count = 0
        for block in blocks:
            if block not in self:
                break
            count += 1
        return count

    def use(self, blocks: Iterable[int]) -> None:
        """Count one more user of each block; a block that is not cached becomes so."""
        for block in blocks:
            self._idle.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        self.evict()

    def release(self, blocks: Sequence[int]) -> None:
        """Count one user less of each block; the last ones are evicted first."""
        for block in reversed(blocks):
            users = self._users.pop(block) - 1
            if users:
                self._users[block] = users
            else:
                self._idle[block] = None

    def forget(self) -> None:
        """Drop all blocks that no request uses."""
        self._idle.clear()

    def evict(self) -> None:
        """Drop idle blocks until everything fits."""
        excess = self.used + len(self._idle) * BLOCK - self.capacity
        while excess > 0 and self._idle:
            self._idle.popitem(last=False)
            excess -= BLOCK
