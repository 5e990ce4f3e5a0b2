"""Which KV blocks each pod holds, exactly, as its engine's KV events say.

    blocks = PodBlocks(max_bytes)
    blocks.store("pod-1", Tier.GPU, StoredBlocks(hashes, parent, token_ids, 16))
    blocks.match({16: prompt.keys(16)}) ─► BlockMatch: cached tokens of every pod, per tier

One table serves all pods: block key → *holders*, the set of pods and tiers that have the block. So
one walk along a prompt's keys finds the longest cached prefix of every pod; it can be done in
slices between which the table changes. Sets of holders are interned: a few distinct sets stand for
millions of blocks. Each pod has a second table, engine hash
→ block key, because events name removed and parent blocks by the engine's hash.

Memory is bounded over all pods: past `max_bytes` further blocks are not stored.

A pod whose engine restarts gets a new number at once, so that its old blocks match no more; `sweep`
then takes the old number out of the table, in slices that do not block the event loop.

Pure: no clock, no I/O.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import maxsize
from typing import Final

from .block_keys import ROOT, block_keys
from .blocks import BlockMatch, EngineHash, StoredBlocks, Tier
from .holder_sets import HolderSets
from .prefix_walk import PrefixWalk
from .sorted_table import SortedTable

MAX_BYTES: Final = 600 << 20
"""Default bound of all tables: 100 pods with 100,000 blocks each, none of them shared, take half of
it."""
_SHARD_BITS: Final = 14
"""Shards of the table of all pods: 600 entries each for ten million blocks."""
_POD_SHARD_BITS: Final = 8
"""Shards of a pod's table: 400 entries each for 100,000 blocks."""
_ENTRY_BYTES: Final = 16
"""Bytes per block in a pod's table."""
_HASH_BYTES: Final = 8


@dataclass(slots=True)
class _PodTable:
    """One pod's blocks."""

    number: int
    """The pod's bits in sets of holders are `2 * number` and the one above it."""
    block_tokens: int = 0
    """Tokens per block; 0 before the first."""
    keys: SortedTable = field(default_factory=lambda: SortedTable("Q", _POD_SHARD_BITS))
    """Engine hash, cut to 64 bits → block key."""


class PodBlocks:
    """The blocks of all pods."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._holders = SortedTable("I", _SHARD_BITS)
        """Block key → number of its set of holders in `_sets`."""
        self._sets = HolderSets()
        self._pods: dict[str, _PodTable] = {}
        self._numbers: list[int] = []
        """Numbers of former pods that no block has any more."""
        self._next_number = 0
        self._retired: list[tuple[int, array[int]]] = []
        """Number of a former table, and the keys of blocks that may still have it."""
        self._named = 0
        """Blocks in the tables of all pods."""

    @property
    def bytes(self) -> int:
        """Bytes of all tables, those included that `sweep` has not freed yet."""
        return len(self._holders) * self._holders.entry_bytes + self._named * _ENTRY_BYTES

    @property
    def pods(self) -> Iterable[str]:
        """The pods with blocks, or that had some."""
        return self._pods.keys()

    def count(self, pod: str) -> int:
        """Number of blocks that `pod` holds, in whatever tier."""
        table = self._pods.get(pod)
        return len(table.keys) if table is not None else 0

    def pod_bytes(self, pod: str) -> int:
        """Bytes of `pod`'s own table."""
        table = self._pods.get(pod)
        return len(table.keys) * _ENTRY_BYTES if table is not None else 0

    def key_of(self, pod: str, name: EngineHash | None) -> int | None:
        """The key of a block of `pod` that its engine calls `name`; None if it is unknown."""
        table = self._pods.get(pod)
        return table.keys.get(_cut(name)) if table is not None and name is not None else None

    def store(
        self, pod: str, tier: Tier, blocks: StoredBlocks, parent_key: int | None = None
    ) -> int:
        """Add blocks; returns how many of them could not be stored, because the parent is unknown
        or the memory is used up. `parent_key`: of a parent that may be unknown here.

        Blocks smaller than the pod's others are parts of blocks, and ignored. Without token ids
        the blocks must be known, and are now in this tier too. Raises ValueError for an event that
        contradicts itself.
        """
        hashes, token_ids, block_tokens = blocks.hashes, blocks.token_ids, blocks.block_tokens
        if not token_ids:
            return self._store_known(pod, tier, hashes)
        if block_tokens < 1 or len(token_ids) != len(hashes) * block_tokens:
            raise ValueError(f"{len(token_ids)} tokens in {len(hashes)} blocks of {block_tokens}")
        if blocks.extras and len(blocks.extras) != len(hashes):
            raise ValueError(f"extra keys for {len(blocks.extras)} of {len(hashes)} blocks")
        table = self._table(pod, block_tokens)
        if block_tokens < table.block_tokens:
            return 0
        key = _key_before(blocks.parent, table, parent_key)
        if key is None or self.bytes >= self.max_bytes:
            return len(hashes)
        try:
            keys = list(block_keys(key, token_ids, block_tokens, blocks.extras))
        except (OverflowError, TypeError) as err:
            raise ValueError(f"token ids that are no numbers below 2**32: {err}") from err
        bit = 1 << (2 * table.number + tier)
        for name, key in zip(map(_cut, hashes), keys, strict=True):
            former = table.keys.set(name, key)
            if former is None:
                self._named += 1
            elif former != key:
                # The engine gave the name to another block.
                self._release(former, 0b11 << (2 * table.number))
            self._hold(key, bit)
        return 0

    def remove(self, pod: str, tier: Tier, hashes: Iterable[EngineHash]) -> None:
        """Remove blocks from a tier of `pod`; unknown ones are ignored."""
        if (table := self._pods.get(pod)) is None:
            return
        shift = 2 * table.number
        for name in map(_cut, hashes):
            if (key := table.keys.get(name)) is None:
                continue
            holders = self._release(key, 1 << (shift + tier))
            # The other tier may still have it; then the engine's hash names it there.
            if not holders >> shift & 0b11:
                table.keys.pop(name)
                self._named -= 1

    def drop(self, pod: str) -> bool:
        """Forget all blocks of `pod`; returns whether it had a table. `sweep` frees the memory."""
        if (table := self._pods.pop(pod, None)) is None:
            return False
        self._retired.append((table.number, array("Q", table.keys.values())))
        return True

    def sweep(self, blocks: int) -> bool:
        """Take former pods out of at most `blocks` blocks; returns whether more are left."""
        while self._retired and blocks > 0:
            number, keys = self._retired[-1]
            mask = 0b11 << (2 * number)
            for key in keys[-blocks:]:
                self._release(key, mask)
            count = min(blocks, len(keys))
            del keys[len(keys) - count :]
            self._named -= count
            blocks -= count
            if not keys:
                # Only now may another pod get this number.
                self._numbers.append(self._retired.pop()[0])
        return bool(self._retired)

    def match(self, keys: Mapping[int, Iterable[int]]) -> BlockMatch:
        """The longest cached prefixes of a prompt whose keys by block size are `keys`; pods with
        another block size are left out. No key is taken behind the first that no pod has."""
        walks = self.walks(keys)
        for walk in walks:
            walk.advance(maxsize)
        return self.result(walks)

    def walks(self, keys: Mapping[int, Iterable[int]]) -> Sequence[PrefixWalk[_PodTable]]:
        """The walks from which `match` follows, for callers that make them in slices."""
        walks = []
        for block_tokens, chain in keys.items():
            tables = {
                name: table
                for name, table in self._pods.items()
                if table.block_tokens == block_tokens
            }
            walks.append(
                PrefixWalk(iter(chain), tables, block_tokens, self._holders.get, self._sets)
            )
        return walks

    def result(self, walks: Iterable[PrefixWalk[_PodTable]]) -> BlockMatch:
        """The longest cached prefixes after the walks."""
        return BlockMatch({
            name: prefix
            for walk in walks
            for name, prefix in walk.prefixes().items()
            # A pod that was dropped meanwhile has nothing; its number may be another pod's now.
            if self._pods.get(name) is walk.tables[name]
        })  # fmt: skip

    @property
    def block_sizes(self) -> frozenset[int]:
        """The block sizes of all pods, in tokens."""
        return frozenset(table.block_tokens for table in self._pods.values() if table.block_tokens)

    def _store_known(self, pod: str, tier: Tier, hashes: Sequence[EngineHash]) -> int:
        table, unknown = self._pods.get(pod), 0
        for name in map(_cut, hashes):
            key = table.keys.get(name) if table is not None else None
            if table is None or key is None:
                unknown += 1
            else:
                self._hold(key, 1 << (2 * table.number + tier))
        return unknown

    def _table(self, pod: str, block_tokens: int) -> _PodTable:
        """The pod's table, emptied if its blocks were smaller so far: those were parts of blocks,
        or the engine was configured anew."""
        table = self._pods.get(pod) or self._add(pod)
        if block_tokens > table.block_tokens > 0:
            self.drop(pod)
            table = self._add(pod)
        table.block_tokens = max(table.block_tokens, block_tokens)
        return table

    def _add(self, pod: str) -> _PodTable:
        if self._numbers:
            number = self._numbers.pop()
        else:
            number, self._next_number = self._next_number, self._next_number + 1
        table = self._pods[pod] = _PodTable(number)
        return table

    def _hold(self, key: int, bit: int) -> None:
        """Add a holder to a block."""
        # Most blocks have one holder: stored as such with one look-up, and corrected otherwise.
        number = self._sets.acquire(bit)
        if (former := self._holders.set(key, number)) is None:
            return
        holders = self._sets.holders(former)
        self._holders.set(key, self._sets.acquire(holders | bit))
        self._sets.release(number)
        self._sets.release(former)

    def _release(self, key: int, mask: int) -> int:
        """Take the holders of `mask` from a block; returns those that are left."""
        if (number := self._holders.pop(key)) is None:
            return 0
        rest = self._sets.holders(number) & ~mask
        if rest:
            self._holders.set(key, self._sets.acquire(rest))
        self._sets.release(number)
        return rest


def _key_before(parent: EngineHash | None, table: _PodTable, known: int | None) -> int | None:
    """The key of the block `parent`: that in `table`, else `known`."""
    if parent is None:
        return ROOT
    key = table.keys.get(_cut(parent))
    return known if key is None else key


def _cut(name: EngineHash) -> int:
    """The 64 bits of an engine's hash that name the block here."""
    if isinstance(name, bytes):
        return int.from_bytes(name[:_HASH_BYTES], "big")
    return name & 0xFFFF_FFFF_FFFF_FFFF
