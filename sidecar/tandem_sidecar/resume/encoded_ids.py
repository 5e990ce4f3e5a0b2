"""Token ids as an event has them: numbers with commas between them."""

from array import array
from typing import Final

import msgspec

_PIECE: Final = 4096
"""Bytes that are decoded together. More: an object for each id of a long prompt at once, which is
the most memory that a stream takes."""

_numbers: Final = msgspec.json.Decoder(list[int])


def read_ids(data: bytes) -> "array[int]":
    """The ids that `data` encodes, in no more memory than they take. Raises one of
    `whole_events.MALFORMED`."""
    ids, start, size = array("I"), 0, len(data)
    while start < size:
        end = data.find(b",", start + _PIECE)
        end = size if end < 0 else end
        ids.extend(_numbers.decode(b"[%b]" % data[start:end]))
        start = end + 1
    # A copy has no room to grow.
    return ids[:]
