"""Decodes vLLM's batches of KV events.

    payload   msgpack [ts, [event, …], data-parallel rank], or a map of the same members
    event     a map tagged `type`, or an array that begins with the type (older releases)

Members that a release adds are ignored, and so are types of events that this module does not know.

Errors: `MalformedBatch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ..blocks import EngineHash

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Bytes of one batch. A batch holds the events of one step of an engine, a few kilobytes; a prompt
of a million tokens takes five megabytes. ZMQ drops the connection past this."""


class MalformedBatch(ValueError):
    """The payload is no batch of events; what the engine holds is no longer known."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one step of an engine."""

    timestamp: float
    """Unix seconds by the engine's clock."""
    events: Sequence["KvEvent"]
    unknown: int = 0
    """Events of unknown types, left out of `events`."""


class _ArrayStored(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _ArrayRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class _ArrayCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks were added to a cache, under vLLM's names."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """One entry per block; releases before 0.12 do not send them."""
    group_idx: int | None = None
    """The group of layers that share a block table; None in models with one."""
    kv_cache_spec_kind: str | None = None
    """How the group's layers attend, such as `full_attention` or `sliding_window`."""


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks left a cache."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Every cache of the engine was emptied."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


class _MapBatch(msgspec.Struct, gc=False):
    ts: float
    events: list[msgspec.Raw]


_array_batch: Final = msgspec.msgpack.Decoder(_ArrayBatch)
_map_batch: Final = msgspec.msgpack.Decoder(_MapBatch)
_map_event: Final = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_array_event: Final = msgspec.msgpack.Decoder(_ArrayStored | _ArrayRemoved | _ArrayCleared)
_any: Final = msgspec.msgpack.Decoder()
_TYPES: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def decode_batch(payload: bytes) -> EventBatch:
    """The batch in `payload`. Raises MalformedBatch."""
    try:
        batch = (_map_batch if _is_map(payload) else _array_batch).decode(payload)
        events = [_event(raw) for raw in batch.events]
    except (msgspec.MsgspecError, RecursionError) as err:
        raise MalformedBatch(str(err)) from err
    readable = [event for event in events if event is not None]
    return EventBatch(batch.ts, readable, len(events) - len(readable))


def _event(raw: msgspec.Raw) -> KvEvent | None:
    """The event; None if its type is unknown."""
    data = memoryview(raw)
    is_map = _is_map(data)
    event: KvEvent | _ArrayStored | _ArrayRemoved | _ArrayCleared
    try:
        event = _map_event.decode(data) if is_map else _array_event.decode(data)
    except msgspec.ValidationError:
        if _is_known_type(data):
            raise
        return None
    match event:
        case _ArrayStored():
            return BlockStored(
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                event.medium,
                event.lora_name,
                event.extra_keys,
                event.group_idx,
                event.kv_cache_spec_kind,
            )
        case _ArrayRemoved():
            return BlockRemoved(event.block_hashes, event.medium, event.group_idx)
        case _ArrayCleared():
            return AllBlocksCleared()
        case _:
            return event


def _is_known_type(data: memoryview) -> bool:
    """Whether an event that could not be converted is of a known type, or of none at all."""
    event = _any.decode(data)
    if isinstance(event, dict):
        kind = event.get("type")
    else:
        kind = event[0] if isinstance(event, list) and event else None
    return not isinstance(kind, str) or kind in _TYPES


def _is_map(data: bytes | memoryview) -> bool:
    """Whether msgpack data is a map: fixmap, map 16 or map 32."""
    return bool(data) and (data[0] >> 4 == 0x8 or data[0] in (0xDE, 0xDF))
