"""KV blocks as numbers: who has which, which are findable by their prefix, which are free.

    free ──allocate──► in use (ref counts) ──free──► free            no full, registered content
                          │                   └────► findable (LRU)  full blocks; reused last
                          └─hold─► held under the request id ──release_hold──► as free

A full block's hash covers its tokens and everything before them, so equal hashes are equal
prefixes. No torch here, no clock, no I/O: block numbers in, block numbers out.
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks became findable, in the order of the prompt."""

    hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    """Of the block before the first; None at the start of a prompt."""
    token_ids: tuple[int, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are findable no more."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block is findable any more."""


BlockEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


def extend_hash_chain(chain: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """Append the hashes of the full blocks of `token_ids` that `chain` has not yet.

    `chain` holds the hashes of its leading blocks: sha256 over the parent's hash and the tokens.
    """
    for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
        block = array("I", token_ids[start : start + block_size]).tobytes()
        chain.append(hashlib.sha256((chain[-1] if chain else b"") + block).digest())


@dataclass(slots=True)
class _Table:
    """One sequence's blocks; the first `registered` have been offered for finding."""

    ids: list[int] = field(default_factory=list)
    registered: int = 0


class BlockManager:
    """All blocks of one KV cache. Not thread-safe: the event loop's alone."""

    def __init__(
        self, num_blocks: int, block_size: int, on_event: Callable[[BlockEvent], None] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._on_event = on_event
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = deque(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._tables: dict[str, _Table] = {}
        self._holds: dict[str, list[int]] = {}

    @property
    def free_count(self) -> int:
        """Blocks that can be allocated now, findable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences use or holds keep, 0 to 1."""
        return 1 - self.free_count / self.num_blocks

    @property
    def hold_count(self) -> int:
        """Requests whose blocks are held."""
        return len(self._holds)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill or begin."""
        return -(-tokens // self.block_size)

    def match_prefix(self, chain: Sequence[bytes]) -> list[int]:
        """The findable blocks of the longest known prefix of `chain` (see `extend_hash_chain`)."""
        matched = []
        for block_hash in chain:
            if (block := self._by_hash.get(block_hash)) is None:
                break
            matched.append(block)
        return matched

    def allocate(self, request_id: str, matched: Sequence[int], blocks: int) -> bool:
        """Give a new sequence `blocks` blocks, the first of them `matched`; all or nothing."""
        idle = sum(1 for block in matched if not self._refs[block])
        if blocks - len(matched) > self.free_count - idle:
            return False
        for block in matched:
            self._evictable.pop(block, None)
            self._refs[block] += 1
        table = _Table(list(matched), len(matched))
        self._tables[request_id] = table
        self._take(table, blocks)
        return True

    def extend(self, request_id: str, blocks: int) -> bool:
        """Grow a sequence to `blocks` blocks in all; all or nothing."""
        table = self._tables[request_id]
        if blocks - len(table.ids) > self.free_count:
            return False
        self._take(table, blocks)
        return True

    def table(self, request_id: str) -> tuple[int, ...]:
        """A sequence's blocks, in the order of its tokens."""
        return tuple(self._tables[request_id].ids)

    def register(
        self, request_id: str, chain: Sequence[bytes], token_ids: Sequence[int], computed: int
    ) -> None:
        """Make findable the full blocks among a sequence's first `computed` tokens.

        `chain` covers at least those blocks. A block whose content another one already offers
        stays private.
        """
        table = self._tables[request_id]
        first, end = table.registered, computed // self.block_size
        if end <= first:
            return
        for index in range(first, end):
            block, block_hash = table.ids[index], chain[index]
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
            )
        )

    def free(self, request_id: str) -> None:
        """Take a sequence's blocks back; unknown ids are ignored."""
        if (table := self._tables.pop(request_id, None)) is not None:
            self._release(table.ids)

    def hold(self, request_id: str) -> tuple[int, ...]:
        """End a sequence but keep its blocks until `release_hold`; they are returned."""
        ids = self._tables.pop(request_id).ids
        self._holds[request_id] = ids
        return tuple(ids)

    def release_hold(self, request_id: str) -> None:
        """End a hold; unknown ids are ignored."""
        if (ids := self._holds.pop(request_id, None)) is not None:
            self._release(ids)

    def is_held(self, request_id: str) -> bool:
        """Whether `request_id` has a hold."""
        return request_id in self._holds

    def reset_prefix_cache(self) -> bool:
        """Forget every findable block; False, and nothing done, while any block is in use."""
        if self.free_count < self.num_blocks:
            return False
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks
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
                block, _ = self._evictable.popitem(last=False)
                removed.append(self._forget(block))
            self._refs[block] = 1
            table.ids.append(block)
        if removed:
            self._emit(BlocksRemoved(tuple(removed)))

    def _forget(self, block: int) -> bytes:
        block_hash = self._hashes[block]
        assert block_hash is not None  # noqa: S101 - only blocks with a hash are findable
        self._hashes[block] = None
        del self._by_hash[block_hash]
        return block_hash

    def _release(self, ids: Sequence[int]) -> None:
        """Last block first, so that a prefix outlives what continues it."""
        for block in reversed(ids):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None

    def _emit(self, event: BlockEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)
