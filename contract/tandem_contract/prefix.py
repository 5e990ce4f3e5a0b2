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
    """xxh3-64 of each block of `block_bytes`, seeded with the one before; no partial one.

    `salt` separates what must never match: the model name, a LoRA adapter.
    """
    digest, view = xxhash.xxh3_64_intdigest, memoryview(data)
    previous = digest(salt)
    return [
        # The seed carries the chain: half the time of one hasher fed block by block.
        previous := digest(view[start : start + block_bytes], previous)
        for start in range(0, len(data) - block_bytes + 1, block_bytes)
    ]


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as they are hashed, four bytes each: `text_chain` of this is exact.

    Raises OverflowError when an id does not fit in 32 bits unsigned.
    """
    return array("I", token_ids).tobytes()


def prompt_hash(token_ids: Sequence[int]) -> str:
    """xxh3-128 of a whole prompt's token ids, in hex: two prompts of one length differ in it.

    Raises OverflowError as `token_bytes` does.
    """
    return xxhash.xxh3_128_hexdigest(token_bytes(token_ids))
