"""One walk along a prompt's block keys: the longest cached prefix of every pod.

The walk can be made in slices. Between two of them the table may change: what it had then counts
for the blocks before, what it has now for those behind. Pure.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Generic, Protocol, TypeVar

from .blocks import CachedPrefix
from .holder_sets import HolderSets, PrefixEnds


class Numbered(Protocol):
    """A pod's table, as the walk sees it."""

    @property
    def number(self) -> int:
        """Its place in sets of holders."""


T = TypeVar("T", bound=Numbered)


class PrefixWalk(Generic[T]):
    """The walk for all pods of one block size."""

    def __init__(
        self,
        keys: Iterator[int],
        tables: Mapping[str, T],
        block_tokens: int,
        holders_of: Callable[[int], int | None],
        sets: HolderSets,
    ) -> None:
        """`holders_of`: block key → number of its set in `sets`; None without holders."""
        self.tables = tables
        """Pod → its table when the walk began."""
        self._keys, self._block_tokens = keys, block_tokens
        self._holders_of, self._sets = holders_of, sets
        # A pod stays in these while it has every block so far.
        self._present = self._gpu = sum(1 << (2 * table.number) for table in tables.values())
        self._total_ends, self._gpu_ends = PrefixEnds(), PrefixEnds()
        self._depth = 0

    def advance(self, blocks: int) -> bool:
        """Look up `blocks` more blocks; returns whether there may be more. No key is taken behind
        the first that no pod has."""
        present, gpu, depth = self._present, self._gpu, self._depth
        end = depth + blocks
        # Since the last slice, numbers of sets may have changed their meaning.
        former = -1
        for key in islice(self._keys, blocks):
            if not present or (number := self._holders_of(key)) is None:
                break
            # Blocks that follow each other mostly have the same holders: then no pod is lost.
            if number != former:
                either, on_gpu = self._sets.views(number)
                present = self._total_ends.keep(present, either, depth)
                gpu = self._gpu_ends.keep(gpu, on_gpu, depth)
                former = number
            depth += 1
        self._present, self._gpu, self._depth = present, gpu, depth
        return depth == end and bool(present)

    def prefixes(self) -> dict[str, CachedPrefix]:
        """Pod → its prefix, of those that have any, after the last slice."""
        # The walk ended for all that are left: at the first block without holders, or at the end.
        self._total_ends.keep(self._present, 0, self._depth)
        self._gpu_ends.keep(self._gpu, 0, self._depth)
        size = self._block_tokens
        return {
            name: CachedPrefix(total * size, self._gpu_ends.of(table.number) * size)
            for name, table in self.tables.items()
            if (total := self._total_ends.of(table.number))
        }
