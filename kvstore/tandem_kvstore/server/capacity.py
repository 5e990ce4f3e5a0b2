"""Bounds of `tandem store`: removes chunks when the directory reaches its size or age limit.

The least recently used chunk is removed first: its manifest, then its data objects. Times of use
are kept in memory and, to within five minutes, as the files' access times, which a restarted server
reads.
"""

import asyncio
import os
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..format.collection import UNFINISHED_SECONDS
from ..stores.files import FileStore

_SWEEP_SECONDS: Final = 10.0
_TOUCH_SECONDS: Final = 300.0
"""Least seconds between two writes of a file's access time."""
_LOW_WATER: Final = 0.95
"""Share of the limit down to which chunks are removed, so that not every write removes one."""


@dataclass(slots=True)
class _Chunk:
    """The objects of a chunk, or an object that belongs to no chunk."""

    files: dict[Path, int] = field(default_factory=dict)
    used: float = 0.0
    touched: float = 0.0
    """When the files' access time was last written."""


class Capacity:
    """Sizes and times of use of all objects below a directory. For one event loop."""

    def __init__(self, directory: Path, limit: int, max_age: float | None) -> None:
        self.limit = limit
        self._directory, self._max_age = directory, max_age
        self._chunks: OrderedDict[Path, _Chunk] = OrderedDict()
        self.size = 0
        # Bytes of uploads that are running.
        self._reserved = 0

    def scan(self) -> None:
        """Read the directory, at the start. Blocks."""
        files = []
        for folder, _, names in os.walk(self._directory):
            for name in names:
                file = Path(folder, name)
                with suppress(OSError):
                    status = file.stat()
                    if not name.startswith("."):
                        files.append((max(status.st_atime, status.st_mtime), file, status.st_size))
            FileStore(Path(folder)).remove_unfinished(time.time() - UNFINISHED_SECONDS)
        for used, file, size in sorted(files):
            self.add(file, size, used)

    def add(self, file: Path, size: int, now: float) -> None:
        """An object was written."""
        key = _chunk_of(file)
        chunk = self._chunks.setdefault(key, _Chunk())
        self.size += size - chunk.files.get(file, 0)
        chunk.files[file] = size
        chunk.used = now
        self._chunks.move_to_end(key)

    def forget(self, file: Path) -> None:
        """An object was removed."""
        key = _chunk_of(file)
        if (chunk := self._chunks.get(key)) is not None:
            self.size -= chunk.files.pop(file, 0)
            if not chunk.files:
                del self._chunks[key]

    def touch(self, file: Path, now: float) -> None:
        """An object was read."""
        key = _chunk_of(file)
        if (chunk := self._chunks.get(key)) is None:
            return
        chunk.used = now
        self._chunks.move_to_end(key)
        if now - chunk.touched > _TOUCH_SECONDS:
            chunk.touched = now
            with suppress(OSError):
                os.utime(file, (now, file.stat().st_mtime))

    async def make_room(self, size: int) -> bool:
        """Reserve `size` bytes for an upload, and remove chunks if necessary. Returns False if
        other uploads have reserved the space."""
        if self._reserved + size > self.limit:
            return False
        self._reserved += size
        if self.size + self._reserved > self.limit:
            await self._remove_down_to(int(_LOW_WATER * (self.limit - self._reserved)))
        return True

    def release(self, size: int) -> None:
        """An upload has ended."""
        self._reserved -= size

    async def run(self) -> None:
        """Remove chunks that are too old, and what a server that died has left, until cancelled."""
        now = asyncio.get_running_loop().time
        next_look = now() + UNFINISHED_SECONDS
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            await self.remove_old(time.time())
            if now() >= next_look:
                await asyncio.to_thread(self._remove_unfinished)
                next_look = now() + UNFINISHED_SECONDS

    async def remove_old(self, now: float) -> None:
        """Remove chunks that were not used for the longest allowed time."""
        while self._max_age is not None and self._chunks:
            key, chunk = next(iter(self._chunks.items()))
            if chunk.used > now - self._max_age:
                return
            await self._remove(key)

    def _remove_unfinished(self) -> None:
        before = time.time() - UNFINISHED_SECONDS
        for folder, _, _ in os.walk(self._directory):
            FileStore(Path(folder)).remove_unfinished(before)

    async def _remove_down_to(self, size: int) -> None:
        while self.size > size and self._chunks:
            await self._remove(next(iter(self._chunks)))

    async def _remove(self, key: Path) -> None:
        chunk = self._chunks.pop(key)
        self.size -= sum(chunk.files.values())
        # The manifest first, whose name is the shortest: without it the chunk is invisible. A
        # reader that has opened a data object reads it to its end.
        files = sorted(chunk.files, key=lambda file: len(file.name))
        await asyncio.to_thread(_unlink, files)


def _chunk_of(file: Path) -> Path:
    """The path of the manifest to which an object belongs."""
    return file.with_name(file.name.split("-", 1)[0])


def _unlink(files: list[Path]) -> None:
    for file in files:
        with suppress(OSError):
            file.unlink()
