"""Keys: which prompts, on which engines, share a chunk.

    root  = sha256(identity, cache_salt, adapter)
    key_i = sha256(key_{i-1} + tokens of chunk i + hashes of media in chunk i)

A key covers all tokens up to the end of its chunk: equal keys mean equal prefixes on engines whose
KV is interchangeable. Integers are little-endian, so keys are equal on every machine. Each part has
its length before it, so different inputs never give the same bytes.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from sys import byteorder

import msgspec

from tandem_contract.kv_reference import TENSOR_FORMAT


class KvIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything besides the prompt that KV depends on. Engines with equal values share KV; if one
    value differs, all keys differ."""

    weights: str
    """Commit of the model's repository, or the hash of all bytes of its weights. Never a name: a
    fine-tuned model may keep the name, and would then load KV of other weights."""
    dtype: str
    """Data type of the KV cache, `bfloat16` or `fp8_e4m3`."""
    layers: int
    kv_heads: int
    """Heads of this rank."""
    head_dim: int
    block_size: int
    chunk_tokens: int
    layout: str
    """Order of a tensor's dimensions and how keys and values are packed, in the engine's words."""
    tensor_parallel: tuple[int, int] = (0, 1)
    """Rank and size."""
    pipeline_parallel: tuple[int, int] = (0, 1)
    """Rank and size."""
    quantization: str = ""
    """Method and settings of quantized weights; empty: none."""
    kv_scales: str = ""
    """Hash of the scales of an fp8 cache; empty: none."""
    overrides: str = ""
    """Canonical JSON of settings that replace the model's own, such as rope scaling."""
    engine: str = ""
    """Name of the engine, if its KV differs from other engines' KV in the same layout."""
    format: str = TENSOR_FORMAT

    def digest(self) -> str:
        """64 hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class Prompt(msgspec.Struct, frozen=True):
    """The part of a prompt that keys depend on."""

    token_ids: Sequence[int]
    cache_salt: str = ""
    """Prompts share KV only with prompts of the same salt."""
    adapter: str = ""
    """Hash of the LoRA adapter's weights, never its name; empty: none."""
    media: tuple[tuple[int, str], ...] = ()
    """Position of the first token and content hash of each image, audio or prompt embedding. If a
    hash is not known, the prompt must not be stored."""


def chunk_keys(identity: KvIdentity, prompt: Prompt, limit: int | None = None) -> list[str]:
    """The keys of the full chunks among the prompt's first `limit` tokens, in order; None: all."""
    size, tokens = identity.chunk_tokens, prompt.token_ids
    end = len(tokens) if limit is None else min(limit, len(tokens))
    previous = hashlib.sha256(
        _framed(identity.digest().encode(), prompt.cache_salt.encode(), prompt.adapter.encode())
    ).digest()
    keys = []
    for start in range(0, end - size + 1, size):
        media = [
            struct.pack("<Q", position - start) + content.encode()
            for position, content in prompt.media
            if start <= position < start + size
        ]
        chunk = _token_bytes(tokens[start : start + size])
        previous = hashlib.sha256(_framed(previous, chunk, *media)).digest()
        keys.append(previous.hex())
    return keys


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    packed = array("I", token_ids)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _framed(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)
