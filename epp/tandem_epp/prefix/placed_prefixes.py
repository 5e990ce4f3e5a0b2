"""The provisional half of the prefix index: prompts that were placed and are not answered yet.

A radix tree that counts, on each node, the placements of each pod that reach through it. Each
ends where a node ends, so it is removed by walking up from there. The tree holds no more than the
requests in flight.
"""

from collections import defaultdict
from collections.abc import Hashable
from typing import Generic, TypeVar

from tandem_contract.chains import Chain
from tandem_contract.prefix import covered_tokens

from .radix_tree import Node, RadixTree

K = TypeVar("K", bound=Hashable)


class PrefixEntry(Generic[K]):
    """One prompt placed on one pod."""

    __slots__ = ("chain", "end", "pod")

    def __init__(self, pod: K, chain: Chain) -> None:
        self.pod, self.chain = pod, chain
        self.end: Node[dict[K, int]] | None = None
        """Where the prompt ends in the tree; None once it is confirmed or withdrawn."""


class PlacedPrefixes(Generic[K]):
    """Entries by their prefix."""

    def __init__(self) -> None:
        self._tree: RadixTree[dict[K, int]] = RadixTree({}, copy=dict)
        self._entries: defaultdict[K, set[PrefixEntry[K]]] = defaultdict(set)

    @property
    def bytes(self) -> int:
        """Estimated memory."""
        return self._tree.bytes

    def match(self, chain: Chain) -> dict[K, int]:
        """Pod → tokens of the longest prefix of `chain` that was placed there, for pods that have
        any."""
        path, blocks = self._tree.walk(chain)
        tokens: dict[K, int] = {}
        for node in path:
            tokens.update(dict.fromkeys(node.holders, covered_tokens(min(node.end, blocks))))
        return tokens

    def add(self, pod: K, chain: Chain) -> PrefixEntry[K]:
        """Place a prompt. An empty chain makes an entry without effect."""
        entry = PrefixEntry(pod, chain)
        if not chain:
            return entry
        path, blocks = self._tree.walk(chain)
        if path and blocks < path[-1].end:
            path[-1] = self._tree.split(path[-1], blocks - path[-1].start)
        if blocks < len(chain):
            path.append(self._tree.append(path[-1] if path else self._tree.root, chain, {}))
        for node in path:
            node.holders[pod] = node.holders.get(pod, 0) + 1
        entry.end = path[-1]
        self._entries[pod].add(entry)
        return entry

    def remove(self, entry: PrefixEntry[K]) -> bool:
        """Remove an entry; False: it was removed before."""
        node, entry.end = entry.end, None
        if node is None:
            return False
        entries = self._entries[entry.pod]
        entries.remove(entry)
        if not entries:
            del self._entries[entry.pod]
        path = [node]
        while (node := node.parent) is not None:
            path.append(node)
        self._release(path[:-1], entry.pod)
        return True

    def clear(self, pod: K) -> None:
        """Remove all entries of `pod`."""
        for entry in list(self._entries.get(pod, ())):
            self.remove(entry)

    def _release(self, path: list[Node[dict[K, int]]], pod: K) -> None:
        """Count one placement less on the nodes of `path`, from the end up to below the root."""
        # All counts first: nodes can be joined only when both are right.
        for node in path:
            count = node.holders.pop(pod) - 1
            if count:
                node.holders[pod] = count
        for node in path:
            if node.holders:
                self._tree.join(node)
                break
            self._tree.remove(node)
