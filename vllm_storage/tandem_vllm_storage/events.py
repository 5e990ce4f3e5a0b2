"""KV events of chunks: made from vLLM's requests for `StoredChunks`, and from there for vLLM."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from .stored_chunks import BlocksRemoved, BlocksStored

MEDIUM: Final = "STORAGE"
"""vLLM's medium of these events. The EPP counts their blocks for the store, not for the pod."""

# Removes a tag that keys have in hashes but not in events; vLLM 0.30 has no such tag.
_untagged: Final[Callable[[Any], Any]] = getattr(kv_cache_utils, "to_event_extra_keys", list)


def chunk_blocks(request: Any, start: int, end: int, block: int) -> BlocksStored | None:
    """The blocks of `request` with the tokens from `start` to `end`, multiples of `block` tokens.

    None: the request has no hashes of these blocks, because vLLM hashes another number of tokens.
    """
    hashes = request.block_hashes[: end // block]
    if len(hashes) * block < end or len(request.block_hashes) * block > request.num_tokens:
        return None
    names = [kv_cache_utils.maybe_convert_block_hash(name) for name in hashes]
    extra: list[tuple[Any, ...] | None] = []
    medium = 0
    for begin in range(start, end, block):
        keys, medium = kv_cache_utils.generate_block_hash_extra_keys(
            request, begin, begin + block, medium
        )
        extra.append(keys)
    lora = request.lora_request
    first = start // block
    return BlocksStored(
        names[first:],
        names[first - 1] if first else None,
        list(request.all_token_ids[start:end]),
        block,
        lora.adapter_id if lora else None,
        lora.name if lora else None,
        _untagged(extra),
    )


def to_vllm(events: Iterable[BlocksStored | BlocksRemoved]) -> list[KVCacheEvent]:
    """The events in vLLM's types. They name no KV cache group: a chunk has the KV of all layers."""
    return [_to_vllm(event) for event in events]


def _to_vllm(event: BlocksStored | BlocksRemoved) -> KVCacheEvent:
    if isinstance(event, BlocksRemoved):
        return BlockRemoved(block_hashes=list(event.hashes), medium=MEDIUM)
    return BlockStored(
        block_hashes=list(event.hashes),
        parent_block_hash=event.parent_hash,
        token_ids=list(event.token_ids),
        block_size=event.block_size,
        lora_id=event.lora_id,
        medium=MEDIUM,
        lora_name=event.lora_name,
        extra_keys=list(event.extra_keys) if event.extra_keys else None,
    )
