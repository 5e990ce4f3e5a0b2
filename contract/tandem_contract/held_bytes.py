"""How many bytes of its clients a process (EPP, sidecar, router) holds, over all streams and
connections, and the most that it may.

Bounds of a stream or a connection do not bound the process: a peer opens as many as it likes. So
whatever waits in memory for a peer is counted here: what a peer may still add to is refused beyond
the limit (`take`), and what must be kept is counted all the same (`add`), so that less is admitted.
"""

from typing import Final

UNLIMITED: Final = 1 << 62
"""Bytes: a limit that nothing reaches."""
SMALL: Final = 256 * 1024
"""Bytes of something small, for which a part of the limit is kept free: stalled uploads of large
bodies must not keep ordinary requests out."""
STREAM_BYTES: Final = 8 * 1024
"""What an open stream takes itself, with its state and the request's headers."""
_RESERVED: Final = 8
"""The share of the limit that only small ones may use: one in so many."""


class HeldBytes:
    """The bytes that are held now."""

    __slots__ = ("_large_limit", "connections", "limit", "size")

    def __init__(self, limit: int = UNLIMITED) -> None:
        """`limit` is in bytes."""
        self.limit = limit
        self._large_limit = limit - limit // _RESERVED
        self.size = 0
        self.connections = 0
        """Connections whose answers are counted."""

    @property
    def is_twice_full(self) -> bool:
        """Whether what is counted whatever the limit has doubled it."""
        return self.size > 2 * self.limit

    def exceeds_share(self, size: int) -> bool:
        """Whether a connection with `size` bytes of answers must go: too much is held, and it holds
        more than its share. Some connection does, and those with less are not cut for it."""
        return self.size > self.limit and size * self.connections > self.limit

    def take(self, size: int, *, of: int) -> bool:
        """Count `size` more bytes of something that has `of` bytes in all, as far as is known;
        False: they exceed the limit and are not counted."""
        after = self.size + size
        if after > (self.limit if of <= SMALL else self._large_limit):
            return False
        self.size = after
        return True

    def add(self, size: int) -> None:
        """Count bytes that are held whatever the limit."""
        self.size += size

    def give_back(self, size: int) -> None:
        """Bytes that were counted are no longer held."""
        self.size -= size
