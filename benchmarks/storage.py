"""KV to and from a store, beside obstore alone with the same bytes: speed, checksums, memory.

Runs versitygw, and for the speeds `tandem store`, over a directory in memory. `write` is from
blocks of the engine's cache to a visible manifest, `read` from the look-up to verified blocks in
the cache; obstore puts or gets one object of the same bytes. Both are measured in each
round, so that they see the same machine; the order of the reads alternates.
"""

import asyncio
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import aiohttp
import click
import obstore
import torch
from obstore.store import HTTPStore
from tests.cluster import tools
from tests.kvstore.servers import tandem_store

from tandem_engine.tiers.chunk_memory import LAYOUT, ChunkMemory
from tandem_engine.types import KvLayout
from tandem_kvstore import checksums
from tandem_kvstore.chain import Progress
from tandem_kvstore.chunk_store import Chunk, ChunkStore, chunks_of
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.identity import KvIdentity, Prompt, chunk_keys
from tandem_kvstore.format.tensors import content_hash
from tandem_kvstore.location import Secret, StoreCredentials, store_location
from tandem_kvstore.stores import open_store
from tandem_kvstore.stores.s3 import S3Store
from tandem_local.ports import free_port

from . import programs
from .figures import Figure, at_least, at_most, progress, report

_SHARED: Final = Path("/dev/shm")
"""A file system in memory, on Linux."""
MIB: Final = 1 << 20
KEYS: Final = ("BENCHMARK", "benchmark-secret")
_BLOCK, _LAYERS, _HEADS, _DIM = 16, 4, 8, 128
_TOKEN_BYTES: Final = _LAYERS * 2 * _HEADS * _DIM * 2
_SIZES: Final = {1: 60, 16: 40, 64: 12, 256: 6}
"""MiB → rounds."""
_MEMORY_CHUNKS: Final = (1024, 64, 32)
"""Tokens of a chunk: 16 MiB, and two sizes whose data follow their manifest."""


@asynccontextmanager
async def s3_server() -> AsyncIterator[str]:
    """versitygw over a directory in memory; yields its URL."""
    with tempfile.TemporaryDirectory(dir=_SHARED if _SHARED.is_dir() else None) as directory:
        (Path(directory) / "bucket").mkdir()
        port = free_port("127.0.0.1")
        process = await asyncio.create_subprocess_exec(
            *(str(tools.path("versitygw")), "--port", f"127.0.0.1:{port}"),
            *("--health", "/healthz", "--quiet", "posix", directory),
            env={"ROOT_ACCESS_KEY": KEYS[0], "ROOT_SECRET_KEY": KEYS[1], "HOME": directory},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            async with aiohttp.ClientSession() as http, asyncio.timeout(20):
                while True:
                    with suppress(aiohttp.ClientError):
                        async with http.get(f"http://127.0.0.1:{port}/healthz"):
                            break
                    await asyncio.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            await process.wait()


@asynccontextmanager
async def http_server() -> AsyncIterator[str]:
    """`tandem store` over a directory in memory; yields its URL."""
    with tempfile.TemporaryDirectory(dir=_SHARED if _SHARED.is_dir() else None) as directory:
        async with tandem_store(Path(directory)) as server:
            yield server.location.endpoint


@dataclass
class Bench:
    """One size: a cache with random KV, and the store's clients."""

    url: str
    size: int
    """Bytes of KV."""
    chunk_tokens: int = 1024
    """At most."""
    is_s3: bool = True
    """Or plain HTTP."""

    def __post_init__(self) -> None:
        tokens = self.size // _TOKEN_BYTES
        chunk_tokens = min(tokens, self.chunk_tokens)
        blocks = tokens // _BLOCK
        shape = (blocks, 2, _BLOCK, _HEADS, _DIM)
        layers = [torch.randn(shape).to(torch.bfloat16) for _ in range(_LAYERS)]
        layout = KvLayout("bench", "bfloat16", _LAYERS, _HEADS, _DIM, _BLOCK)
        self.memory = ChunkMemory(layers, layout, chunk_tokens)
        self.target = ChunkMemory([torch.zeros_like(x) for x in layers], layout, chunk_tokens)
        self.identity = KvIdentity(
            weights="bench", dtype="bfloat16", layers=_LAYERS, kv_heads=_HEADS, head_dim=_DIM,
            block_size=_BLOCK, chunk_tokens=chunk_tokens, layout=LAYOUT,
        )  # fmt: skip
        self.per_chunk = chunk_tokens // _BLOCK
        keys = StoreCredentials(Secret(KEYS[0]), Secret(KEYS[1])) if self.is_s3 else None
        location = store_location(self.url, "bucket/kv", credentials=keys)
        self.objects = open_store(location)
        self.store = ChunkStore(self.objects, location, self.identity)
        if isinstance(self.objects, S3Store):
            self.plain_store = self.objects._store()
        else:
            url = f"{self.url}/bucket/kv"
            self.plain_store = HTTPStore(url, client_options={"allow_http": True})
        self.plain = layers[0].view(torch.uint8).view(-1).numpy().tobytes() * _LAYERS

    def chunks(self, number: int) -> list[Chunk]:
        """The chunks of a prompt that no round used before."""
        tokens = self.size // _TOKEN_BYTES
        return chunks_of(
            chunk_keys(self.identity, Prompt([number + 10_000 * (self.size // MIB)] * tokens)),
            self.identity.chunk_tokens,
        )

    def blocks(self, index: int) -> range:
        return range(index * self.per_chunk, (index + 1) * self.per_chunk)

    async def write(self, chunks: list[Chunk]) -> None:
        """From the cache's blocks to visible manifests, four chunks at once."""
        slots = asyncio.Semaphore(4)

        async def one(index: int, chunk: Chunk) -> None:
            async with slots:
                groups = await asyncio.to_thread(self.memory.read, self.blocks(index))
                assert await self.store.put(chunk, groups)

        await asyncio.gather(*(one(i, chunk) for i, chunk in enumerate(chunks)))

    async def read(self, chunks: list[Chunk]) -> None:
        """From the look-up to verified blocks."""
        outcome = await self.store.fetch(chunks, self.target.groups, self._deliver)
        assert outcome.chunks == len(chunks), outcome

    async def read_rear(self, chunks: list[Chunk]) -> None:
        """As `read`, but from the last chunk to the first, as beside computing."""
        manifests, _ = await self.store.find(chunks)
        load = self.store.load_rear(
            *(manifests, self.target.groups, self._deliver, _ClaimsAll(), Progress())
        )
        assert (await load).reason is None

    async def _deliver(self, index: int, group: str, tensors: list[memoryview]) -> None:
        await asyncio.to_thread(self.target.write, group, tensors, self.blocks(index), 0)

    async def plain_write(self, number: int) -> None:
        await obstore.put_async(
            self.plain_store,
            f"plain-{number}",
            self.plain,
            use_multipart=None if self.is_s3 else False,
        )

    async def plain_read(self, number: int) -> None:
        answer = await obstore.get_async(self.plain_store, f"plain-{number}")
        assert len(await answer.bytes_async()) == len(self.plain)


class _ClaimsAll:
    """A tandem_kvstore.chain.RearWatch: nothing is computed meanwhile."""

    def on_chain(self, chunks: int) -> None: ...

    def claim(self, index: int, pending: int) -> bool:
        return True

    def on_lost(self, chunks: Sequence[Chunk], reason: Reason | None) -> None: ...


def missing_programs() -> list[str]:
    """What `benchmarks` prints before it measures anything."""
    return programs.missing([lambda: tools.path("versitygw")])


async def timed(work: Awaitable[Any]) -> float:
    """Seconds that `work` took."""
    begin = time.perf_counter()
    await work
    return time.perf_counter() - begin


async def speeds(url: str, mib: int, rounds: int, *, is_s3: bool) -> list[Figure]:
    """Speed of writing and reading, as shares of obstore's alone."""
    bench = Bench(url, mib * MIB, is_s3=is_s3)
    name = "storage" if is_s3 else "tandem store"
    ratios: dict[str, list[float]] = {"write": [], "read": []}
    rates: dict[str, list[float]] = {"write": [], "read": []}
    # Two rounds to connect and to fill caches.
    for number in range(-2, rounds):
        chunks = bench.chunks(number + 2)
        plain_write = await timed(bench.plain_write(number))
        write = await timed(bench.write(chunks))
        reads = {}
        for is_plain in (True, False) if number % 2 else (False, True):
            work = bench.plain_read(number) if is_plain else bench.read(chunks)
            reads[is_plain] = await timed(work)
        plain_read, read = reads[True], reads[False]
        if number >= 0:
            ratios["write"].append(plain_write / write)
            ratios["read"].append(plain_read / read)
            rates["write"].append(mib / write)
            rates["read"].append(mib / read)
    await bench.store.close()
    return [
        at_least(
            f"{name} {way} {mib} MiB ({statistics.median(rates[way]):.0f} MiB/s) vs obstore",
            ratios[way], "x", 0.7,
        )
        for way in ("write", "read")
    ]  # fmt: skip


class _Anything:
    """Equal to every checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


async def checksum_cost(url: str, mib: int, rounds: int) -> Figure:
    """What verification adds to a load's time; with and without alternate, as does the first."""
    bench = Bench(url, mib * MIB)
    chunks = bench.chunks(900)
    await bench.write(chunks)
    skip: Callable[[object], object] = lambda parts: _Anything()  # noqa: E731
    shares = []
    # Two rounds to connect and to fill caches.
    for number in range(-2, rounds):
        times: dict[bool, float] = {}
        for is_verified in (True, False) if number % 2 else (False, True):
            # Only here: no setting of an engine switches the verification off.
            check = content_hash if is_verified else skip
            with mock.patch.object(checksums, "content_hash", check):
                times[is_verified] = await timed(bench.read(chunks))
        if number >= 0:
            shares.append(100 * (times[True] / times[False] - 1))
    return at_most(f"storage checksum, share of a {mib} MiB load", shares, "%", 10)


async def memory_of_loads(url: str, chunk_tokens: int, *, is_rear: bool) -> None:
    """For a process of its own: print by how many MiB 64 loads at once raise the peak memory."""
    bench = Bench(url, 64 * MIB, chunk_tokens)
    chunks, read = bench.chunks(1000), bench.read_rear if is_rear else bench.read
    await read(chunks)
    gc.collect()
    # Resets the peak to what is resident now, which preparing the benchmark had exceeded.
    _reset_peak()
    before = _peak_kib()
    await asyncio.gather(*(read(chunks) for _ in range(64)))
    print((_peak_kib() - before) / 1024)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])


async def measure() -> list[Figure]:
    """All figures."""
    figures = []
    for mib, rounds in _SIZES.items():
        progress(f"storage: {mib} MiB")
        # A server of its own, whose objects are in memory until it ends.
        async with s3_server() as url:
            figures += await speeds(url, mib, rounds, is_s3=True)
            figures.append(await checksum_cost(url, mib, 4 * rounds))
    async with s3_server() as url:
        progress("storage: memory of 64 loads")
        for chunk_tokens in _MEMORY_CHUNKS:
            figures += await memory(url, chunk_tokens)
    for mib, rounds in _SIZES.items():
        progress(f"storage: {mib} MiB, tandem store")
        async with http_server() as url:
            figures += await speeds(url, mib, rounds, is_s3=False)
    return figures


async def memory(url: str, chunk_tokens: int) -> list[Figure]:
    """Memory of 64 loads at once, each of 64 MiB, of a whole prefix and of rears."""
    bench = Bench(url, 64 * MIB, chunk_tokens)
    await bench.write(bench.chunks(1000))
    mib = chunk_tokens * _TOKEN_BYTES / MIB
    figures = []
    for flags, label in (((), "prefixes"), (("--rear",), "rears")):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.storage", "--loads-of", url),
            *("--chunk-tokens", str(chunk_tokens), *flags),
            stdout=subprocess.PIPE,
        )
        output, _ = await process.communicate()
        name = f"storage memory of 64 loads of {label} at once, groups of {mib:g} MiB"
        figures.append(at_most(name, float(output), "MiB", 64 * mib + 256))
    return figures


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--loads-of", "url", hidden=True)
@click.option("--chunk-tokens", type=int, default=1024, hidden=True)
@click.option("--rear", is_flag=True, hidden=True)
def main(file: Path | None, url: str | None, chunk_tokens: int, *, rear: bool) -> None:
    """Measure external storage against obstore alone."""
    if url is not None:
        asyncio.run(memory_of_loads(url, chunk_tokens, is_rear=rear))
        return
    report(asyncio.run(measure()), file)


if __name__ == "__main__":
    main()
