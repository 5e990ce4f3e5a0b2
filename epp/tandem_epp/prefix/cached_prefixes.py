"""The confirmed half of the prefix index: prompts that pods have answered, so they cache their KV.

One radix tree for all pods. `Node.holders` is a bit mask of pods: a pod holds whole nodes, and with
a node all nodes above it, because an engine's cache has no gap either. `Node.ends` is a mask of the
pods for which a prompt ended there while longer ones were cached.

Each pod forgets what it used least recently, as its engine does: of the prompts that no longer one
continues (the pod's leaves, in order of use), the oldest loses its last blocks first. A prefix that
several prompts share is forgotten after the last of them.

Every operation is bounded: one call forgets at most MAX_DROPS nodes, and later calls the rest.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import Final, Generic, TypeVar

from tandem_contract.chains import Chain
from tandem_contract.prefix import covered_tokens, whole_blocks

from .radix_tree import Node, RadixTree
from .reuse import Reuse

K = TypeVar("K", bound=Hashable)

MAX_DROPS: Final = 256
"""Nodes that one call forgets at most, about a millisecond."""
ENTRY_BYTES: Final = 110
"""Bytes of an entry in a pod's tables on CPython 3.11."""
_MASKS: Final = 4096
"""Bit masks whose pods are remembered. Few masks occur at a time: prefixes that all pods hold, and
prompts that one pod holds."""


_OF_ONE_PROMPT: Final = 2
"""Children of a node that two turns of one conversation may make: the end of the earlier one, which
the later one replaces, and the later one's."""


class PodCache(Generic[K]):
    """What one pod holds."""

    __slots__ = ("bit", "forks", "leaves", "pod", "reuse", "tokens")

    def __init__(self, pod: K, bit: int) -> None:
        """`bit`: the pod's bit in `Node.holders`."""
        self.pod, self.bit = pod, bit
        self.tokens = 0
        """Tokens in the nodes that it holds."""
        self.leaves: OrderedDict[Node[int], int] = OrderedDict()
        """Nodes below which the pod holds nothing, the least recently used first, and when they
        were used, by the clock of `reuse`."""
        self.forks: dict[Node[int], int] = {}
        """Node → how many of its children the pod holds, where these are at least two."""
        self.reuse = Reuse()

    @property
    def bytes(self) -> int:
        """Estimated memory of the tables."""
        return ENTRY_BYTES * (len(self.leaves) + len(self.forks))

    def recent(self) -> Iterator[tuple[K, Chain]]:
        """Its prompts, the most recently used first."""
        for leaf in reversed(self.leaves):
            yield self.pod, _chain(leaf)

    def add_leaf(self, parent: Node[int] | None, leaf: Node[int]) -> None:
        """Note that `leaf`, below `parent`, was added."""
        if parent is not None:
            if parent in self.leaves:
                del self.leaves[parent]
            else:
                self.forks[parent] = self.forks.get(parent, 1) + 1
        self.leaves[leaf] = self.reuse.clock

    def use(self, node: Node[int]) -> None:
        """Note that a prompt ended in `node`."""
        if node in self.leaves:
            self.leaves[node] = self.reuse.clock
            self.leaves.move_to_end(node)
        else:
            node.ends |= self.bit

    def remove_leaf(self, leaf: Node[int], parent: Node[int] | None) -> None:
        """Note that `leaf`, below `parent`, is no longer held."""
        used_at = self.leaves.pop(leaf)
        self.tokens -= leaf.tokens
        if parent is None:
            return
        children = self.forks.pop(parent, 1) - 1
        if children > 1:
            self.forks[parent] = children
        elif children == 0:
            if parent.ends & self.bit:
                # A prompt ended there since it has children: it may have been used after them.
                parent.ends &= ~self.bit
                self.leaves[parent] = self.reuse.clock
            else:
                # It was last used with the leaf that was just removed, which was the oldest.
                self.leaves[parent] = used_at
                self.leaves.move_to_end(parent, last=False)


class CachedPrefixes(Generic[K]):
    """Which prefixes each pod holds, bounded in tokens per pod."""

    def __init__(self) -> None:
        self._tree: RadixTree[int] = RadixTree(0, copy=int)
        self._caches: dict[K, PodCache[K]] = {}
        self._slots: list[K | None] = []
        """Bit number → pod; None: the bit is free, or its nodes are still to be cleaned up."""
        self._free: list[int] = []
        """Bits without a pod and without nodes."""
        self._cleared: deque[PodCache[K]] = deque()
        """Caches of pods that were cleared, whose bits are still in the tree."""
        self._pods_of: dict[int, tuple[K, ...]] = {}
        self._table_bytes = 0

    @property
    def bytes(self) -> int:
        """Estimated memory."""
        return self._tree.bytes + self._table_bytes

    @property
    def blocks(self) -> int:
        """Blocks in the tree, each counted once however many pods hold it."""
        return self._tree.blocks

    def tokens(self, pod: K) -> int:
        """Tokens that `pod` holds."""
        cache = self._caches.get(pod)
        return cache.tokens if cache else 0

    def eviction_harm(self, pod: K) -> float:
        """By `tandem_planner.cost.eviction`."""
        cache = self._caches.get(pod)
        return cache.reuse.harm if cache is not None else 0.0

    def match(self, chain: Chain) -> list[tuple[tuple[K, ...], int]]:
        """Groups of pods, and the tokens of the longest prefix of `chain` that they hold, in
        ascending order. For a pod that is in several groups the last one counts."""
        path, blocks = self._tree.walk(chain)
        # Pods that hold the next node as well are counted there.
        return [
            (self._pods(node.holders), covered_tokens(min(node.end, blocks)))
            for node, below in zip_longest(path, path[1:])
            if below is None or below.holders != node.holders
        ]

    def recent(self) -> Iterator[tuple[K, Chain]]:
        """The prompts of all pods in turn, of each pod the most recently used first. The index must
        not change meanwhile."""
        for row in zip_longest(*(cache.recent() for cache in self._caches.values())):
            yield from (prompt for prompt in row if prompt is not None)

    def add(self, pod: K, chain: Chain, capacity: int) -> None:
        """Note that `pod` holds `chain` now, and evict what exceeds `capacity` tokens."""
        self._clean_up()
        if not chain:
            return
        cache = self._cache(pod)
        before, tokens = cache.bytes, cache.tokens
        path, blocks = self._tree.walk(chain)
        _count_use(cache, path, blocks, capacity)
        if path and blocks < path[-1].end:
            last = path[-1]
            # The prompt parts from the run here, or the pod will hold only the run's beginning.
            if blocks < len(chain) or not last.holders & cache.bit:
                path[-1] = self._tree.split(last, blocks - last.start)
        self._hold(cache, path, chain, blocks)
        cache.reuse.on_taken(cache.tokens - tokens, capacity)
        self._table_bytes += cache.bytes - before
        self._evict(cache, capacity)

    def shrink(self, pod: K, tokens: int) -> None:
        """Evict from `pod` until it holds `tokens` at most, or MAX_DROPS nodes were dropped."""
        if (cache := self._caches.get(pod)) is not None:
            self._evict(cache, tokens)

    def shrink_largest(self) -> None:
        """Evict a prompt, and a 64th of all, of the pod that holds most, to free memory."""
        self._clean_up()
        largest = max(self._caches.values(), key=lambda cache: cache.tokens, default=None)
        if largest is not None and largest.leaves:
            oldest = next(iter(largest.leaves))
            self._evict(largest, largest.tokens - max(oldest.tokens, largest.tokens // 64))

    def clear(self, pod: K) -> None:
        """Forget all that `pod` holds. The nodes are cleaned up by later calls, bit by bit."""
        if (cache := self._caches.pop(pod, None)) is not None:
            self._slots[cache.bit.bit_length() - 1] = None
            self._pods_of.clear()
            self._cleared.append(cache)
            self._clean_up()

    def _hold(self, cache: PodCache[K], path: list[Node[int]], chain: Chain, blocks: int) -> None:
        """Give the pod all nodes of `path` and, below them, the blocks after the first `blocks`."""
        depth = len(path)
        while depth and not path[depth - 1].holders & cache.bit:
            depth -= 1
        # Of the nodes, the pod holds the first `depth`.
        for node in path[depth:]:
            node.holders |= cache.bit
            cache.tokens += node.tokens
        end = path[-1] if path else self._tree.root
        if blocks < len(chain):
            cache.tokens += covered_tokens(len(chain)) - covered_tokens(blocks)
            if path and end.holders == cache.bit and end.children is None:
                # No other pod and no other prompt needs a boundary here: a conversation that
                # grows stays one node.
                self._tree.extend(end, chain)
            else:
                path.append(self._tree.append(end, chain, cache.bit))
        if depth < len(path):
            cache.add_leaf(path[depth - 1] if depth else None, path[-1])
        else:
            cache.use(path[-1])

    def _evict(self, cache: PodCache[K], capacity: int) -> None:
        before, drops = cache.bytes, 0
        while cache.tokens > capacity and drops < MAX_DROPS:
            leaf = next(iter(cache.leaves))
            left = covered_tokens(leaf.end) - (cache.tokens - capacity)
            keep = whole_blocks(max(0, left)) - leaf.start
            if keep > 0:
                self._trim(cache, leaf, keep)
            else:
                self._drop(cache, leaf)
            drops += 1
        self._table_bytes += cache.bytes - before

    def _trim(self, cache: PodCache[K], leaf: Node[int], keep: int) -> None:
        """Take the blocks after the first `keep` from the pod."""
        upper = self._tree.split(leaf, keep)
        cache.tokens -= leaf.tokens
        # The upper part takes the leaf's place, as the oldest one.
        cache.leaves[upper] = cache.leaves.pop(leaf)
        cache.leaves.move_to_end(upper, last=False)
        self._release(cache, leaf)

    def _drop(self, cache: PodCache[K], leaf: Node[int]) -> None:
        parent = leaf.parent if leaf.parent is not self._tree.root else None
        cache.remove_leaf(leaf, parent)
        self._release(cache, leaf)

    def _release(self, cache: PodCache[K], node: Node[int]) -> None:
        node.holders &= ~cache.bit
        node.ends &= ~cache.bit
        if node.holders:
            self._tree.join(node)
        elif (parent := node.parent) is not None:
            self._tree.remove(node)
            self._tree.join(parent)

    def _cache(self, pod: K) -> PodCache[K]:
        if (cache := self._caches.get(pod)) is None:
            if not self._free:
                self._free.append(len(self._slots))
                self._slots.append(None)
            slot = self._free.pop()
            self._slots[slot] = pod
            self._pods_of.clear()
            cache = self._caches[pod] = PodCache(pod, 1 << slot)
        return cache

    def _clean_up(self) -> None:
        """Drop some nodes of pods that were cleared."""
        if self._cleared:
            cache = self._cleared[0]
            self._evict(cache, 0)
            if not cache.tokens:
                self._free.append(cache.bit.bit_length() - 1)
                self._cleared.popleft()
                self._table_bytes -= cache.bytes

    def _pods(self, holders: int) -> tuple[K, ...]:
        """The pods of a mask; a pod that was cleared is not among them."""
        if (pods := self._pods_of.get(holders)) is None:
            if len(self._pods_of) >= _MASKS:
                self._pods_of.clear()
            pods = tuple(
                pod
                for slot, pod in enumerate(self._slots)
                if pod is not None and holders >> slot & 1
            )
            self._pods_of[holders] = pods
        return pods


def _count_use(cache: PodCache[K], path: Sequence[Node[int]], blocks: int, capacity: int) -> None:
    """Count what a prompt, of which `path` has the first `blocks` blocks, uses again. What several
    prompts have in common is not evicted before the last of them: it does not count."""
    depth = len(path)
    while depth and not path[depth - 1].holders & cache.bit:
        depth -= 1
    if not depth or (used_at := cache.leaves.get(path[depth - 1])) is None:
        return
    end = covered_tokens(min(path[depth - 1].end, blocks))
    # Each turn of a conversation parts from the end of the one before.
    while depth > 1 and cache.forks.get(path[depth - 2], 1) <= _OF_ONE_PROMPT:
        depth -= 1
    cache.reuse.on_used(end - covered_tokens(path[depth - 1].start), used_at, capacity)


def _chain(node: Node[int]) -> Chain:
    """The hashes from the start of the prompt to the end of the run."""
    hashes = node.hashes
    while (parent := node.parent) is not None:
        hashes = parent.hashes + hashes
        node = parent
    return hashes
