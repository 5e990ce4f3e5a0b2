"""KV blocks as numbers: which are free, which sequences use them, which hold a cached prefix.

    free ──allocate──► in use (ref count > 0) ──free──► free       the block has no hash
                          │                      └────► evictable  cached: found by its hash (LRU)
                          └─hold─► held under the request id ──release_hold──► free or evictable

A full block's hash covers its tokens and all tokens before them, so equal hashes mean equal
prefixes. A cached block has its hash in `_by_hash`, whether it is in use or not; an evictable block
is cached and unused, and is given to other sequences only when no free block is left.

Bookkeeping only: no torch, no clock, no I/O.
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

GPU: Final = "GPU"
"""vLLM's name, in KV events, of the cache that the engine computes in, whatever the device."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks were added to the prefix cache, in the order of the prompt."""

    hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    """Hash of the block before the first; None at the start of a prompt."""
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = GPU
    """Where they lie now: `GPU`, or the medium of a `Tier`."""
    cache_salt: str = ""
    """The salt in the first block's hash; set only at the start of a prompt."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks were evicted from the prefix cache."""

    hashes: tuple[bytes, ...]
    medium: str = GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was emptied."""


BlockEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


def extend_hash_chain(
    chain: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str = ""
) -> None:
    """Append the hashes of those full blocks of `token_ids` that `chain` does not cover yet.

    A block's hash is the SHA-256 of its parent's hash followed by its token ids. The SHA-256 of a
    `cache_salt` stands for the first block's parent, so that all hashes of the prompt depend on it.
    """
    root = hashlib.sha256(cache_salt.encode()).digest() if cache_salt else b""
    for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
        block = array("I", token_ids[start : start + block_size]).tobytes()
        chain.append(hashlib.sha256((chain[-1] if chain else root) + block).digest())


@dataclass(slots=True)
class _Table:
    """One sequence's blocks; the first `registered` were given to the prefix cache."""

    ids: list[int] = field(default_factory=list)
    registered: int = 0


class BlockManager:
    """All blocks of one KV cache. Not thread-safe: only the event loop may call it."""

    def __init__(
        self, num_blocks: int, block_size: int, on_event: Callable[[BlockEvent], None] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._on_event = on_event
        # Sequences and holds that use a block; 0: it is in `_free` or in `_evictable`.
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        # The prefix cache, both ways: `_hashes[_by_hash[h]] == h` for every cached hash.
        self._by_hash: dict[bytes, int] = {}
        # Unused blocks: `_free` without content, `_evictable` with cached content, oldest first.
        self._free = deque(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        # By request id. An id is in one of the two: `hold` moves its blocks from table to hold.
        self._tables: dict[str, _Table] = {}
        self._holds: dict[str, list[int]] = {}
        # By name of a save: blocks that are being copied to another tier.
        self._pins: dict[str, Sequence[int]] = {}

    @property
    def free_count(self) -> int:
        """Blocks that can be allocated now, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences use or that are held, 0 to 1."""
        return 1 - self.free_count / self.num_blocks

    @property
    def hold_count(self) -> int:
        """Number of requests whose blocks are held."""
        return len(self._holds)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that `tokens` tokens need; the last may be partly filled."""
        return -(-tokens // self.block_size)

    def match_prefix(self, chain: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest cached prefix of `chain` (see `extend_hash_chain`)."""
        matched = []
        for block_hash in chain:
            # Hashes are chained, so a block after a gap cannot be part of the prefix.
            if (block := self._by_hash.get(block_hash)) is None:
                break
            matched.append(block)
        return matched

    def allocate(self, request_id: str, matched: Sequence[int], blocks: int) -> bool:
        """Give a new sequence `blocks` blocks, the first of them `matched` (cached).

        Returns False and changes nothing when too few blocks are free.
        """
        # Unused matched blocks count as free, but cannot be given away a second time.
        unused = sum(1 for block in matched if not self._refs[block])
        if blocks - len(matched) > self.free_count - unused:
            return False
        for block in matched:
            # In use again, so it must not be evicted.
            self._evictable.pop(block, None)
            self._refs[block] += 1
        # Matched blocks are in the cache already: `register` goes on behind them.
        table = _Table(list(matched), len(matched))
        self._tables[request_id] = table
        self._take(table, blocks)
        return True

    def extend(self, request_id: str, blocks: int) -> bool:
        """Grow a sequence to `blocks` blocks in all.

        Returns False and changes nothing when too few blocks are free.
        """
        table = self._tables[request_id]
        if blocks - len(table.ids) > self.free_count:
            return False
        self._take(table, blocks)
        return True

    def table(self, request_id: str) -> tuple[int, ...]:
        """A sequence's blocks, in the order of its tokens."""
        return tuple(self._tables[request_id].ids)

    def register(
        self,
        request_id: str,
        chain: Sequence[bytes],
        token_ids: Sequence[int],
        computed: int,
        cache_salt: str = "",
    ) -> None:
        """Add the full blocks among a sequence's first `computed` tokens to the prefix cache.

        `chain` covers at least those blocks. A block whose content another block has already in
        the cache is not added: it becomes free, not evictable, when its sequence ends.
        """
        table = self._tables[request_id]
        first, end = table.registered, computed // self.block_size
        if end <= first:
            return
        for index in range(first, end):
            block, block_hash = table.ids[index], chain[index]
            # Two sequences may compute one prefix at the same time: the first block is kept.
            if block_hash not in self._by_hash:
                self._by_hash[block_hash] = block
                self._hashes[block] = block_hash
        table.registered = end
        size = self.block_size
        self._emit(
            BlocksStored(
                hashes=tuple(chain[first:end]),
                parent_hash=chain[first - 1] if first else None,
                token_ids=tuple(token_ids[first * size : end * size]),
                block_size=size,
                cache_salt="" if first else cache_salt,
            )
        )

    def free(self, request_id: str) -> None:
        """End a sequence and take its blocks back; unknown ids are ignored."""
        if (table := self._tables.pop(request_id, None)) is not None:
            self._release(table.ids)

    def hold(self, request_id: str) -> tuple[int, ...]:
        """End a sequence but keep its blocks until `release_hold`. Returns them."""
        # The reference counts stay: a held block counts as in use.
        ids = self._tables.pop(request_id).ids
        self._holds[request_id] = ids
        return tuple(ids)

    def release_hold(self, request_id: str) -> None:
        """End a hold and take its blocks back; unknown ids are ignored."""
        if (ids := self._holds.pop(request_id, None)) is not None:
            self._release(ids)

    def pin(self, name: str, ids: Sequence[int]) -> None:
        """Keep blocks that a sequence uses until `unpin(name)`, whatever the sequence does."""
        self._pins[name] = ids
        for block in ids:
            self._refs[block] += 1

    def unpin(self, name: str) -> None:
        """End a pin."""
        self._release(self._pins.pop(name))

    def is_held(self, request_id: str) -> bool:
        """Whether blocks are held under `request_id`."""
        return request_id in self._holds

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False and does nothing while any block is in use."""
        # A block in use would be found again by its hash after its sequence has ended.
        if self.free_count < self.num_blocks:
            return False
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks
        # Without hashes, evictable blocks are plain free ones.
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._emit(AllBlocksCleared())
        return True

    def _take(self, table: _Table, blocks: int) -> None:
        removed: list[bytes] = []
        while len(table.ids) < blocks:
            if self._free:
                block = self._free.popleft()
            else:
                # Least recently used first.
                block, _ = self._evictable.popitem(last=False)
                removed.append(self._evict(block))
            self._refs[block] = 1
            table.ids.append(block)
        # Before the sequence computes anything, so that subscribers never see a stale prefix.
        if removed:
            self._emit(BlocksRemoved(tuple(removed)))

    def _evict(self, block: int) -> bytes:
        block_hash = self._hashes[block]
        assert block_hash is not None  # noqa: S101 - only blocks with a hash are evictable
        # Both directions together, or a later prompt would match a block with other content.
        self._hashes[block] = None
        del self._by_hash[block_hash]
        return block_hash

    def _release(self, ids: Sequence[int]) -> None:
        """Release the last block first: of one prompt, the end is evicted before its prefix."""
        for block in reversed(ids):
            # Prefix blocks are shared: the last user returns them.
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                # At the end of the order: it was used last and is evicted last.
                self._evictable[block] = None

    def _emit(self, event: BlockEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)
