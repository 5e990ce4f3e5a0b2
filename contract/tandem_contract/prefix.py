"""The prefix hash chain: equal prefixes have equal hashes, block by block from the start.

The EPP's prefix index is keyed by it. Each hash covers everything up to its block's end, so the
longest common prefix of two prompts is the longest common prefix of their chains.
"""

from array import array
from collections.abc import Sequence
from typing import Final

import xxhash

BYTES_PER_TOKEN: Final = 4
"""What a token of text is taken to weigh while nobody tokenizes: English averages about four."""


def text_chain(data: bytes, block_bytes: int, salt: bytes = b"") -> list[int]:
    """xxh3-64 chain over `data` in blocks of `block_bytes`; a last partial block is left out.

    `salt` separates what must never match: the model name, a LoRA adapter.
    """
    hasher = xxhash.xxh3_64(salt)
    chain = []
    for end in range(block_bytes, len(data) + 1, block_bytes):
        hasher.update(data[end - block_bytes : end])
        chain.append(hasher.intdigest())
    return chain


def token_chain(token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> list[int]:
    """The chain over token ids (each as four bytes), blocks of `block_size` tokens.

    Raises OverflowError when an id does not fit in 32 bits unsigned.
    """
    data = array("I", token_ids).tobytes()
    return text_chain(data, block_size * 4, salt)
