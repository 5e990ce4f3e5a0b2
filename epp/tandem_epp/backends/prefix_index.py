"""Approximate prefix index: which prompts a backend has received, and so probably still caches.

Each backend has a few generations of block hashes. A chain is added whole, so a generation that
holds a hash also holds all hashes before it in the chain, and the same is true of the union of all
generations: a binary search finds the longest cached prefix. Sets are updated in bulk, so adding
thousands of blocks takes microseconds; a linked list with one node per block would be far slower.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

GENERATIONS: Final = 4
"""Generations per index. More evict in smaller steps and make lookups slower."""


class PrefixIndex:
    """Hashes of at most `capacity` blocks that a backend probably caches; evicts the oldest."""

    def __init__(self, capacity: int) -> None:
        self._generations: deque[set[int]] = deque([set()])
        """Oldest first; blocks are added to the last one."""
        self._capacity = self._generation_size = 0
        self.resize(capacity)

    def __len__(self) -> int:
        """Blocks in all generations. A block in several generations counts in each, so this is
        never less than the number of distinct blocks."""
        return sum(map(len, self._generations))

    def __contains__(self, block: int) -> bool:
        for generation in self._generations:  # noqa: SIM110 - any() takes three times as long here
            if block in generation:
                return True
        return False

    def resize(self, capacity: int) -> None:
        """Hold at most `capacity` blocks from now on. Raises ValueError below GENERATIONS."""
        if capacity < GENERATIONS:
            raise ValueError(f"a prefix index holds at least {GENERATIONS} blocks, not {capacity}")
        self._capacity, self._generation_size = capacity, capacity // GENERATIONS
        self._evict()

    def add(self, chain: Sequence[int]) -> None:
        """Add a prompt's chain; of a chain that exceeds the capacity less one generation, its
        beginning."""
        newest = self._generations[-1]
        # The newest generation held less than one generation's size before this call, so with this
        # limit it never exceeds the capacity by itself and survives the eviction below.
        newest.update(chain[: self._capacity - self._generation_size])
        if len(newest) >= self._generation_size:
            self._generations.append(set())
        self._evict()

    def match(self, chain: Sequence[int]) -> int:
        """How many leading blocks of `chain` are in the index, without a gap."""
        if not chain or chain[0] not in self:
            return 0
        # Invariant: a block that is present has all its predecessors present, so "present" is
        # monotonic along the chain.
        low, high = 1, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self:
                low = middle + 1
            else:
                high = middle
        return low

    def clear(self) -> None:
        """Remove everything: the backend's process restarted."""
        self._generations = deque([set()])

    def _evict(self) -> None:
        while len(self._generations) > 1 and len(self) > self._capacity:
            self._generations.popleft()
        # `resize` has reduced the capacity below the one generation that is left.
        if len(self) > self._capacity:
            self._generations[0] = set()
