"""A mergeable histogram whose percentiles have a stated relative error.

Buckets are log-linear, as in HdrHistogram: each power of two is divided into 128 buckets of equal
width. The bucket of a value is the upper half of its bits as an IEEE 754 single (sign, 8 bits of
exponent, 7 of mantissa), so that buckets rise with their values and counting runs in C. Bucket i
stands for its middle, 2^(i//128 − 127) × (1 + (i%128 + 0.5)/128), which is at most 1/256 of itself
away from any value in it. Merging adds the counts, so a histogram of several processes equals that
of a single process.
"""

import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, inf
from typing import Final

RELATIVE_ERROR: Final = 0.004
"""Percentiles are at most 0.4 % off: half a bucket, 1/256, and the rounding to a single."""

_HALVES: Final = slice(1, None, 2) if sys.byteorder == "little" else slice(0, None, 2)
"""Upper halves among the 16-bit halves of an array of singles."""
_PER_POWER: Final = 128


class Histogram:
    """Counts of values in seconds; exact in number, sum, minimum and maximum."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        """Bucket → number of values."""
        self.count = 0
        self.total = 0.0
        """Sum of all values."""
        self.minimum = inf
        self.maximum = -inf

    def add_all(self, values: Iterable[float]) -> None:
        """Add values that are not negative."""
        sequence = values if isinstance(values, tuple | list | array) else tuple(values)
        if sequence:
            self.counts.update(buckets_of(sequence))
            self.add_sums(sequence)

    def add_sums(self, values: Sequence[float]) -> None:
        """Add values, at least one, to all but `counts`."""
        smallest, largest = min(values), max(values)
        self.count += len(values)
        self.total += sum(values)
        self.minimum = min(self.minimum, smallest)
        self.maximum = max(self.maximum, largest)

    def merge(self, other: "Histogram") -> None:
        """Add all values of `other`."""
        self.counts.update(other.counts)
        self.count += other.count
        self.total += other.total
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)

    def percentile(self, percent: float) -> float:
        """The value at rank ceil(percent/100 × count). Raises ValueError when there is none."""
        return percentile_of(self.counts, percent, self.minimum, self.maximum)


def buckets_of(values: Iterable[float]) -> "array[int]":
    """The bucket of each value; no value may be negative."""
    halves = array("H")
    halves.frombytes(array("f", values).tobytes())
    return halves[_HALVES]


def value_of(bucket: int) -> float:
    """The value that stands for a bucket; 0 for the first, which has the value 0."""
    if not bucket:
        return 0.0
    power, step = divmod(bucket, _PER_POWER)
    return float(2.0 ** (power - 127) * (1 + (step + 0.5) / _PER_POWER))


def percentile_of(
    counts: Mapping[int, int], percent: float, minimum: float, maximum: float
) -> float:
    """The percentile of bucket counts, kept within the exact minimum and maximum.

    Raises ValueError when there is no value or `percent` is not from 0 to 100.
    """
    total = sum(counts.values())
    if not total or not 0 <= percent <= 100:
        raise ValueError("a percentile is of at least one value, from 0 to 100")
    rank = max(1, ceil(total * percent / 100))
    passed = 0
    for bucket in sorted(counts):
        passed += counts[bucket]
        if passed >= rank:
            break
    return min(maximum, max(minimum, value_of(bucket)))
