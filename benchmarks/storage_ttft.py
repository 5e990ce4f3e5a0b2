"""Time to first token with KV in storage, beside loading and beside computing, on the torch engine.

Three engines get the same requests one by one, in turns: one without storage, one that always
loads and one whose cost model decides. Each forgets its prefix cache after each request, so that
the KV of every prompt is in an S3 store (versitygw) only. Then the store is stopped: with the
circuit breaker open, prompts must take as long as without storage.

Computing is paced: a step sleeps as long as a GPU of a given speed would compute, because two cores
that also run the store and the clients would hide what storage costs. Loads are real. `--speed 0`
computes for real, on a small model.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from unittest import mock

import click
import torch
from tests.cluster import tools
from tests.engine.engines import GREEDY, Tally, finish

from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine
from tandem_engine.runner import Runner
from tandem_engine.step import Chunk, SampledToken
from tandem_engine.tiers import chunk_memory
from tandem_engine.tiers.settings import KvStorageConfig
from tandem_engine.tiny import make_tiny_model
from tandem_engine.types import Request
from tandem_kvstore import client
from tandem_kvstore.guard.load_guard import Decision, Hit, LoadGuard, Way

from . import programs
from .figures import Figure, at_least, at_most, progress, report, without_target
from .storage import KEYS, s3_server

LENGTHS: Final = {512: 20, 2048: 16, 8192: 8, 32_000: 4}
"""Tokens → rounds."""
SPEEDS: Final = (10_000, 40_000)
"""Tokens that a paced step computes in a second, without attention to earlier tokens."""
_SECONDS_PER_PAIR: Final = 1e-9
"""Paced seconds for a token's attention to another one."""
_OVERLAP_SPEED: Final = 2_000
_LONGEST_WARM_UP: Final = 8192
_DOWN: Final = 400
_CHUNK: Final = 256
_TOKEN_BYTES: Final = 4 * 2 * 8 * 128 * 2
"""KV of a token: layers, keys and values, heads, their width, bytes of bfloat16."""


def missing_programs() -> list[str]:
    """What `benchmarks` prints before it measures anything."""
    return programs.missing([lambda: tools.path("versitygw")])


class _LoadsFirst(LoadGuard):
    def decide(self, hit: Hit, now: float) -> Decision:
        return Decision(hit.chunks, 60.0)


class _LoadsLayers(LoadGuard):
    def decide(self, hit: Hit, now: float) -> Decision:
        return Decision(hit.chunks, 60.0, way=Way.LAYERS)


@contextmanager
def paced(speed: int) -> Iterator[None]:
    """Have the engines' steps sleep instead of computing; 0: they compute."""

    def run(
        _: Runner, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None
    ) -> list[SampledToken | None]:
        seconds = 0.0
        for chunk in chunks:
            tokens = len(chunk.token_ids)
            seconds += tokens / speed + tokens * (chunk.start + tokens / 2) * _SECONDS_PER_PAIR
        for layer in range(4):
            if on_layer is not None:
                on_layer(layer + 1)
            time.sleep(seconds / 4)
        return [SampledToken(5) if chunk.draw is not None else None for chunk in chunks]

    if speed:
        with mock.patch.object(Runner, "run", run):
            yield
    else:
        yield


class Bench:
    """Engines on one model, with and without storage."""

    def __init__(self, directory: Path, url: str, name: str, step_tokens: int = 2048) -> None:
        """`step_tokens`: most tokens in a step."""
        self._step_tokens = step_tokens
        self.model = directory / f"model-{name}"
        make_tiny_model(self.model, layers=4, hidden=1024, heads=8, kv_heads=8, max_position=33_000)
        keys = directory / f"keys-{name}"
        keys.mkdir()
        for file, key in zip(("access_key", "secret_key"), KEYS, strict=True):
            (keys / file).write_text(key)
        self.storage = KvStorageConfig(
            endpoint=url,
            kv_namespace=f"bucket/{name}",
            credentials_dir=str(keys),
            chunk_tokens=_CHUNK,
            pending_bytes=1 << 30,
        )

    @asynccontextmanager
    async def engine(
        self, *, stores: bool, tally: Tally | None = None, guard: type[LoadGuard] = LoadGuard
    ) -> AsyncIterator[Engine]:
        """A started engine that has computed prompts before."""
        config = EngineConfig(
            model=self.model, dtype="bfloat16", device="cpu", num_blocks=2200,
            kv_storage=self.storage if stores else None, max_num_batched_tokens=self._step_tokens,
        )  # fmt: skip
        engine = Engine(config, tally or Tally())
        with mock.patch.object(client, "LoadGuard", guard):
            await engine.start()
        # A GPU's memory is there from the start. The kernel gives host memory when it is first
        # written, which takes longer than the loads that are measured.
        for layer in engine._steps._runner.cache.layers:
            layer.zero_()
        try:
            # Teaches the cost model how fast this machine computes.
            for length in (300, 1200, 2400):
                await ttft(engine, length)
            yield engine
        finally:
            await engine.stop()


_ids = iter(range(10**9))


async def ttft(engine: Engine, length: int, seed: int | None = None) -> float:
    """Seconds to the first token of a prompt; a new one without a seed. The device forgets it."""
    source = random.Random(f"{length} {seed}" if seed is not None else next(_ids))
    tokens = tuple(source.randrange(4, 512) for _ in range(length))
    begin = time.perf_counter()
    await finish(engine.submit(Request(str(next(_ids)), tokens, GREEDY(max_tokens=1))))
    seconds = time.perf_counter() - begin
    # Blocks are in use until their chunks are copied.
    while not engine.reset_prefix_cache():  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0.005)
    return seconds


@dataclass
class Hits:
    """Requests whose prompt is stored, and is loaded faster than it is computed."""

    profitable: int = 0
    used: int = 0
    """Those that used the store."""


@dataclass
class Rounds:
    """TTFT of one length, in the order of the rounds."""

    computed: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    decided: list[float] = field(default_factory=list)

    def ratios(self) -> list[float]:
        """Of each round: the time with the cost model, over the better one of the others."""
        best = min(statistics.median(self.computed), statistics.median(self.loaded))
        is_load = best == statistics.median(self.loaded)
        pairs = zip(self.decided, self.loaded if is_load else self.computed, strict=True)
        return [decided / other for decided, other in pairs]


async def rounds_of(
    engines: tuple[Engine, Engine, Engine], length: int, count: int, tally: Tally, hits: Hits
) -> Rounds:
    """Measure one length; the engines: without storage, always loading, deciding."""
    rounds, used = Rounds(), 0
    for number in range(-1, count):
        times = [0.0, 0.0, 0.0]
        for place in sorted(range(3), key=lambda i: (i + number) % 3):
            before = tally.counts["storage_loaded"]
            times[place] = await ttft(engines[place], length, seed=0)
            if place == 2 and number >= 0:
                used += tally.counts["storage_loaded"] > before
        # The first round teaches and connects.
        if number >= 0:
            rounds.computed.append(times[0])
            rounds.loaded.append(times[1])
            rounds.decided.append(times[2])
    if statistics.median(rounds.loaded) < statistics.median(rounds.computed):
        hits.profitable += count
        hits.used += used
    return rounds


async def healthy(bench: Bench, label: str, longest: int) -> list[Figure]:
    """TTFT from a healthy store at each length, the hits that were loaded, and the crossover."""
    figures, tally, hits = [], Tally(), Hits()
    lengths = {length: count for length, count in LENGTHS.items() if length <= longest}
    async with bench.engine(stores=True) as writer:
        for length in lengths:
            await ttft(writer, length, seed=0)
    async with (
        bench.engine(stores=False) as plain,
        bench.engine(stores=True, guard=_LoadsFirst) as loading,
        bench.engine(stores=True, tally=tally) as deciding,
    ):
        # The cost model learns: a new engine's first loads tell little of the store.
        for length in (*lengths, *lengths):
            await ttft(deciding, min(length, _LONGEST_WARM_UP), seed=0)
        for length, count in lengths.items():
            progress(f"storage_ttft: {label}, {length} tokens")
            engines = (plain, loading, deciding)
            rounds = await rounds_of(engines, length, count, tally, hits)
            medians = [
                f"{1000 * statistics.median(x):.0f}"
                for x in (rounds.decided, rounds.loaded, rounds.computed)
            ]
            shown = f"{' / '.join(medians)} ms with storage / all loaded / computed"
            name = f"{label}: TTFT of {length} tokens ({shown})"
            figures.append(at_most(name, rounds.ratios(), "x", 1.15))
        figures.append(crossover(deciding, label))
    if hits.profitable:
        name = f"{label}: hits that used the store, of {hits.profitable} whose loading is faster"
        figures.append(at_least(name, hits.used / hits.profitable, "", 0.95))
    return figures


def crossover(engine: Engine, label: str) -> Figure:
    """The length from which loading pays, as the cost model of an engine has learned it."""
    guard = engine._tiers._client.guard  # type: ignore[attr-defined]
    # No load is due only because none was measured for long.
    now = guard._last_load
    for chunks in range(1, 128):
        hit = Hit(chunks, _CHUNK, _CHUNK * _TOKEN_BYTES, 0, can_do_both=True)
        if guard.decide(hit, now).chunks:
            return without_target(f"{label}: learned crossover", chunks * _CHUNK, "tokens")
    return without_target(f"{label}: learned crossover", float("inf"), "tokens")


async def down(bench: Bench, label: str) -> Figure:
    """p99 TTFT with a store that is down, against none; requests alternate, as does the first."""
    async with bench.engine(stores=True) as broken, bench.engine(stores=False) as plain:
        for _ in range(4):
            await ttft(broken, 1024)
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(_DOWN):
            for is_broken in (True, False) if number % 2 else (False, True):
                times[is_broken].append(await ttft(broken if is_broken else plain, 1024))
    p99 = {key: statistics.quantiles(values, n=100)[-1] for key, values in times.items()}
    name = f"{label}: p99 TTFT of 1,024 tokens with the store down vs without storage"
    return at_most(name, p99[True] / p99[False], "x", 1.05)


async def overlap(url: str, directory: Path) -> Figure:
    """TTFT when computing overlaps a load, over that when it follows; requests alternate.

    The prompt has 8,192 stored tokens and 255 new ones, too few for a chunk that would be stored.
    """
    length = 8192 + 255
    with mock.patch.object(chunk_memory, "_GROUP_BYTES", 1 << 20), paced(_OVERLAP_SPEED):
        bench = Bench(directory, url, "overlap")
        async with bench.engine(stores=True) as writer:
            await ttft(writer, length, seed=0)
        async with (
            bench.engine(stores=True, guard=_LoadsLayers) as overlapping,
            bench.engine(stores=True, guard=_LoadsFirst) as loading,
        ):
            ratios = []
            for number in range(-2, 12):
                times = {}
                for place in (0, 1) if number % 2 else (1, 0):
                    times[place] = await ttft((overlapping, loading)[place], length, seed=0)
                if number >= 0:
                    ratios.append(times[0] / times[1])
    name = "TTFT when computing overlaps loading, over loading first (4 layer groups, "
    return at_most(f"{name}computing paced at {_OVERLAP_SPEED:,} tokens/s)", ratios, "x", 1.0)


async def measure(longest: int, speeds: Sequence[int] = SPEEDS) -> list[Figure]:
    """All figures."""
    torch.set_num_threads(1)
    figures = []
    progress("storage_ttft: overlap")
    with tempfile.TemporaryDirectory() as directory:
        async with s3_server() as url:
            figures.append(await overlap(url, Path(directory)))
    for speed in speeds:
        label = f"computing paced at {speed:,} tokens/s" if speed else "computing for real"
        with tempfile.TemporaryDirectory() as directory, paced(speed):
            async with s3_server() as url:
                bench = Bench(Path(directory), url, f"speed-{speed}")
                figures += await healthy(bench, label, longest)
            progress(f"storage_ttft: {label}, store down")
            # The server has ended: the same endpoint refuses connections now.
            figures.append(await down(bench, label))
    return figures


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option(
    "--longest", default=max(LENGTHS), show_default=True, help="longest prompt, in tokens"
)
@click.option(
    "--speed", "speeds", type=int, multiple=True, default=SPEEDS, show_default=True,
    help="tokens that paced computing computes in a second; 0: compute for real",
)  # fmt: skip
def main(file: Path | None, longest: int, speeds: tuple[int, ...]) -> None:
    """Measure TTFT from storage and with the storage down."""
    report(asyncio.run(measure(longest, speeds)), file)


if __name__ == "__main__":
    main()
