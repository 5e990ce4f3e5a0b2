"""Sizes and checksums of data objects, computed without stopping the event loop."""

import asyncio
from collections.abc import Sequence
from typing import Final

from .format.manifest import DataObject
from .format.tensors import Buffer, content_hash

_HASHED_HERE: Final = 1 << 21
"""Bytes that are hashed on the event loop, in at most 0.3 ms. More: the loop stops for longer.
Less: a switch to a thread and back takes longer than the hash."""


async def data_object(group: str, parts: Sequence[Buffer]) -> DataObject:
    return DataObject(group, size_of(parts), await hashed(parts))


def size_of(parts: Sequence[Buffer]) -> int:
    return sum(memoryview(part).nbytes for part in parts)


async def hashed(parts: Sequence[Buffer]) -> str:
    """The parts' checksum. Of more than a little in a thread: hashing releases the interpreter
    lock, so that the event loop goes on. Less is hashed sooner than a thread starts."""
    if size_of(parts) <= _HASHED_HERE:
        return content_hash(parts)
    return await asyncio.to_thread(content_hash, parts)
