"""Which blocks of a prompt a pull still lacks. No sockets."""

from ..types import KvBroken, KvLayout
from .blockio import BlockPlan, block_plan
from .wire import Segment


class PullProgress:
    """Bookkeeping of one pull. Layers come in any order, a layer's blocks in prompt order."""

    def __init__(
        self, layout: KvLayout, block_ids: tuple[int, ...], skip_blocks: int, tokens: int
    ) -> None:
        """The KV of `tokens` tokens goes into `block_ids`; the first `skip_blocks` have theirs."""
        self._layout = layout
        self._block_ids = block_ids
        self._total_blocks = -(-tokens // layout.block_size)
        self._first = min(skip_blocks, self._total_blocks)
        self._received = [self._first] * layout.layers
        # The last plan and its run of blocks: the layers of one chunk all have the same run.
        self._planned = (0, 0)
        self._plan: BlockPlan = ()
        self.tokens = tokens
        self.skip_blocks = skip_blocks

    @property
    def missing(self) -> bool:
        """Whether a block of any layer is missing."""
        return min(self._received) < self._total_blocks

    @property
    def new_tokens(self) -> int:
        """Tokens whose KV is transferred."""
        return max(0, self.tokens - self._first * self._layout.block_size)

    @property
    def new_bytes(self) -> int:
        """Payload of all segments together, in bytes."""
        return (self._total_blocks - self._first) * self._layout.block_bytes * self._layout.layers

    def check(self, blocks: int) -> None:
        """Raise ValueError when the prompt does not fit its blocks, or these not the cache."""
        ids = self._block_ids
        if self.tokens < 1 or self.skip_blocks < 0 or len(ids) < self._total_blocks:
            raise ValueError(
                f"{self.tokens} tokens do not fit into {len(ids)} blocks of "
                f"{self._layout.block_size} tokens, {self.skip_blocks} of them skipped"
            )
        if not 0 <= min(ids) <= max(ids) < blocks or len(set(ids)) < len(ids):
            raise ValueError(f"block ids repeat or are not 0 to {blocks - 1}, the cache's blocks")

    def accept(self, segment: Segment) -> BlockPlan:
        """The local blocks for a segment. Raises KvBroken when it is not the layer's next one."""
        layer, first, end = segment.layer, segment.first, segment.first + segment.blocks
        # A block that is sent twice or out of order would overwrite KV that is verified already.
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
