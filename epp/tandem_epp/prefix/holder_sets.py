"""Sets of holders: which pods have a block, and in which tiers.

A pod with number N is bit `2 * N` of a set for the GPU and the bit above it for the CPU. Sets are
interned, because few distinct ones stand for millions of blocks. Pure.
"""


class HolderSets:
    """Interned sets of holders. A number stands for a set while some block has it."""

    def __init__(self) -> None:
        self._sets: list[int] = []
        self._views: list[tuple[int, int]] = []
        """For each set, the pods that have the block at all and those on the GPU, at even bits."""
        self._blocks: list[int] = []
        """For each set, the number of blocks that have it."""
        self._numbers: dict[int, int] = {}
        """Set → number."""
        self._free: list[int] = []

    def holders(self, number: int) -> int:
        """The set with this number."""
        return self._sets[number]

    def views(self, number: int) -> tuple[int, int]:
        """The pods that have the block, in any tier and on the GPU, as bits `2 * number`."""
        return self._views[number]

    def acquire(self, holders: int) -> int:
        """The number of a set that one more block has."""
        if (number := self._numbers.get(holders)) is None:
            number = self._intern(holders)
        self._blocks[number] += 1
        return number

    def release(self, number: int) -> None:
        """One block less has this set."""
        self._blocks[number] -= 1
        if not self._blocks[number]:
            del self._numbers[self._sets[number]]
            self._free.append(number)

    def _intern(self, holders: int) -> int:
        even = _even_bits(holders.bit_length())
        views = ((holders | holders >> 1) & even, holders & even)
        if self._free:
            number = self._free.pop()
            self._sets[number], self._views[number] = holders, views
        else:
            number = len(self._sets)
            self._sets.append(holders)
            self._views.append(views)
            self._blocks.append(0)
        self._numbers[holders] = number
        return number


class PrefixEnds:
    """The depth at which each pod lost a prompt's prefix."""

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}
        """Bit of the pod → number of leading blocks that it has."""

    def keep(self, pods: int, present: int, depth: int) -> int:
        """Record `depth` for the `pods` that are not `present`; returns those that are."""
        kept = pods & present
        # Without an entry, the depth is 0: that is where most pods are lost.
        lost = pods ^ kept if depth else 0
        while lost:
            bit = lost.bit_length() - 1
            self._depths[bit] = depth
            lost ^= 1 << bit
        return kept

    def of(self, number: int) -> int:
        """The number of leading blocks that the pod with this number has."""
        return self._depths.get(2 * number, 0)


def _even_bits(count: int) -> int:
    """A number whose even bits below `count` are set."""
    return ((1 << (count + count % 2)) - 1) // 3
