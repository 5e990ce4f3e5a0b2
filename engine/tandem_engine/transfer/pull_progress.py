"""Which blocks of a prompt a reader still lacks. No sockets."""

from ..types import KvBroken, KvLayout
from .blockio import BlockPlan, block_plan
from .wire import Segment


class PullProgress:
    """One pull's bookkeeping: the prompt's blocks come layer by layer, each layer in order."""

    def __init__(
        self, layout: KvLayout, block_ids: tuple[int, ...], skip_blocks: int, tokens: int
    ) -> None:
        """The first `tokens` tokens go to `block_ids`, whose first `skip_blocks` need nothing."""
        self._layout = layout
        self._block_ids = block_ids
        self._total_blocks = -(-tokens // layout.block_size)
        self._first = min(skip_blocks, self._total_blocks)
        self._received = [self._first] * layout.layers
        self._planned = (0, 0)
        self._plan: BlockPlan = ()
        self.tokens = tokens
        self.skip_blocks = skip_blocks

    @property
    def missing(self) -> bool:
        """Whether any layer lacks a block."""
        return min(self._received) < self._total_blocks

    @property
    def new_tokens(self) -> int:
        """Tokens whose KV comes over the wire."""
        return max(0, self.tokens - self._first * self._layout.block_size)

    @property
    def new_bytes(self) -> int:
        """Payload of all segments together."""
        return (self._total_blocks - self._first) * self._layout.block_bytes * self._layout.layers

    def check(self, blocks: int) -> None:
        """Raise ValueError when the prompt does not fit its blocks or a cache of `blocks`."""
        ids = self._block_ids
        if self.tokens < 1 or self.skip_blocks < 0 or len(ids) < self._total_blocks:
            raise ValueError(
                f"{self.tokens} tokens do not go into {len(ids)} blocks of "
                f"{self._layout.block_size} after {self.skip_blocks} blocks"
            )
        if not 0 <= min(ids) <= max(ids) < blocks or len(set(ids)) < len(ids):
            raise ValueError(f"the cache has {blocks} blocks, and these are not some of them")

    def accept(self, segment: Segment) -> BlockPlan:
        """Where a segment's blocks go. Raises KvBroken when it is not one that is due."""
        layer, first, end = segment.layer, segment.first, segment.first + segment.blocks
        if (
            layer >= len(self._received)
            or not self._received[layer] == first < end <= self._total_blocks
        ):
            raise KvBroken(f"blocks {first} to {end} of layer {layer} were not due")
        self._received[layer] = end
        if self._planned != (first, end):
            self._planned = (first, end)
            self._plan = block_plan(self._block_ids[first:end], self._layout.block_bytes)
        return self._plan
