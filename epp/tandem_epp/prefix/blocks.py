"""KV blocks as values: what an event stores, where it lies, and how much of a prompt is cached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from .block_keys import ExtraKeys

EngineHash = bytes | int
"""A block's name in events: vLLM's hash, whole or cut to 64 bits."""


class Tier(IntEnum):
    """Where a block lies. Each tier is a bit of its own in a set of holders."""

    GPU = 0
    """The cache that the engine computes in, whatever the device."""
    CPU = 1
    """Memory from which the engine loads a block instead of computing it."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks that follow each other in a prompt."""

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    """Hash of the block before the first; None at the start of a prompt."""
    token_ids: Sequence[int]
    """The tokens of all blocks. Empty when the event names blocks that are known already."""
    block_tokens: int
    extras: Sequence[ExtraKeys | None] = ()
    """The extra keys of each block; empty when none has any."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The length, in tokens, of a prompt's cached prefix on one pod."""

    total: int = 0
    """On the GPU or in a slower tier of the pod."""
    gpu: int = 0
    """On the GPU alone."""


@dataclass(frozen=True, slots=True)
class BlockMatch:
    """The cached prefixes of one prompt, by pod; pods without any are absent."""

    prefixes: Mapping[str, CachedPrefix]

    def prefix(self, pod: str) -> CachedPrefix:
        """The cached prefix on `pod`."""
        return self.prefixes.get(pod, _NOTHING)


_NOTHING: Final = CachedPrefix()
