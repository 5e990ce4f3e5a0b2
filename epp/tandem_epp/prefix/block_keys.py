"""Keys of KV blocks: equal for two blocks exactly when an engine would share their KV.

A key covers the block's token ids, everything before them in the prompt, and what else the engine
puts into its own block hash (vLLM's *extra keys*): the LoRA adapter in every block, media items in
the blocks that they touch, the cache salt in the first block. The engine's own hashes are not
recomputed: their function and seed depend on its version and flags. The model is not part of a key,
because a pod serves one.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Final

import msgspec
import xxhash

ROOT: Final = 0
"""Parent key of a prompt's first block."""

_PIECE_BLOCKS: Final = 64
"""Blocks whose tokens are converted at once: of a long prompt, mostly the first ones are enough."""
ExtraKeys = Sequence[Any]
"""The extra keys of one block, in vLLM's order: adapter, (media identifier, offset), salt."""

_pack: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, a video or a sound, and the placeholder tokens that stand for it."""

    identifier: str
    """The engine's hash of the item."""
    offset: int
    """Index of its first placeholder token in the prompt."""
    length: int
    """Number of placeholder tokens."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the engine computes it, with what its block hashes depend on."""

    token_ids: Sequence[int]
    adapter: str | None = None
    """Name of the LoRA adapter; None without one."""
    cache_salt: str | None = None
    media: tuple[MediaItem, ...] = ()
    """In the order of their offsets."""

    def extra_keys(self, start: int, end: int) -> ExtraKeys:
        """The extra keys of the block that holds the tokens from `start` to `end`, exclusive."""
        keys: list[Any] = [self.adapter] if self.adapter is not None else []
        keys += (
            # Relative to the block: the same item at another place of it is another block.
            (item.identifier, item.offset - start)
            for item in self.media
            if item.offset < end and start < item.offset + item.length
        )
        if start == 0 and self.cache_salt:
            keys.append(self.cache_salt)
        return keys

    def keys(self, block_tokens: int) -> Iterator[int]:
        """The keys of the prompt's full blocks of `block_tokens` tokens, each computed when it is
        asked for: of a prompt that no pod has cached, one is enough.

        Raises OverflowError when a token id does not fit in 32 bits unsigned.
        """
        extras: Iterable[ExtraKeys] = ()
        if self.adapter or self.cache_salt or self.media:
            starts = range(0, len(self.token_ids) - block_tokens + 1, block_tokens)
            extras = (self.extra_keys(start, start + block_tokens) for start in starts)
        return block_keys(ROOT, self.token_ids, block_tokens, extras)


def block_keys(
    parent: int,
    token_ids: Sequence[int],
    block_tokens: int,
    extras: Iterable[ExtraKeys | None],
) -> Iterator[int]:
    """The key of each full block of `token_ids`, chained to `parent`.

    `extras` has one entry per block, or none. Raises OverflowError when a token id does not
    fit in 32 bits unsigned.
    """
    digest, pack = xxhash.xxh3_64_intdigest, _pack
    width, key = 4 * block_tokens, parent
    extra_keys = chain(extras, repeat(None))
    end, piece = len(token_ids) // block_tokens * block_tokens, _PIECE_BLOCKS * block_tokens
    for first in range(0, end, piece):
        # Slices of bytes are made faster than those of a memoryview.
        data = array("I", token_ids[first : min(first + piece, end)]).tobytes()
        # The range is first: the extra keys of the next piece's first block are not taken.
        for start, extra in zip(range(0, len(data), width), extra_keys, strict=False):
            if extra:
                key = digest(pack(tuple(extra)), key)
            key = digest(data[start : start + width], key)
            yield key
