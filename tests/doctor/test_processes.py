"""Fabrics between processes of this machine, read from /proc: peers open what UCX would open."""

import asyncio
import mmap
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tandem_doctor.processes import ucx_fabrics
from tandem_planner.fabrics import Fabric

pytestmark = pytest.mark.component

# library, descriptor of shared memory, port to connect to (0: accept one)
PEER = """
import mmap, socket, sys
with open(sys.argv[1], "rb") as library:
    kept = [mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)]
kept.append(mmap.mmap(int(sys.argv[2]), mmap.PAGESIZE))
listener = socket.create_server(("127.0.0.1", 0))
kept.append(socket.create_connection(listener.getsockname()))
kept.append(listener.accept())
port = int(sys.argv[3])
if port:
    kept.append(socket.create_connection(("127.0.0.1", port)))
print(listener.getsockname()[1], flush=True)
for line in sys.stdin:
    kept.append(listener.accept())
    print(flush=True)
"""


@asynccontextmanager
async def peer(library: Path, segment: int, port: int = 0) -> AsyncIterator[Process]:
    """A process with its own connection to itself, its segment, and a connection to `port`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PEER, str(library), str(segment), str(port)),
        stdin=PIPE,
        stdout=PIPE,
        pass_fds=(segment,),
        process_group=0,
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def read_port(process: Process) -> int:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return int(await process.stdout.readline() or -1)


def segment(name: str) -> int:
    fd = os.memfd_create(name)
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd


@pytest.mark.parametrize("fabric", [None, Fabric.TCP, Fabric.SHARED_MEMORY])
async def test_only_resources_shared_by_two_engines_count(
    tmp_path: Path, fabric: Fabric | None
) -> None:
    library = tmp_path / "libucp-1.so"
    library.write_bytes(b"x")
    async with AsyncExitStack() as stack:
        segments = [segment("ucx_a"), segment("ucx_b")]
        for descriptor in segments:
            stack.callback(os.close, descriptor)
        if fabric is Fabric.SHARED_MEMORY:
            segments = segments[:1] * 2
        first = await stack.enter_async_context(peer(library, segments[0]))
        port = await read_port(first)
        tcp = fabric is Fabric.TCP
        second = await stack.enter_async_context(peer(library, segments[1], port if tcp else 0))
        await read_port(second)
        if tcp:
            assert first.stdin is not None
            first.stdin.write(b"accept\n")
            assert first.stdout is not None
            assert await first.stdout.readline() == b"\n"
        expected = frozenset({fabric} if fabric else ())
        assert ucx_fabrics([first.pid, second.pid]) == {first.pid: expected, second.pid: expected}


async def test_fabrics_are_unknown_without_ucx(tmp_path: Path) -> None:
    library = tmp_path / "libother.so"
    library.write_bytes(b"x")
    shared = segment("ucx_a")
    async with peer(library, shared) as process:
        os.close(shared)
        await read_port(process)
        assert ucx_fabrics([process.pid, -1]) == {process.pid: None, -1: None}
