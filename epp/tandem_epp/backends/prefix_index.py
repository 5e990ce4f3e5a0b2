"""Approximate prefix index: which prompts a backend has seen, and so probably still caches.

Kept per backend as a few generations of block hashes. A chain is added whole, so every generation
holds a hash only together with all the hashes before it, and so does their union: the longest
cached prefix can be found by binary search. Bulk set updates keep an insertion of thousands of
blocks in the microseconds, which one linked list of single blocks would not.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

GENERATIONS: Final = 4
"""More of them forget more finely and are slower to search."""


class PrefixIndex:
    """What one backend is believed to cache: at most `capacity` blocks, oldest forgotten first."""

    def __init__(self, capacity: int) -> None:
        self._generations: deque[set[int]] = deque([set()])
        self._capacity = self._share = 0
        self.resize(capacity)

    def __len__(self) -> int:
        """Blocks held, one of several generations counted in each: never below the truth."""
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
        self._capacity, self._share = capacity, capacity // GENERATIONS
        self._forget()

    def add(self, chain: Sequence[int]) -> None:
        """Remember a prompt's chain; of one longer than most of the capacity, its beginning."""
        newest = self._generations[-1]
        newest.update(chain[: self._capacity - self._share])
        if len(newest) >= self._share:
            self._generations.append(set())
        self._forget()

    def match(self, chain: Sequence[int]) -> int:
        """How many blocks of `chain` are held, counted from its start without a gap."""
        if not chain or chain[0] not in self:
            return 0
        low, high = 1, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self:
                low = middle + 1
            else:
                high = middle
        return low

    def clear(self) -> None:
        """Forget everything: the backend restarted."""
        self._generations = deque([set()])

    def _forget(self) -> None:
        while len(self._generations) > 1 and len(self) > self._capacity:
            self._generations.popleft()
        if len(self) > self._capacity:
            self._generations[0] = set()
