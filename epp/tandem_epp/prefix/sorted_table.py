"""A table from 64-bit keys to numbers that takes little more memory than the numbers themselves.

Keys are spread over shards by their high bits; each shard is a sorted array with a parallel array
of values. A Python dictionary needs five to eight times as many bytes per entry, and copies
everything when it grows; here an insertion moves a few kilobytes at most.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

_KEY_BITS: Final = 64
_EMPTY: Final = array("Q")


class SortedTable:
    """Maps keys below 2**64 to numbers that fit in `typecode`; keys should be evenly spread."""

    def __init__(self, typecode: str, shard_bits: int) -> None:
        """`typecode` is that of `array`; 2**`shard_bits` shards should hold a few hundred to a few
        thousand entries each."""
        self._shift = _KEY_BITS - shard_bits
        self._typecode = typecode
        # Every shard starts as the same empty array, which is never changed.
        self._keys = [_EMPTY] * (1 << shard_bits)
        self._values = [_EMPTY] * (1 << shard_bits)
        self._count = 0
        self.entry_bytes: Final = 8 + array(typecode).itemsize
        """Bytes per entry, without what the arrays reserve for growth (at most an eighth)."""

    def __len__(self) -> int:
        return self._count

    def get(self, key: int) -> int | None:
        """The value of `key`; None without an entry."""
        keys = self._keys[key >> self._shift]
        place = bisect_left(keys, key)
        if place < len(keys) and keys[place] == key:
            return self._values[key >> self._shift][place]
        return None

    def set(self, key: int, value: int) -> int | None:
        """Add or replace an entry; returns its former value, None without one."""
        shard = key >> self._shift
        keys, values = self._keys[shard], self._values[shard]
        place = bisect_left(keys, key)
        if place < len(keys) and keys[place] == key:
            former, values[place] = values[place], value
            return former
        if keys is _EMPTY:
            keys = self._keys[shard] = array("Q")
            values = self._values[shard] = array(self._typecode)
        keys.insert(place, key)
        values.insert(place, value)
        self._count += 1
        return None

    def pop(self, key: int) -> int | None:
        """Remove an entry; returns its value, None without an entry."""
        shard = key >> self._shift
        keys = self._keys[shard]
        place = bisect_left(keys, key)
        if place == len(keys) or keys[place] != key:
            return None
        del keys[place]
        self._count -= 1
        return self._values[shard].pop(place)

    def values(self) -> Iterator[int]:
        """Every value. The table must not change meanwhile."""
        for values in self._values:
            yield from values
