"""The chunks that this engine knows to be stored. It does not save them again, and publishes a KV
event when one appears in the store or is deleted. No I/O.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

from tandem_kvstore.chunk_store import Chunk
from tandem_kvstore.errors import Reason

_CAPACITY: Final = 1 << 16
"""Most chunks that are kept. Fewer: chunks are copied again, and some removals have no event."""
GONE: Final = frozenset(
    {Reason.MISSING, Reason.TRUNCATED, Reason.CORRUPT}
    | {Reason.SWAPPED, Reason.FOREIGN, Reason.FORMAT}
)
"""Reasons that mean that a chunk is not in the store or cannot be used."""

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
    """Blocks that the store no longer has."""

    hashes: Sequence[BlockHash]


class StoredChunks:
    """The chunks that are stored or being saved. For the scheduler's thread, except
    `on_deleted`."""

    def __init__(self) -> None:
        # By chunk, the hashes of its blocks; None while it is being saved.
        self._hashes: OrderedDict[str, Sequence[BlockHash] | None] = OrderedDict()
        # By chunk, the value of `clock` when its last save ended.
        self._saved_at: dict[str, int] = {}
        self._ended_saves = 0
        # By chunk that is being saved, the event to publish and how many ranks still write.
        self._saving: dict[str, tuple[BlocksStored | None, int]] = {}
        self._events: list[BlocksStored | BlocksRemoved] = []
        self._deleted: SimpleQueue[Sequence[str]] = SimpleQueue()

    def __contains__(self, key: str) -> bool:
        # While one rank still writes, the chunk is not saved again, even if another rank failed.
        return key in self._hashes or key in self._saving

    @property
    def clock(self) -> int:
        """Number of saves that have ended. Callers keep it as the time at which a look-up or a load
        began, for `remove_lost`."""
        return self._ended_saves

    @property
    def is_saving(self) -> bool:
        """Whether a worker will report a save."""
        return bool(self._saving)

    def before_saving(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """The leading ones of `chunks`, up to the first that is being saved."""
        saving = (i for i, chunk in enumerate(chunks) if chunk.key in self._saving)
        return chunks[: next(saving, len(chunks))]

    def add_saving(self, key: str, blocks: BlocksStored | None, ranks: int) -> None:
        """`ranks` workers save a chunk. `blocks`: its KV event; None: it has none."""
        self._set(key, None)
        self._saving[key] = blocks, ranks

    def end_save(self, key: str, *, is_stored: bool) -> bool:
        """One worker's save has ended. Returns whether all workers have now stored the chunk."""
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
        """A look-up found a chunk in the store. Publish its event once, even if another engine
        wrote the chunk: an EPP that started later has not received the writer's event."""
        if self._hashes.get(key) is not None:
            self._hashes.move_to_end(key)
        elif key not in self._saving:
            self._publish(key, describe())

    def on_deleted(self, keys: Sequence[str]) -> None:
        """Chunks were deleted from the store. Safe from any thread."""
        self._deleted.put(keys)

    def remove_lost(self, chunks: Sequence[Chunk], reason: Reason | None, began: int) -> None:
        """A look-up or load, which began when `clock` was `began`, ended at the first of `chunks`
        for `reason`. If they are not usable, forget them: the next request that computes them saves
        them again."""
        if reason in GONE:
            # A chunk saved since `began` may have been missing only until then.
            keys = [c.key for c in chunks if c.key not in self._saving]
            self._remove([key for key in keys if self._saved_at.get(key, 0) <= began])

    def take_events(self) -> list[BlocksStored | BlocksRemoved]:
        """The events since the last call, in order."""
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
        """Forget a chunk. Returns the hashes of its blocks; None: not known."""
        self._saved_at.pop(key, None)
        return self._hashes.pop(key, None)
