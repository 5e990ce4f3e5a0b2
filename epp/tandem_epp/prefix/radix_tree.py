"""A radix tree over chains of block hashes, with an annotation on each node and its size in bytes.

Prompts that begin alike share the nodes of their common prefix; a node is a run of blocks between
two places where prompts part. A hash covers its prompt from the start, so a run equals a part of a
chain exactly when their last hashes are equal: a walk compares one hash per node, and searches by
halves in the node where the chain leaves the tree.

The owner of the tree decides what a node's `holders` mean. It must keep them nested: what holds a
node also holds the node's parent.
"""

from array import array
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from tandem_contract.chains import Chain
from tandem_contract.prefix import covered_tokens

H = TypeVar("H")

BLOCK_BYTES: Final = 8
"""Bytes of one block's hash."""
NODE_BYTES: Final = 290
"""Bytes of a node without its hashes on CPython 3.11: the object (80), its empty array with the
allocator's rounding (96), its entry in the parent's table with the key (90), and a share of tables
that have few entries."""


class Node(Generic[H]):
    """A run of blocks that is not divided: every chain in the tree holds all or none of it."""

    __slots__ = ("children", "ends", "hashes", "holders", "parent", "start")

    def __init__(self, hashes: Chain, start: int, parent: "Node[H] | None", holders: H) -> None:
        self.hashes = hashes
        self.start = start
        """Blocks before the run, from the start of the prompt."""
        self.parent = parent
        """None for the root, and for a node that was removed."""
        self.children: dict[int, Node[H]] | None = None
        """First hash of the run → child; None instead of an empty table."""
        self.holders = holders
        self.ends = 0
        """The owner's note on the end of the run; a split leaves it with the lower part."""

    @property
    def end(self) -> int:
        """Blocks up to the end of the run, from the start of the prompt."""
        return self.start + len(self.hashes)

    @property
    def tokens(self) -> int:
        """Tokens in the run."""
        return covered_tokens(self.end) - covered_tokens(self.start)


class RadixTree(Generic[H]):
    """The nodes. `copy` makes the annotation of the upper half of a node that is split."""

    def __init__(self, root_holders: H, copy: Callable[[H], H]) -> None:
        self.root: Node[H] = Node(array("Q"), 0, None, root_holders)
        self._copy = copy
        # Counted, not computed: every request asks for it several times.
        self.bytes = 0
        """Estimated memory of the tree."""
        self.blocks = 0
        """Blocks in all nodes."""

    def walk(self, chain: Chain) -> tuple[list[Node[H]], int]:
        """The nodes that begin with the next block of `chain`, from the top, and how many blocks of
        `chain` they match. Only the last of them may match in part."""
        path: list[Node[H]] = []
        children, at, length = self.root.children, 0, len(chain)
        while at < length and children is not None and (node := children.get(chain[at])):
            path.append(node)
            end = at + len(node.hashes)
            if end > length or node.hashes[-1] != chain[end - 1]:
                return path, at + _common_blocks(node.hashes, chain, at)
            children, at = node.children, end
        return path, at

    def split(self, node: Node[H], blocks: int) -> Node[H]:
        """Divide `node` after its first `blocks` blocks; returns the new upper node. The lower one
        is the same object as before, with its children."""
        parent = _parent(node)
        upper = Node(node.hashes[:blocks], node.start, parent, self._copy(node.holders))
        upper.children = {node.hashes[blocks]: node}
        self._replace_child(parent, upper)
        node.hashes, node.start, node.parent = node.hashes[blocks:], upper.end, upper
        self.bytes += NODE_BYTES
        return upper

    def append(self, parent: Node[H], chain: Chain, holders: H) -> Node[H]:
        """Add the blocks of `chain` that follow `parent` as a new node."""
        node = Node(chain[parent.end :], parent.end, parent, holders)
        if parent.children is None:
            parent.children = {}
        parent.children[node.hashes[0]] = node
        self._count(1, len(node.hashes))
        return node

    def extend(self, node: Node[H], chain: Chain) -> None:
        """Add the blocks of `chain` that follow `node` to it; it must have no children."""
        # A new array: one that grows in place keeps spare room.
        tail = chain[node.end :]
        node.hashes = node.hashes + tail
        self._count(0, len(tail))

    def remove(self, node: Node[H]) -> None:
        """Remove a node without children."""
        parent = _parent(node)
        siblings = parent.children or {}
        del siblings[node.hashes[0]]
        parent.children = siblings or None
        node.parent = None
        self._count(-1, -len(node.hashes))

    def join(self, node: Node[H]) -> None:
        """Put the run of `node` before that of its child, if it has only one and both have the same
        holders. The child's object remains."""
        if node.parent is None or node.children is None or len(node.children) > 1:
            return
        child = next(iter(node.children.values()))
        if child.holders == node.holders:
            child.hashes, child.start = node.hashes + child.hashes, node.start
            child.parent = node.parent
            self._replace_child(node.parent, child)
            node.parent = None
            self.bytes -= NODE_BYTES

    def _count(self, nodes: int, blocks: int) -> None:
        self.blocks += blocks
        self.bytes += nodes * NODE_BYTES + blocks * BLOCK_BYTES

    def _replace_child(self, parent: Node[H], child: Node[H]) -> None:
        children = parent.children or {}
        children[child.hashes[0]] = child


def _common_blocks(run: Chain, chain: Chain, at: int) -> int:
    """How many blocks of `run` are in `chain` from `at` on. The first one is known to be."""
    low, high = 1, min(len(run), len(chain) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == chain[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _parent(node: Node[H]) -> Node[H]:
    if node.parent is None:
        raise ValueError("the node is the root, or was removed")
    return node.parent
