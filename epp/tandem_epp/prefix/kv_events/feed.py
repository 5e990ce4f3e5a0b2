"""Applies one engine's batches of events, in order, to the blocks of its pod. No I/O, no clock."""

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from ..blocks import StoredBlocks, Tier
from ..pod_blocks import PodBlocks
from .messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from .sequence import Position

_TIERS: Final = {None: Tier.GPU, "GPU": Tier.GPU, "CPU": Tier.CPU}
"""vLLM's media. Blocks in any other are not a pod's own."""
_STORAGE: Final = "STORAGE"
"""The medium of blocks in external storage, which belong to a store and not to a pod."""
_FULL_ATTENTION: Final = frozenset(
    {None, "full_attention", "mla_attention", "sink_full_attention", "unknown"}
)
"""Kinds of layers whose cached prefix is one run of blocks from the prompt's start. Layers with a
window keep its last blocks only."""


class Knowledge(IntEnum):
    """How much the index knows of a pod."""

    NOTHING = 0
    """No connection to the engine's events, or the engine is being asked for batches that were
    missed."""
    PARTIAL = 1
    """Blocks are missing, because they were cached before the first event, or because their event
    was malformed or found no memory: a pod has what the index says, and perhaps more."""
    WHOLE = 2
    """The index has every block."""


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """Where the blocks of the engine's external store are indexed."""

    name: str
    """Of the store: `Pod.store`."""
    blocks: PodBlocks
    """The blocks of all stores, each as if it were a pod with one tier, GPU."""


class PodFeed:
    """What one engine has reported so far."""

    def __init__(
        self,
        pod: str,
        blocks: PodBlocks,
        counts: Counter[str],
        store: StoreIndex | None = None,
    ) -> None:
        """`counts` gets the number of events by type: stored, removed, cleared, ignored (another
        medium or group of layers, or an unknown type), malformed, and in unplaced the blocks whose
        parent is unknown or for which there is no memory; the same of external storage as
        storage_stored, storage_removed and storage_unplaced. `store`: None: what is in external
        storage is ignored."""
        self._pod, self._blocks, self._counts = pod, blocks, counts
        self._external = store
        self._is_whole = False
        self._group: int | None = None
        """The group of layers that is indexed; see `_has_group`."""
        self._has_group = False
        self._has_other_groups = False
        self.is_current = False
        """Whether there is a connection, and no batch before the next one is missing."""
        self.position = Position()

    @property
    def knowledge(self) -> Knowledge:
        """How much the index knows of the pod now."""
        if not self.is_current:
            return Knowledge.NOTHING
        # A model without a layer of full attention: none of its blocks is indexed.
        is_readable = self._has_group or not self._has_other_groups
        return Knowledge.WHOLE if self._is_whole and is_readable else Knowledge.PARTIAL

    def apply(self, number: int, batch: EventBatch) -> None:
        """Apply a batch. Batch 0 is the first of an engine, whose caches are empty."""
        if number == 0:
            self.drop(is_empty=True)
        for event in batch.events:
            self._apply(event)
        self._counts["ignored"] += batch.unknown
        self.position = Position(number, batch.timestamp)

    def drop(self, *, is_empty: bool = False) -> None:
        """Forget the pod's blocks: batches are lost, or the caches are empty (`is_empty`)."""
        self._blocks.drop(self._pod)
        self._is_whole = is_empty
        self.position = Position()
        self._group, self._has_group, self._has_other_groups = None, False, False

    def disconnect(self) -> None:
        """The feed broke off, perhaps in the middle of a batch: what it told is not known any
        more."""
        self.is_current = False
        self.drop()

    def _apply(self, event: KvEvent) -> None:
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                self._remove(event)
            case AllBlocksCleared():
                self._blocks.drop(self._pod)
                self._is_whole = True
                self._counts["cleared"] += 1

    def _store(self, event: BlockStored) -> None:
        tier = _TIERS.get(event.medium)
        if event.medium == _STORAGE and self._external is not None:
            self._store_externally(event, self._external)
            return
        if tier is None or not self._is_indexed(event):
            self._counts["ignored"] += 1
            return
        try:
            unplaced = self._blocks.store(self._pod, tier, _stored_blocks(event))
        except ValueError:
            self._counts["malformed"] += 1
            self._is_whole = False
            return
        self._counts["stored"] += 1
        self._counts["unplaced"] += unplaced
        if unplaced:
            self._is_whole = False

    def _store_externally(self, event: BlockStored, store: StoreIndex) -> None:
        if event.group_idx is not None and event.group_idx != self._group:
            self._counts["ignored"] += 1
            return
        # Chunks are written at once, so a parent may come later: the pod's own blocks name it.
        parent_key = self._blocks.key_of(self._pod, event.parent_block_hash)
        blocks = store.blocks
        try:
            unplaced = blocks.store(store.name, Tier.GPU, _stored_blocks(event), parent_key)
        except ValueError:
            self._counts["malformed"] += 1
            return
        self._counts["storage_stored"] += 1
        self._counts["storage_unplaced"] += unplaced
        if unplaced and blocks.bytes >= blocks.max_bytes:
            # Most of the largest store's may have left it long ago: what is stored from now on
            # counts. The others keep theirs.
            blocks.drop(max(blocks.pods, key=blocks.count, default=store.name))

    def _remove(self, event: BlockRemoved) -> None:
        tier = _TIERS.get(event.medium)
        if event.medium == _STORAGE and self._external is not None:
            self._external.blocks.remove(self._external.name, Tier.GPU, event.block_hashes)
            self._counts["storage_removed"] += 1
            return
        if tier is None or event.group_idx != self._group:
            self._counts["ignored"] += 1
            return
        self._blocks.remove(self._pod, tier, event.block_hashes)
        self._counts["removed"] += 1

    def _is_indexed(self, event: BlockStored) -> bool:
        """Whether the event is of the group of layers that is indexed: the first one with full
        attention."""
        if not self._has_group and event.kv_cache_spec_kind in _FULL_ATTENTION:
            self._group, self._has_group = event.group_idx, True
        if self._has_group and event.group_idx == self._group:
            return True
        self._has_other_groups = True
        return False


def _stored_blocks(event: BlockStored) -> StoredBlocks:
    extras = event.extra_keys or ()
    if not extras and event.lora_name is not None:
        # Releases without extra keys name the adapter only here.
        extras = [(event.lora_name,)] * len(event.block_hashes)
    return StoredBlocks(
        event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, extras
    )
