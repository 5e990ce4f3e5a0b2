"""A directory as a store: what only file systems do."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_kvstore.collector import Collector
from tandem_kvstore.format.collection import UNFINISHED_SECONDS, Bounds
from tandem_kvstore.location import store_location
from tandem_kvstore.server import capacity
from tandem_kvstore.server.capacity import Capacity
from tandem_kvstore.stores.files import FileStore

from ..epp.real import until

CALLS = 64
"""More than the event loop has threads."""


async def test_a_file_system_that_hangs_keeps_nothing_else_waiting(tmp_path: Path) -> None:
    # Opening a pipe waits for a writer, as opening a file on a server that is gone.
    os.mkfifo(tmp_path / "object")
    store = FileStore(tmp_path)
    reads = [asyncio.create_task(store.get("object", 1)) for _ in range(CALLS)]
    # Each read is handed to a thread now.
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(120.0):
            await asyncio.to_thread(os.getpid)
    finally:
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        pipe = os.open(tmp_path / "object", os.O_RDWR)
        # Threads that open it later find no pipe; those that have it read its end.
        os.unlink(tmp_path / "object")
        os.close(pipe)


def test_a_process_that_was_forked_has_threads_of_its_own(tmp_path: Path) -> None:
    program = f"""
import asyncio, os
from pathlib import Path
from tandem_kvstore.stores.files import FileStore

async def use():
    async with asyncio.timeout(120.0):
        store = FileStore(Path({str(tmp_path)!r}))
        await asyncio.gather(*(store.put("object", [b"data"]) for _ in range({CALLS})))

asyncio.run(use())
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    asyncio.run(use())
"""
    # Newer versions of Python warn about forks beside threads.
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def unfinished(directory: Path, age: float) -> Path:
    """A file that a writer left."""
    file = FileStore(directory).new_temporary()
    file.write_bytes(bytes(1000))
    modified = file.stat().st_mtime - age
    os.utime(file, (modified, modified))
    return file


async def test_the_collector_removes_what_a_writer_that_died_has_left(tmp_path: Path) -> None:
    old, new = (unfinished(tmp_path, age) for age in (UNFINISHED_SECONDS + 60, 60))
    await Collector(FileStore(tmp_path), lambda: Bounds(1 << 30, 1e9)).collect()
    assert (old.exists(), new.exists()) == (False, True)


async def test_tandem_store_removes_what_a_server_that_died_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ns").mkdir()
    bounds = Capacity(tmp_path, 1 << 30, None)
    bounds.scan()
    file = unfinished(tmp_path / "ns", 60)
    monkeypatch.setattr(capacity, "_SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(capacity, "UNFINISHED_SECONDS", 0.02)
    task = asyncio.create_task(bounds.run())

    async def is_gone() -> bool:
        return not file.exists()

    await until(is_gone)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_the_root_directory_may_be_the_store() -> None:
    assert store_location("file:///", "data/kv").directory == Path("/data/kv")
