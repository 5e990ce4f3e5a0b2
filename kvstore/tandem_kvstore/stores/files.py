"""A directory as a store: `file://`, and what `tandem store` keeps its objects in.

A write goes to a temporary file, which then replaces the object in one step: no reader sees, and no
crashed writer leaves, a part of an object under its name. Nothing is flushed to the disk: after a
power failure an object may be damaged, and its checksum does not match.
"""

import asyncio
import errno
import fcntl
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from ..errors import (
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from ..format.tensors import Buffer
from .base import UNFINISHED, ObjectInfo, TaggedObject
from .file_threads import FILE_THREADS

T = TypeVar("T")

LISTED_AT_ONCE: Final = 1000
"""Objects of a piece of a listing. More: a network file system may take longer than the lease of a
collector to list them. Fewer: more switches between threads."""
_LOCK: Final = ".lock"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


class FileStore:
    """The files of one directory. The first write creates it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def get(self, name: str, limit: int, *, is_cut: bool = False) -> Buffer:
        return (await _in_thread(self.read, name, limit, is_cut)).data

    async def get_tagged(self, name: str, limit: int) -> TaggedObject:
        return await _in_thread(self.read, name, limit)

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        await _in_thread(self.write, name, parts)

    async def put_if(self, name: str, parts: Sequence[Buffer], tag: str | None) -> None:
        await _in_thread(self.write_if, name, parts, tag)

    async def delete(self, name: str) -> None:
        await _in_thread(self.remove, name)

    async def info(self, name: str) -> ObjectInfo:
        return await _in_thread(self.entry, name)

    async def scan(self) -> AsyncIterator[ObjectInfo]:
        listing = self.listing()

        def piece() -> list[ObjectInfo]:
            return list(islice(listing, LISTED_AT_ONCE))

        # A collector renews its lease between two pieces.
        while infos := await _in_thread(piece):
            for info in infos:
                yield info

    async def close(self) -> None:
        """Nothing to do: no file is open between calls."""

    def read(self, name: str, limit: int, is_cut: bool = False) -> TaggedObject:
        """`get`, blocking."""
        with _store_errors(name), (self.directory / name).open("rb", buffering=0) as file:
            # Size, tag and bytes from one open file, which a replacement does not change.
            status = os.fstat(file.fileno())
            if status.st_size > limit:
                if is_cut:
                    return TaggedObject(file.read(limit), tag_of(status))
                raise ObjectTooLarge(f"{name} has {status.st_size} bytes, at most {limit} expected")
            return TaggedObject(file.readall(), tag_of(status))

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        """`put`, blocking."""
        with _store_errors(name), self._temporary(parts) as file:
            self.publish(file, name, False, None)

    def write_if(self, name: str, parts: Sequence[Buffer], tag: str | None) -> None:
        """`put_if`, blocking."""
        with _store_errors(name), self._temporary(parts) as file:
            self.publish(file, name, True, tag)

    def new_temporary(self) -> Path:
        """An empty file to write an object into, for `publish`."""
        with _store_errors("the directory"):
            self.directory.mkdir(parents=True, exist_ok=True)
            file = self.directory / f"{UNFINISHED}{uuid.uuid4().hex}"
            file.touch(exist_ok=False)
            return file

    def publish(self, file: Path, name: str, conditional: bool, tag: str | None) -> None:
        """Make a temporary file the object `name` in one step; `tag`: as in `put_if`."""
        target = self.directory / name
        with _store_errors(name):
            if not conditional:
                file.rename(target)
            elif tag is None:
                # A hard link fails if the name exists: the check and the write are one step.
                os.link(file, target)
            else:
                with (self.directory / _LOCK).open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    if tag_of(target.stat()) != tag:
                        raise FileExistsError(name)
                    file.rename(target)

    def remove(self, name: str) -> None:
        """`delete`, blocking."""
        with _store_errors(name):
            (self.directory / name).unlink(missing_ok=True)

    def entry(self, name: str) -> ObjectInfo:
        """`info`, blocking."""
        with _store_errors(name):
            status = (self.directory / name).stat()
            return ObjectInfo(name, status.st_size, status.st_mtime)

    def entries(self) -> list[ObjectInfo]:
        """`scan`, blocking, without unfinished objects."""
        return [info for info in self.listing() if not info.name.startswith(UNFINISHED)]

    def listing(self) -> Iterator[ObjectInfo]:
        """`scan`, blocking."""
        # Nothing was written yet.
        missing = suppress(FileNotFoundError)
        with _store_errors("the directory"), missing, os.scandir(self.directory) as scan:
            yield from filter(None, map(_info_of, scan))

    def remove_unfinished(self, before: float) -> None:
        """Remove what writers that died have left, written before the Unix time `before`."""
        # What cannot be read or removed does not keep the others; it is tried again.
        with suppress(OSError):
            for file in self.directory.glob(f"{UNFINISHED}*"):
                with suppress(OSError):
                    if file.stat().st_mtime < before:
                        file.unlink()

    @contextmanager
    def _temporary(self, parts: Sequence[Buffer]) -> Iterator[Path]:
        file = self.new_temporary()
        try:
            with file.open("wb", buffering=0) as stream:
                for part in parts:
                    write_all(stream, part)
            yield file
        finally:
            # After a rename it does not exist.
            file.unlink(missing_ok=True)


def tag_of(status: os.stat_result) -> str:
    """A tag that changes with every write, equal to the ETag of aiohttp's FileResponse."""
    return f'"{status.st_mtime_ns:x}-{status.st_size:x}"'


def write_all(stream: FileIO, part: Buffer) -> None:
    """Write all of `part`: one call writes less on a disk that is almost full. Raises OSError."""
    view = memoryview(part).cast("B")
    while view:
        view = view[stream.write(view) :]


async def _in_thread(call: Callable[..., T], *args: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(FILE_THREADS, call, *args)


def _info_of(entry: "os.DirEntry[str]") -> ObjectInfo | None:
    """None: no object, or removed since the listing began."""
    if entry.name.startswith(".") and not entry.name.startswith(UNFINISHED):
        return None
    with suppress(FileNotFoundError):
        if not entry.is_file():
            return None
        status = entry.stat()
        return ObjectInfo(entry.name, status.st_size, status.st_mtime)
    return None


@contextmanager
def _store_errors(name: str) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except FileNotFoundError as err:
        raise ObjectMissing(f"{name} does not exist") from err
    except FileExistsError as err:
        raise ObjectExists(f"{name} is another object") from err
    except OSError as err:
        message = f"{name}: {err.strerror}"
        if err.errno in _FULL:
            raise StoreFull(message) from err
        raise (StoreDenied if err.errno in _DENIED else StoreUnavailable)(message) from err
