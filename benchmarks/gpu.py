"""The torch engine on one GPU: steps, copies to and from the device, hand-offs and stored KV.

The model has the shape of Llama 3.1 8B, random weights and 128 KiB of KV for each token; nothing is
downloaded. `--device cpu --shape small` tries the script where there is no GPU. Each figure
is also added to a file beside `--json`, with the suffix .jsonl, as soon as it is measured.
"""

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
import torch
from tests.engine.engines import Tally, transfer

from tandem_contract.transfer_params import transfer_params_from_object
from tandem_engine.config import KvRole
from tandem_engine.engine import Engine
from tandem_engine.tiers.chunk_memory import ChunkMemory
from tandem_engine.tiers.settings import KvStorageConfig
from tandem_engine.types import RemoteDecode
from tandem_kvstore.format.tensors import content_hash

from .figures import Figure, progress, report, without_target
from .gpu_model import SHAPES, Models, ask, forget, large_directory, store_server, tokens_of
from .gpu_transfer import caches, layout, socket_rate, transfer_rates
from .storage_ttft import _LoadsFirst

_ROUNDS: Final = {512: 7, 2048: 5, 8192: 3, 32_000: 2}
"""Tokens → rounds."""
_CHUNK: Final = 256
_ANSWER: Final = 32


class Bench:
    """One run: the model, and the figures so far."""

    def __init__(self, models: Models, longest: int, file: Path | None) -> None:
        self.models, self.file = models, file
        self.rounds = {tokens: count for tokens, count in _ROUNDS.items() if tokens <= longest}
        self.figures: list[Figure] = []

    def add(self, name: str, measured: float | Sequence[float], unit: str) -> None:
        """Keep a figure and write it out: a later part may fail."""
        figure = without_target(name, measured, unit)
        self.figures.append(figure)
        progress(f"{name}: {figure.value:.4g} {unit} ({figure.low} to {figure.high})")
        if self.file is not None:
            with self.file.with_suffix(".jsonl").open("a") as stream:
                stream.write(json.dumps(asdict(figure)) + "\n")

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.models.device == "cuda":
            torch.cuda.synchronize()


async def steps(bench: Bench) -> None:
    """Time to the first token of computed prompts, and between tokens."""
    async with bench.models.engine() as engine:
        for length, count in bench.rounds.items():
            await ask(engine, tokens_of(length, "warm"))
            times = []
            for turn in range(count):
                times.append((await ask(engine, tokens_of(length, turn)))[0])
                await forget(engine)
            bench.add(f"prefill of {length} tokens", [1e3 * s for s in times], "ms")
        for batch in (1, 16):
            count = 64
            prompts = [tokens_of(512, ("decode", batch, i)) for i in range(batch)]
            await asyncio.gather(*(ask(engine, p) for p in prompts))
            seconds = []
            for _ in range(3):
                begin = time.perf_counter()
                await asyncio.gather(*(ask(engine, p, count) for p in prompts))
                seconds.append((time.perf_counter() - begin) / count)
            bench.add(f"step of {batch} decodes after 512 tokens", [1e3 * s for s in seconds], "ms")


async def copies(bench: Bench) -> None:
    """Rates of one thread's copies of chunks, and of what they are made of."""
    device, shape = bench.models.device, bench.models.shape
    kv = layout(shape.layers, shape.kv_heads, shape.hidden // shape.heads)
    chunk = _CHUNK // kv.block_size
    memory = ChunkMemory(caches(kv, 4 * chunk, device), kv, _CHUNK)
    # Scattered blocks, as in a cache that was used for a while.
    blocks = random.Random(1).sample(range(4 * chunk), chunk)

    def rate(name: str, work: Callable[[], object], size: int) -> None:
        rates = []
        for turn in range(9):
            bench.synchronize()
            begin = time.perf_counter()
            work()
            bench.synchronize()
            if turn > 1:
                rates.append(size / 1e9 / (time.perf_counter() - begin))
        bench.add(name, rates, "GB/s")

    plain = torch.ones(memory.chunk_bytes, dtype=torch.uint8)
    there, back = plain.to(device), torch.empty_like(plain)
    rate("host memory to device, pageable", lambda: there.copy_(plain), memory.chunk_bytes)
    rate("device to host memory, pageable", lambda: back.copy_(there), memory.chunk_bytes)
    if device == "cuda":
        locked = plain.pin_memory()
        rate("host memory to device, page-locked", lambda: there.copy_(locked), memory.chunk_bytes)
        rate("device to host memory, page-locked", lambda: locked.copy_(there), memory.chunk_bytes)
    rate("host memory to new host memory", plain.clone, memory.chunk_bytes)
    rate("checksum", lambda: content_hash([plain.numpy().data]), memory.chunk_bytes)
    rate("a chunk out of the cache", lambda: memory.read(blocks), memory.chunk_bytes)
    # The chunks of a prompt are kept: their memory is new each time.
    kept: list[object] = []
    rate("chunks out, kept", lambda: kept.append(memory.read(blocks)), memory.chunk_bytes)
    groups = memory.read(blocks)

    def write() -> None:
        for group in groups:
            memory.write(group.name, [memoryview(part) for part in group.parts], blocks, 0)

    rate("a chunk into the cache", write, memory.chunk_bytes)


async def transfers(bench: Bench) -> None:
    """Rates of hand-offs between two processes, by how many run at once."""
    shape = bench.models.shape
    kv = layout(shape.layers, shape.kv_heads, shape.hidden // shape.heads)
    size = 1 << 28 if bench.models.device == "cuda" else 1 << 24
    rates = await asyncio.to_thread(socket_rate, size, 5)
    bench.add("bare copy over loopback, one stream", [rate / 1e9 for rate in rates], "GB/s")
    tokens = size // shape.token_bytes
    by_streams = await transfer_rates(kv, tokens, (1, 2, 4), bench.models.device, 5)
    for streams, rates in by_streams.items():
        name = f"hand-offs of {tokens} tokens, {streams} at once"
        bench.add(name, [rate / 1e9 for rate in rates], "GB/s")


def same(answer: list[int], other: list[int]) -> int:
    """Leading tokens that two answers share."""
    pairs = enumerate(zip(answer, other, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(answer))


async def handoffs(bench: Bench) -> None:
    """Two engines: a prompt's time on P and on D, and D's answers beside P's own."""
    roles = (KvRole.PRODUCER, KvRole.CONSUMER)
    p_role, d_role = (transfer(role, role.name, lease=120) for role in roles)
    async with (
        bench.models.engine(kv_transfer=p_role) as p,
        bench.models.engine(kv_transfer=d_role) as d,
    ):
        for length, count in bench.rounds.items():
            computed, pulled = [], []
            for turn in range(-1, count):
                tokens = tokens_of(length, turn)
                seconds, _, raw = await ask(p, tokens, 1, RemoteDecode())
                taken, _, _ = await ask(d, tokens, 1, transfer_params_from_object(raw))
                await forget(p)
                await forget(d)
                if turn >= 0:
                    computed.append(1e3 * seconds)
                    pulled.append(1e3 * taken)
            bench.add(f"hand-off of {length} tokens: prefill leg", computed, "ms")
            bench.add(f"hand-off of {length} tokens: first token of the decode leg", pulled, "ms")
        await _compare_handoff(bench, p, d)


async def _compare_handoff(bench: Bench, p: Engine, d: Engine) -> None:
    tokens = tokens_of(2049, "equal")
    _, alone, _ = await ask(p, tokens, _ANSWER)
    # Computes the last token only, as every engine does that got the KV.
    _, cached, _ = await ask(p, tokens, _ANSWER)
    _, _, raw = await ask(p, tokens, 1, RemoteDecode())
    _, handed, _ = await ask(d, tokens, _ANSWER, transfer_params_from_object(raw))
    name = f"equal tokens of {_ANSWER}"
    bench.add(f"{name}: cached prefix, and computed whole", same(cached, alone), "tokens")
    bench.add(f"{name}: after a hand-off, and cached prefix", same(handed, cached), "tokens")


async def host_memory(bench: Bench) -> None:
    """Time to the first token with KV in host memory."""
    storage = KvStorageConfig(host_bytes=16 << 30, chunk_tokens=_CHUNK, pending_bytes=16 << 30)
    tally = Tally()
    async with bench.models.engine(tally, kv_storage=storage) as engine:
        for length, count in bench.rounds.items():
            tokens = tokens_of(length, "host")
            await ask(engine, tokens)
            await forget(engine)
            times = []
            for _ in range(count):
                times.append(1e3 * (await ask(engine, tokens))[0])
                await forget(engine)
            bench.add(f"{length} tokens in host memory: first token", times, "ms")
        tokens = tokens_of(2049, "equal")
        await ask(engine, tokens)
        _, cached, _ = await ask(engine, tokens, _ANSWER)
        await forget(engine)
        _, loaded, _ = await ask(engine, tokens, _ANSWER)
        name = f"equal tokens of {_ANSWER}: from host memory, and cached prefix"
        bench.add(name, same(loaded, cached), "tokens")


async def stored(bench: Bench) -> None:
    """Time to the first token with KV in `tandem store`, all loaded and as the engine decides."""
    async with store_server() as url:
        await _stored(bench, url, "in tandem store")


async def shared_files(bench: Bench) -> None:
    """The same with KV in a directory."""
    with large_directory() as directory:
        await _stored(bench, f"file://{directory}", "in a directory")


async def _stored(bench: Bench, url: str, where: str) -> None:
    storage = KvStorageConfig(endpoint=url, chunk_tokens=_CHUNK, pending_bytes=16 << 30)
    tally = Tally()
    async with (
        bench.models.engine() as plain,
        bench.models.engine(guard=_LoadsFirst, kv_storage=storage) as loading,
        bench.models.engine(tally, kv_storage=storage) as deciding,
    ):
        await _write(bench, loading, where)
        for length in (300, 1200, 2400):
            await ask(deciding, tokens_of(length, "teach"))
            await forget(deciding)
        for length in bench.rounds:
            name = f"{length} tokens {where}"
            await _compare(bench, name, length, (plain, loading, deciding), tally)
        tokens = tokens_of(2049, "equal")
        await ask(loading, tokens)
        _, cached, _ = await ask(loading, tokens, _ANSWER)
        await forget(loading)
        _, loaded, _ = await ask(loading, tokens, _ANSWER)
        name = f"equal tokens of {_ANSWER}: {where}, and cached prefix"
        bench.add(name, same(loaded, cached), "tokens")


async def _write(bench: Bench, engine: Engine, where: str) -> None:
    for length in bench.rounds:
        begin = time.perf_counter()
        await ask(engine, tokens_of(length, "stored"))
        await forget(engine)
        copied = time.perf_counter() - begin
        # The queue of writes; the engine has no event for its end.
        while engine._tiers._writers or engine._tiers._queue:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        size = length // _CHUNK * _CHUNK * bench.models.shape.token_bytes
        rate = size / 1e6 / (time.perf_counter() - begin)
        bench.add(f"{length} tokens computed, until copied", 1e3 * copied, "ms")
        bench.add(f"{length} tokens computed and stored {where}", rate, "MB/s")


async def _compare(
    bench: Bench,
    name: str,
    length: int,
    engines: tuple[Engine, Engine, Engine],
    tally: Tally,
) -> None:
    """The same prompt on the three engines, in turns."""
    tokens, times = tokens_of(length, "stored"), ([], [], [])
    before, loads = 0, []
    for turn in range(-1, bench.rounds[length]):
        for place in sorted(range(3), key=lambda i: (i + turn) % 3):
            before = tally.counts["storage_loaded"]
            seconds, _, _ = await ask(engines[place], tokens)
            await forget(engines[place])
            if turn >= 0:
                times[place].append(1e3 * seconds)
                if place == 2:
                    loads.append(tally.counts["storage_loaded"] - before)
    for way, values in zip(("computed", "all loaded", "as decided"), times, strict=True):
        bench.add(f"{name}, {way}: first token", values, "ms")
    bench.add(f"{name}: loaded as decided", loads, "tokens")
    best = min(statistics.median(times[0]), statistics.median(times[1]))
    bench.add(
        f"{name}: as decided over the better of computed and loaded",
        statistics.median(times[2]) / best,
        "x",
    )


PARTS: Final = {
    "copies": copies,
    "transfers": transfers,
    "steps": steps,
    "handoffs": handoffs,
    "host": host_memory,
    "stored": stored,
    "directory": shared_files,
}


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="8b", show_default=True)
@click.option("--longest", default=max(_ROUNDS), show_default=True, help="prompt, in tokens")
@click.option(
    "--part", "parts", type=click.Choice(list(PARTS)), multiple=True, default=list(PARTS),
    help="what to measure; repeatable  [default: all]",
)  # fmt: skip
def main(file: Path | None, device: str, shape: str, longest: int, parts: Sequence[str]) -> None:
    """Measure the torch engine on a GPU."""
    torch.set_num_threads(min(8, os.cpu_count() or 1))
    with Models(SHAPES[shape], device) as models:
        bench = Bench(models, longest, file)
        for part in parts:
            progress(f"gpu: {part}")
            begin = time.perf_counter()
            asyncio.run(PARTS[part](bench))
            progress(f"gpu: {part} took {time.perf_counter() - begin:.1f} s")
    report(bench.figures, file)


if __name__ == "__main__":
    main()
