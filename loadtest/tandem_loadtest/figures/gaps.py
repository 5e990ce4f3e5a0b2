"""The gaps between tokens of a group of requests: how long they were, and when."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from .histogram import Histogram, buckets_of

_MOST_BINS: Final = 240
"""Bins of time before they are made wider."""
_MOST_PENDING: Final = 200_000
"""Gaps that are kept before they are counted; 2 bytes each."""


class Gaps:
    """A histogram of gaps for every bin of time; bounded in memory.

    Bins are 0.1 s wide at first, and wider (0.5, 1, 5, 10, … s) whenever there are too many. Every
    interval of `timeline.interval_for` a run of that length is a multiple of the width.
    """

    def __init__(self) -> None:
        self._sums = Histogram()
        """Number, sum, minimum and maximum of all gaps; its buckets are in `_counts`."""
        self._tenths = 1
        """Width of a bin in tenths of a second."""
        self._pending: dict[int, array[int]] = {}
        """Bin → buckets that are not yet in `_counts`: copying their bytes is faster than counting
        the few gaps that an answer has in a bin."""
        self._pending_count = 0
        """Number of them in all bins."""
        self._counts: dict[int, Counter[int]] = {}
        """Bin → bucket of the histogram → gaps."""

    def add(self, first_token: float, gaps: Sequence[float]) -> None:
        """Add the gaps of an answer, at least one, which follow each other from `first_token`."""
        self._sums.add_sums(gaps)
        ends = list(accumulate(gaps, initial=first_token))
        while ends[-1] * 10 >= self._tenths * _MOST_BINS:
            self._widen()
        buckets, pending, width = buckets_of(gaps), self._pending, self._tenths / 10
        start, count = 0, len(gaps)
        while start < count:
            position = int(ends[start + 1] / width)
            # Gaps end in rising order: all up to the end of the bin are in it.
            stop = bisect_left(ends, (position + 1) * width, start + 2) - 1
            if position in pending:
                pending[position] += buckets[start:stop]
            else:
                pending[position] = buckets[start:stop]
            start = stop
        self._pending_count += count
        if self._pending_count > _MOST_PENDING:
            self._count_pending()

    def merge(self, other: "Gaps") -> None:
        """Add all gaps of `other`, which keeps them."""
        other._count_pending()
        self._count_pending()
        while self._tenths < other._tenths:
            self._widen()
        self._sums.merge(other._sums)
        factor = self._tenths // other._tenths
        for position, counts in other._counts.items():
            self._counts.setdefault(position // factor, Counter()).update(counts)

    def histogram(self) -> Histogram:
        """All gaps."""
        self._count_pending()
        histogram = Histogram()
        histogram.merge(self._sums)
        for counts in self._counts.values():
            histogram.counts.update(counts)
        return histogram

    def by_interval(self, interval: float, count: int) -> list[Counter[int]]:
        """Histograms of `count` intervals, each a multiple of the bin's width.

        Gaps that end later are in the last.
        """
        self._count_pending()
        merged: list[Counter[int]] = [Counter() for _ in range(count)]
        factor = round(interval * 10) // self._tenths
        for position, counts in self._counts.items():
            merged[min(position // factor, count - 1)].update(counts)
        return merged

    def _count_pending(self) -> None:
        for position, buckets in self._pending.items():
            self._counts.setdefault(position, Counter()).update(buckets)
        self._pending.clear()
        self._pending_count = 0

    def _widen(self) -> None:
        self._count_pending()
        factor = 5 if str(self._tenths).startswith("1") else 2
        wider: dict[int, Counter[int]] = {}
        for position, counts in self._counts.items():
            wider.setdefault(position // factor, Counter()).update(counts)
        self._tenths *= factor
        self._counts = wider
