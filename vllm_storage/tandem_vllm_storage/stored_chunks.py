"""Which chunks the store has, as far as this engine knows: it does not save them again, and it
publishes a KV event when one appears in the store or leaves it. Bookkeeping only: no I/O.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

from tandem_kvstore.chunk_store import Chunk
from tandem_kvstore.errors import Reason

_CAPACITY: Final = 1 << 16
"""Chunks that are remembered. Fewer: chunks are copied again, and some removals have no event."""
GONE: Final = frozenset(
    {Reason.MISSING, Reason.TRUNCATED, Reason.CORRUPT}
    | {Reason.SWAPPED, Reason.FOREIGN, Reason.FORMAT}
)
"""Why a chunk is not in the store, or cannot be used."""

BlockHash = bytes | int
"""vLLM's name of a block in KV events."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """The blocks of a chunk as a KV event names them; the fields are vLLM's."""

    hashes: Sequence[BlockHash]
    parent_hash: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that the store has no more."""

    hashes: Sequence[BlockHash]


class StoredChunks:
    """Chunks of one engine that are stored, or that are being saved. For the scheduler's thread,
    but for `on_deleted`."""

    def __init__(self) -> None:
        # Hashes of a stored chunk's blocks; None while it is saved.
        self._hashes: OrderedDict[str, Sequence[BlockHash] | None] = OrderedDict()
        # Of the chunks in `_hashes`, when the last save ended, in `clock`.
        self._saved_at: dict[str, int] = {}
        self._ended_saves = 0
        # Of chunks that are being saved: the event to publish, and how many ranks still write.
        self._saving: dict[str, tuple[BlocksStored | None, int]] = {}
        self._events: list[BlocksStored | BlocksRemoved] = []
        self._deleted: SimpleQueue[Sequence[str]] = SimpleQueue()

    def __contains__(self, key: str) -> bool:
        # While one rank still writes, the chunk is not saved again, even if another rank failed.
        return key in self._hashes or key in self._saving

    @property
    def clock(self) -> int:
        """Number of saves that have ended: when a look-up or a load began, for `remove_lost`."""
        return self._ended_saves

    @property
    def is_saving(self) -> bool:
        """Whether a worker will report a save."""
        return bool(self._saving)

    def before_saving(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """The leading ones of `chunks` of which no worker will report a save."""
        saving = (i for i, chunk in enumerate(chunks) if chunk.key in self._saving)
        return chunks[: next(saving, len(chunks))]

    def add_saving(self, key: str, blocks: BlocksStored | None, ranks: int) -> None:
        """A chunk is being saved by `ranks` workers. `blocks` None: it has no event."""
        self._set(key, None)
        self._saving[key] = blocks, ranks

    def end_save(self, key: str, *, is_stored: bool) -> bool:
        """One worker's save has ended. Returns whether the chunk is now stored by all of them."""
        self._ended_saves += 1
        blocks, ranks = self._saving.pop(key, (None, 1))
        if ranks > 1:
            self._saving[key] = blocks, ranks - 1
        if not is_stored:
            # The next request that computes the chunk tries again.
            self._forget(key)
        if ranks > 1 or key not in self._hashes:
            return False
        self._publish(key, blocks)
        self._saved_at[key] = self._ended_saves
        return True

    def add_found(self, key: str, describe: Callable[[], BlocksStored | None]) -> None:
        """The store has a chunk, of this engine or of another. This engine publishes its event
        once: the writer's may be lost, with the writer or for an EPP that started later."""
        if self._hashes.get(key) is not None:
            self._hashes.move_to_end(key)
        elif key not in self._saving:
            self._publish(key, describe())

    def on_deleted(self, keys: Sequence[str]) -> None:
        """Chunks were deleted from the store. Safe from any thread."""
        self._deleted.put(keys)

    def remove_lost(self, chunks: Sequence[Chunk], reason: Reason | None, began: int) -> None:
        """A look-up or load of `chunks`, which began at `clock` = `began`, ended at the first of
        them for `reason`: forget what is unusable, so that it is saved again when a request
        computes it."""
        if reason in GONE:
            # A chunk that was saved since may have been asked for before it was in the store.
            keys = [c.key for c in chunks if c.key not in self._saving]
            self._remove([key for key in keys if self._saved_at.get(key, 0) <= began])

    def take_events(self) -> list[BlocksStored | BlocksRemoved]:
        """The events since the last call, in their order."""
        for _ in range(self._deleted.qsize()):
            keys = self._deleted.get()
            self._remove([key for key in keys if key not in self._saving])
        events, self._events = self._events, []
        return events

    def _publish(self, key: str, blocks: BlocksStored | None) -> None:
        self._set(key, tuple(blocks.hashes) if blocks is not None else ())
        if blocks is not None:
            self._events.append(blocks)

    def _remove(self, keys: Sequence[str]) -> None:
        hashes = [name for key in keys for name in self._forget(key) or ()]
        if hashes:
            self._events.append(BlocksRemoved(hashes))

    def _set(self, key: str, hashes: Sequence[BlockHash] | None) -> None:
        self._hashes[key] = hashes
        self._hashes.move_to_end(key)
        if len(self._hashes) > _CAPACITY:
            self._forget(next(iter(self._hashes)))

    def _forget(self, key: str) -> Sequence[BlockHash] | None:
        """Returns the hashes of the chunk's blocks, None if there are none."""
        self._saved_at.pop(key, None)
        return self._hashes.pop(key, None)
