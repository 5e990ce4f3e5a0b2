"""Time to first token with KV in storage, beside computing, on the torch engine.

At each length, rounds alternate between an engine without storage and one that starts anew and
finds the prompt in an S3 store (versitygw). Then the store is stopped: with the circuit breaker
open, prompts must take as long as without storage.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import click
import torch
from tests.cluster import tools
from tests.engine.engines import GREEDY, Tally, finish

from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine
from tandem_engine.tiers.settings import KvStorageConfig
from tandem_engine.tiny import make_tiny_model
from tandem_engine.types import Request

from . import programs
from .figures import Figure, at_least, at_most, progress, report, without_target
from .storage import KEYS, s3_server

LENGTHS: Final = {512: 5, 2048: 5, 8192: 3, 32_000: 1}
"""Tokens → rounds."""
_DOWN: Final = 100
_CHUNK: Final = 256


def missing_programs() -> list[str]:
    """What `benchmarks` prints before it measures anything."""
    return programs.missing([lambda: tools.path("versitygw")])


class Bench:
    """Engines on one model, with and without storage."""

    def __init__(self, directory: Path, url: str) -> None:
        self.model = directory / "model"
        make_tiny_model(self.model, layers=4, hidden=256, heads=8, kv_heads=4, max_position=33_000)
        keys = directory / "keys"
        keys.mkdir()
        for name, key in zip(("access_key", "secret_key"), KEYS, strict=True):
            (keys / name).write_text(key)
        self.storage = KvStorageConfig(
            endpoint=url, kv_namespace="bucket/ttft", credentials_dir=str(keys), chunk_tokens=_CHUNK
        )

    @asynccontextmanager
    async def engine(self, *, stores: bool, tally: Tally | None = None) -> AsyncIterator[Engine]:
        """A started engine that has computed a prompt before."""
        config = EngineConfig(
            model=self.model, dtype="float32", device="cpu", num_blocks=2200,
            kv_storage=self.storage if stores else None,
        )  # fmt: skip
        engine = Engine(config, tally or Tally())
        await engine.start()
        try:
            # Teaches the cost model how fast this machine computes.
            for length in (300, 1200, 2400):
                await ttft(engine, length)
            yield engine
        finally:
            await engine.stop()


_ids = iter(range(10**9))


async def ttft(engine: Engine, length: int, seed: int | None = None) -> float:
    """Seconds to the first token of a prompt; a new one without a seed."""
    source = random.Random(f"{length} {seed}" if seed is not None else next(_ids))
    tokens = tuple(source.randrange(4, 512) for _ in range(length))
    begin = time.perf_counter()
    await finish(engine.submit(Request(str(next(_ids)), tokens, GREEDY(max_tokens=1))))
    return time.perf_counter() - begin


async def healthy(bench: Bench, longest: int) -> list[Figure]:
    """TTFT from storage and computed, at each length."""
    figures = []
    offered = loaded = 0
    for length, rounds in LENGTHS.items():
        if length > longest:
            continue
        progress(f"storage_ttft: {length} tokens")
        computed, stored = [], []
        async with bench.engine(stores=True) as writer:
            await ttft(writer, length, seed=0)
        async with bench.engine(stores=False) as plain:
            for number in range(rounds):
                computed.append(await ttft(plain, length, seed=number + 1))
                tally = Tally()
                async with bench.engine(stores=True, tally=tally) as engine:
                    before = tally.counts["storage_loaded"]
                    stored.append(await ttft(engine, length, seed=0))
                    offered += length // _CHUNK * _CHUNK
                    loaded += tally.counts["storage_loaded"] - before
        shown = f"{statistics.median(stored):.3f} s, computed {statistics.median(computed):.3f} s"
        ratio = statistics.median(stored) / statistics.median(computed)
        figures.append(at_most(f"TTFT {length} tokens from storage ({shown})", ratio, "x", 1.15))
    figures.append(at_least("tokens loaded of those in storage", loaded / offered, "", 0.95))
    return figures


async def crossover(bench: Bench) -> Figure:
    """The length from which loading pays, as the cost model of one engine has learned it."""
    async with bench.engine(stores=True) as engine:
        for _ in range(4):
            await ttft(engine, 2048, seed=0)
            engine.reset_prefix_cache()
        client = engine._tiers._client  # type: ignore[attr-defined]
        per_token = 4 * 2 * 4 * 32 * 4
        for chunks in range(1, 128):
            decision = client.guard.decide(chunks, _CHUNK, _CHUNK * per_token, 0, 0.0)
            if decision.chunks:
                return without_target("learned crossover", chunks * _CHUNK, "tokens")
    return without_target("learned crossover", float("inf"), "tokens")


async def down(bench: Bench) -> Figure:
    """p99 TTFT with a store that is down, against none; requests alternate."""
    async with bench.engine(stores=True) as broken, bench.engine(stores=False) as plain:
        for _ in range(4):
            await ttft(broken, 1024)
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(_DOWN):
            times[True].append(await ttft(broken, 1024))
            times[False].append(await ttft(plain, 1024))
    ratio = sorted(times[True])[-2] / sorted(times[False])[-2]
    return at_most("p99 TTFT with the store down vs without storage", ratio, "x", 1.05)


async def measure(longest: int) -> list[Figure]:
    """All figures."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        async with s3_server() as url:
            bench = Bench(Path(directory), url)
            figures = await healthy(bench, longest)
            progress("storage_ttft: crossover")
            figures.append(await crossover(bench))
        progress("storage_ttft: store down")
        # The server has ended: the same endpoint refuses connections now.
        figures.append(await down(bench))
    return figures


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option(
    "--longest", default=max(LENGTHS), show_default=True, help="longest prompt, in tokens"
)
def main(file: Path | None, longest: int) -> None:
    """Measure TTFT from storage and with the storage down."""
    report(asyncio.run(measure(longest)), file)


if __name__ == "__main__":
    main()
