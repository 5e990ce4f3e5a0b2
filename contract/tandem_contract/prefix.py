"""The prefix hash chain: prompts with equal prefixes have equal hashes, block by block.

It is the key of the EPP's prefix index. Each hash covers the prompt from its start to the end of
its block, so the longest common prefix of two prompts is that of their chains.

A block's length depends on its position only, so the chain of a prompt that grows is continued and
never rewritten. Blocks are short at the start, where prompts differ most, and longer far in, where
a short block would cost time and memory and say little. Where two prompts part, less than one block
of their common prefix is lost: at most 16 tokens in the first 2,048, then 1/64 of the prefix.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, chain, repeat
from struct import Struct
from typing import Final

import xxhash

from .chains import Chain

BYTES_PER_TOKEN: Final = 4
"""Assumed bytes of text per token, where a prompt is not tokenized: English averages about four."""

FINE_TOKENS: Final = 16
"""Tokens of the first, shortest blocks: vLLM's default KV block."""
_LEVELS: Final = ((FINE_TOKENS, 128), (32, 64), (64, 64), (128, 64))
"""Tokens per block and number of such blocks, from the start of the prompt on."""
COARSE_TOKENS: Final = 256
"""Tokens of each block after those of `_LEVELS`."""
_ENDS: Final = tuple(
    accumulate(chain.from_iterable(repeat(*level) for level in _LEVELS), initial=0)
)
"""Number of blocks → tokens that they cover, for the blocks of `_LEVELS`."""

_GROUP: Final = 64
"""Blocks after those of `_LEVELS` that are cut out of a prompt at once: a copy of 64 KiB."""


def covered_tokens(blocks: int) -> int:
    """The tokens that the first `blocks` blocks of any prompt cover."""
    if blocks < len(_ENDS):
        return _ENDS[blocks]
    return _ENDS[-1] + (blocks - len(_ENDS) + 1) * COARSE_TOKENS


def whole_blocks(tokens: int) -> int:
    """The whole blocks in the first `tokens` tokens of any prompt; the inverse of
    `covered_tokens`."""
    if tokens < _ENDS[-1]:
        return bisect_right(_ENDS, tokens) - 1
    return len(_ENDS) - 1 + (tokens - _ENDS[-1]) // COARSE_TOKENS


def block_tokens_at(tokens: int) -> int:
    """The length of the block in which the token at position `tokens` lies."""
    end = 0
    for length, count in _LEVELS:
        end += length * count
        if tokens < end:
            return length
    return COARSE_TOKENS


def text_chain(data: bytes, salt: bytes = b"") -> Chain:
    """xxh3-64 of each whole block of `data`, seeded with the hash of the block before.

    A token is BYTES_PER_TOKEN bytes. `salt` separates prompts that must never match: the model
    name, a LoRA adapter, a cache salt.
    """
    digest, length = xxhash.xxh3_64_intdigest, len(data)
    previous = digest(salt)
    hashes: list[int] = []
    start = level = 0
    while True:
        tokens, count = _LEVELS[level] if level < len(_LEVELS) else (COARSE_TOKENS, _GROUP)
        level += 1
        size = tokens * BYTES_PER_TOKEN
        blocks = min(count, (length - start) // size)
        # Chaining through the seed takes half the time of one hasher that is updated by block.
        hashes += [
            previous := digest(block, previous) for block in _blocks_of(size, blocks)(data, start)
        ]
        start += size * blocks
        if blocks < count:
            break
    return array("Q", hashes)


@lru_cache(None)
def _blocks_of(size: int, count: int) -> Callable[[bytes, int], tuple[bytes, ...]]:
    """What cuts `count` blocks of `size` bytes out of data from a place on: one call for all of
    them takes half the time of a slice for each. There are as many results as numbers of blocks in
    `_LEVELS` and a `_GROUP`."""
    return Struct(f"{size}s" * count).unpack_from


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes to hash, four bytes each: `text_chain` of them is exact.

    Raises OverflowError when an id does not fit in 32 bits unsigned.
    """
    return array("I", token_ids).tobytes()


def prompt_hash(token_ids: Sequence[int]) -> str:
    """xxh3-128 of all token ids of a prompt, in hex.

    Raises OverflowError as `token_bytes` does.
    """
    return xxhash.xxh3_128_hexdigest(token_bytes(token_ids))
