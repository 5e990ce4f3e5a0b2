"""Sizes and checksums of data objects, computed without blocking the event loop."""

import asyncio
from collections.abc import Sequence
from typing import Final

from .format.manifest import DataObject
from .format.tensors import Buffer, content_hash

_HASHED_HERE: Final = 1 << 21
"""Most bytes that are hashed on the event loop; they take 0.3 ms. More: the loop is blocked for
longer. Fewer: switching to a thread and back takes longer than the hash."""


async def data_object(group: str, parts: Sequence[Buffer]) -> DataObject:
    """The entry of a manifest for a layer group whose object has the bytes `parts`."""
    return DataObject(group, size_of(parts), await hashed(parts))


def size_of(parts: Sequence[Buffer]) -> int:
    """Bytes of all parts together."""
    return sum(memoryview(part).nbytes for part in parts)


async def hashed(parts: Sequence[Buffer]) -> str:
    """The checksum of the parts. More than _HASHED_HERE bytes are hashed in a thread: hashing
    releases the interpreter lock, so the event loop goes on."""
    if size_of(parts) <= _HASHED_HERE:
        return content_hash(parts)
    return await asyncio.to_thread(content_hash, parts)
