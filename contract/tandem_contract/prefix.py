"""The prefix hash chain: prompts with equal prefixes have equal hashes, block by block.

It is the key of the EPP's prefix index. Each hash covers the prompt from its start to the end of
its block, so the longest common prefix of two prompts is that of their chains.
"""

from array import array
from collections.abc import Sequence
from typing import Final

import xxhash

BYTES_PER_TOKEN: Final = 4
"""Assumed bytes of text per token, where a prompt is not tokenized: English averages about four."""


def text_chain(data: bytes, block_bytes: int, salt: bytes = b"") -> list[int]:
    """xxh3-64 of each whole block of `block_bytes` bytes, seeded with the hash of the block before.

    `salt` separates prompts that must never match: the model name, a LoRA adapter.
    """
    digest, view = xxhash.xxh3_64_intdigest, memoryview(data)
    previous = digest(salt)
    return [
        # Chaining through the seed takes half the time of one hasher that is updated by block.
        previous := digest(view[start : start + block_bytes], previous)
        for start in range(0, len(data) - block_bytes + 1, block_bytes)
    ]


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
