"""External storage of simulated pods: what one of its pods has computed, any of them can load."""

from collections.abc import Sequence
from typing import Final

from .block_pool import BLOCK

KV_BYTES: Final = 131_072
"""Bytes of KV per token: 8 billion parameters, grouped-query attention, 16 bits."""


class Store:
    """One store. Writing takes no time: engines write beside their steps."""

    def __init__(
        self, bytes_per_second: float, latency: float = 0.01, kv_bytes: float = KV_BYTES
    ) -> None:
        """`latency`: seconds of a load of no bytes; `kv_bytes`: bytes of KV per token. Loads do not
        slow each other down."""
        self.bytes_per_second, self.latency, self.kv_bytes = bytes_per_second, latency, kv_bytes
        self._blocks: set[int] = set()

    def add(self, blocks: Sequence[int]) -> None:
        """A pod has computed these blocks."""
        self._blocks.update(blocks)

    def tokens(self, blocks: Sequence[int]) -> int:
        """Tokens in the leading blocks of a prompt that are stored."""
        count = next((i for i, block in enumerate(blocks) if block not in self._blocks), None)
        return BLOCK * (len(blocks) if count is None else count)

    def seconds(self, tokens: int) -> float:
        """How long a pod loads `tokens`."""
        return self.latency + tokens * self.kv_bytes / self.bytes_per_second
