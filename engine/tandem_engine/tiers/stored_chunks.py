"""Which chunks the storage has, as far as this engine knows: it does not write them again, and it
publishes a KV event when they leave. Bookkeeping only: no I/O.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from tandem_kvstore.chunk_store import Chunk
from tandem_kvstore.errors import Reason

from ..blocks import BlocksRemoved
from ..types import Tier

_CAPACITY: Final = 1 << 16
"""Chunks that are remembered. Fewer: chunks are written again, and some removals have no event."""
_UNUSABLE: Final = frozenset(
    {Reason.TRUNCATED, Reason.CORRUPT, Reason.SWAPPED, Reason.FOREIGN, Reason.FORMAT}
)


class StoredChunks:
    """Chunks of one engine that are stored, or that are being saved. For the event loop."""

    def __init__(self, on_removed: Callable[[BlocksRemoved], None]) -> None:
        """`on_removed` gets the KV event of blocks that left the storage."""
        self._on_removed = on_removed
        # Hashes of a stored chunk's blocks; None while it is saved.
        self._hashes: OrderedDict[str, Sequence[bytes] | None] = OrderedDict()
        # Saved chunks that were deleted before their write was seen to end.
        self._deleted: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._hashes

    def add_saving(self, key: str) -> None:
        """A chunk is being saved."""
        self._set(key, None)

    def add_stored(self, key: str, hashes: Sequence[bytes]) -> None:
        """A chunk was written or loaded, and its event published; `hashes` of its blocks."""
        self._set(key, hashes)
        if key in self._deleted:
            self.remove([key])

    def discard(self, key: str) -> None:
        """A chunk was not stored: it may be saved again."""
        self._hashes.pop(key, None)
        self._deleted.discard(key)

    def remove(self, keys: Sequence[str]) -> None:
        """Chunks were deleted from the storage."""
        hashes: list[bytes] = []
        for key in keys:
            if (known := self._hashes.get(key)) is not None:
                hashes += known
                self.discard(key)
            elif key in self._hashes:
                self._deleted.add(key)
        if hashes:
            self._on_removed(BlocksRemoved(tuple(hashes), Tier.STORAGE.medium))

    def remove_lost(self, chunks: Sequence[Chunk], reason: Reason | None) -> None:
        """A load of `chunks` ended at the first of them for `reason`: forget what is unusable."""
        if reason is Reason.MISSING:
            # Not those that are being saved: their write is still to come.
            self.remove([chunk.key for chunk in chunks if self._hashes.get(chunk.key)])
        elif reason in _UNUSABLE:
            self.remove([chunks[0].key])

    def _set(self, key: str, hashes: Sequence[bytes] | None) -> None:
        self._hashes[key] = hashes
        self._hashes.move_to_end(key)
        if len(self._hashes) > _CAPACITY:
            self._hashes.popitem(last=False)
