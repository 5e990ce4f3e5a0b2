"""KV in external storage under real vLLM on the CPU: time to first token and tokens computed.

    python -m benchmarks.storage_vllm                   stored prompts of four lengths
    python -m benchmarks.storage_vllm --trace FILE      conversations of a Mooncake trace

Two engines run on one model, one with TandemStorageConnector and an S3 store (versitygw), one
without. Each prompt is sent to both, one at a time, in an order that alternates, so both see the
same machine. The model is small and random: absolute times mean nothing. Its chunks have 2 MiB.

With a trace: its conversations of three turns or more, in the trace's order but without its times,
at an eighth of its lengths, on engines whose cache holds 8,192 tokens: about five prompts.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import click
import msgspec
from tests.cluster import tools
from tests.epp.real import until
from tests.vllm.engines import MODEL_NAME, VENV, metric
from tests.vllm.single import SingleVllm, single_vllm
from tests.vllm.storage import packages, transfer_config

from tandem_contract import vllm_storage as names
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_engine.tiny import make_tiny_model
from tandem_kvstore.errors import Reason

from . import programs
from .figures import Figure, at_least, at_most, progress, report, without_target
from .storage import KEYS, s3_server

LENGTHS: Final = (512, 1024, 2048, 3500)
"""Tokens."""
ROUNDS: Final = 5
_ROLES: Final = {"stored": "kv_both", "saving": "kv_producer", "looking": "kv_consumer"}
"""Kind of an engine with storage → its `kv_role`."""
_SHORT: Final = (256, 512, 768, 1024, 1536)
"""Lengths at which the crossover is looked for."""
_COLD: Final = 60
"""New prompts, of 512 tokens."""
_TRACE_SCALE: Final = 8
_TRACE_BLOCK: Final = 512 // _TRACE_SCALE
_TURNS: Final = 3
_LONGEST: Final = 4000
_LOADED: Final = f"{names.LOADED_TOKENS}_total"
_WRITTEN: Final = f"{names.STORED_TOKENS}_total"
_NOT_WRITTEN: Final = f"{names.NOT_STORED_CHUNKS}_total"
_BY_SOURCE: Final = "vllm:prompt_tokens_by_source_total"


def missing_programs() -> list[str]:
    """What `benchmarks` prints before it measures anything."""
    return programs.missing([lambda: tools.path("versitygw")])


class MissingVllm(click.ClickException):
    """Real vLLM is not installed."""

    def __init__(self) -> None:
        super().__init__(f"{VENV} is missing: run make vllm-setup")


@dataclass
class Bench:
    """What all engines of a run share."""

    directory: Path
    url: str
    chunk_tokens: int
    http: aiohttp.ClientSession
    pause: float = 0.0
    """Seconds before each request of the trace."""

    def __post_init__(self) -> None:
        self.model = self.directory / "model"
        make_tiny_model(self.model, layers=4, hidden=512, heads=8, kv_heads=4)
        keys = self.directory / "keys"
        keys.mkdir()
        for name, key in zip(("access_key", "secret_key"), KEYS, strict=True):
            (keys / name).write_text(key)

    @asynccontextmanager
    async def engines(self, *kinds: str) -> AsyncIterator[Mapping[str, SingleVllm]]:
        """Engines that start at the same time: `stored` has the connector, `plain` has not,
        `saving` only saves and `looking` only looks up. Each kind has a namespace of its own."""
        env = {"PYTHONPATH": packages(self.directory), "VLLM_SERVER_DEV_MODE": "1"}
        async with AsyncExitStack() as stack:
            running = {}
            for kind in kinds:
                place = Path(tempfile.mkdtemp(prefix=kind, dir=self.directory))
                starting = single_vllm(self.model, place, *self._flags(kind), env=env)
                running[kind] = stack.enter_context(starting)
            for engine in running.values():
                await engine.ready()
            for length in (300, 600, 1200, 2400):
                for engine in running.values():
                    await self.ttft(engine, prompt(length))
            yield running

    def _flags(self, kind: str) -> tuple[str, ...]:
        if kind not in _ROLES:
            return ()
        config = transfer_config(
            self.url, _ROLES[kind], kv_namespace=f"bucket/{kind}",
            credentials_dir=str(self.directory / "keys"), chunk_tokens=self.chunk_tokens,
        )  # fmt: skip
        return "--kv-transfer-config", config

    async def ttft(self, engine: SingleVllm, tokens: Sequence[int]) -> float:
        """Seconds to the only token of the answer."""
        body = {"model": MODEL_NAME, "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
        url = engine.url + PATHS[RequestKind.COMPLETIONS]
        began = time.perf_counter()
        async with self.http.post(url, json=body) as response:
            await response.read()
            response.raise_for_status()
        return time.perf_counter() - began

    async def forget(self, engine: SingleVllm) -> None:
        """Empty the engine's own prefix cache."""
        async with self.http.post(f"{engine.url}/reset_prefix_cache") as response:
            response.raise_for_status()

    async def value(self, engine: SingleVllm, name: str, **labels: str) -> float:
        """A metric of the engine."""
        return metric(await engine.metrics(self.http), name, **labels)

    async def written(self, engine: SingleVllm) -> float:
        """Chunks whose write has ended, well or not."""
        page = await engine.metrics(self.http)
        return metric(page, _WRITTEN) / self.chunk_tokens + metric(page, _NOT_WRITTEN)

    async def store(self, engine: SingleVllm, tokens: Sequence[int]) -> None:
        """Compute a prompt, and wait until it is stored."""
        before = await self.written(engine)
        await self.ttft(engine, tokens)
        end = before + len(tokens) // self.chunk_tokens

        async def is_written() -> bool:
            return await self.written(engine) >= end

        await until(is_written, 60)


_numbers: Final = iter(range(10**9))


def prompt(length: int, seed: object = None) -> list[int]:
    """Random tokens; new ones without a seed."""
    source = random.Random(f"{length} {next(_numbers) if seed is None else seed}")
    return source.choices(range(4, 190), k=length)


async def lengths(bench: Bench) -> list[Figure]:
    """TTFT of stored prompts, and of new ones, over that of the engine without storage."""
    figures = []
    async with bench.engines("stored", "plain") as running:
        for length in LENGTHS:
            progress(f"storage_vllm: {length} tokens")
            figures.append(await stored_prompts(bench, running, length))
        progress("storage_vllm: crossover")
        figures.append(await crossover(bench, running["stored"]))
        progress("storage_vllm: new prompts")
        figures += await new_prompts(bench, running)
        await show_reasons(bench, running["stored"])
    progress("storage_vllm: after a restart")
    async with bench.engines("stored") as running:
        figures.append(await hits_after_restart(bench, running["stored"]))
    return figures


async def stored_prompts(bench: Bench, running: Mapping[str, SingleVllm], length: int) -> Figure:
    """Prompts that are in the store; the plain engine computes the same ones."""
    times: dict[str, list[float]] = {kind: [] for kind in running}
    for number in range(ROUNDS):
        tokens = prompt(length, number)
        await bench.store(running["stored"], tokens)
        for kind in alternated(running, number):
            await bench.forget(running[kind])
            times[kind].append(await bench.ttft(running[kind], tokens))
    ratios = [a / b for a, b in zip(times["stored"], times["plain"], strict=True)]
    shown = " vs ".join(f"{statistics.median(times[kind]):.2f} s" for kind in ("stored", "plain"))
    return at_most(f"TTFT {length} stored tokens vs computed ({shown})", ratios, "x", 1.1)


async def crossover(bench: Bench, engine: SingleVllm) -> Figure:
    """The shortest stored prompt that the engine loads, as it has learned the costs until now."""
    for length in _SHORT:
        tokens = prompt(length + 1)
        await bench.store(engine, tokens)
        await bench.forget(engine)
        before = await bench.value(engine, _LOADED)
        await bench.ttft(engine, tokens)
        if await bench.value(engine, _LOADED) > before:
            return without_target("shortest stored prompt that is loaded", length, "tokens")
    return without_target("shortest stored prompt that is loaded", float("inf"), "tokens")


async def new_prompts(bench: Bench, running: Mapping[str, SingleVllm]) -> list[Figure]:
    """Prompts that are in no store: what looking up and saving costs."""
    times: dict[str, list[float]] = {kind: [] for kind in running}
    for number in range(_COLD):
        tokens = prompt(512)
        for kind in alternated(running, number):
            times[kind].append(await bench.ttft(running[kind], tokens))
    return tails("new prompts of 512 tokens", times)


async def hits_after_restart(bench: Bench, engine: SingleVllm) -> Figure:
    """Tokens that an engine loads of those that the engine before it has stored."""
    offered, before = 0, await bench.value(engine, _LOADED)
    for length in LENGTHS[1:]:
        for number in range(ROUNDS):
            await bench.ttft(engine, prompt(length, number))
            offered += length // bench.chunk_tokens * bench.chunk_tokens
    share = (await bench.value(engine, _LOADED) - before) / offered
    return at_least("stored tokens that are loaded after a restart", share, "", 0.95)


async def trace(bench: Bench, prompts: Sequence[Sequence[int]]) -> list[Figure]:
    """Conversations on engines whose caches are too small for them."""
    times: dict[str, list[float]] = {"stored": [], "plain": []}
    async with bench.engines("stored", "plain") as running:
        before = {kind: await tokens_by_source(bench, running[kind]) for kind in running}
        for number, tokens in enumerate(prompts):
            if number % 20 == 0:
                progress(f"storage_vllm: request {number} of {len(prompts)}")
            for kind in alternated(running, number):
                await asyncio.sleep(bench.pause)
                times[kind].append(await bench.ttft(running[kind], tokens))
        after = {kind: await tokens_by_source(bench, running[kind]) for kind in running}
        await show_reasons(bench, running["stored"])
    computed = {
        kind: after[kind]["local_compute"] - before[kind]["local_compute"] for kind in after
    }
    total = sum(map(len, prompts))
    figures = [
        without_target(f"trace: tokens computed {label}, of all", computed[kind] / total, "")
        for kind, label in (("stored", "with storage"), ("plain", "without"))
    ]
    means = statistics.mean(times["stored"]) / statistics.mean(times["plain"])
    figures.append(without_target("trace: mean TTFT with storage vs without", means, "x"))
    return figures + tails(f"trace, {len(prompts)} requests", times)


async def show_reasons(bench: Bench, engine: SingleVllm) -> None:
    """Say why chunks were not loaded or not stored."""
    for name in (names.NOT_LOADED_CHUNKS, names.NOT_STORED_CHUNKS):
        counts = {r: await bench.value(engine, f"{name}_total", reason=r) for r in Reason}
        shown = ", ".join(f"{r} {count:.0f}" for r, count in counts.items() if count)
        progress(f"storage_vllm: {name}: {shown or 'none'}")


async def tokens_by_source(bench: Bench, engine: SingleVllm) -> dict[str, float]:
    """Prompt tokens, by where their KV came from."""
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    return {source: await bench.value(engine, _BY_SOURCE, source=source) for source in sources}


def conversations(lines: bytes, requests: int) -> list[list[int]]:
    """The first requests of conversations of at least three turns. Prompts of one conversation
    begin alike: those of the trace whose second block of 512 tokens is the same."""
    rows = [msgspec.json.decode(line) for line in lines.splitlines() if line.strip()]
    turns: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        blocks = row["hash_ids"]
        if len(blocks) > 2 and len(blocks) * _TRACE_BLOCK <= _LONGEST:
            turns.setdefault(blocks[1], []).append(index)
    chosen: list[int] = []
    for indices in turns.values():
        if len(indices) >= _TURNS and len(chosen) < requests:
            chosen += indices[: _TURNS * 2]
    return [
        [token for block in rows[i]["hash_ids"] for token in prompt(_TRACE_BLOCK, block)]
        for i in sorted(chosen)[:requests]
    ]


def alternated(running: Mapping[str, SingleVllm], number: int) -> list[str]:
    """The engines in the order of round `number`."""
    return list(running) if number % 2 else list(reversed(running))


def tails(name: str, times: Mapping[str, Sequence[float]]) -> list[Figure]:
    """The 50th and the 99th percentile with storage, over those without."""
    figures = []
    for percent in (50, 99):
        at = {
            kind: sorted(values)[min(len(values) - 1, len(values) * percent // 100)]
            for kind, values in times.items()
        }
        ratio = at["stored"] / at["plain"]
        figures.append(at_most(f"{name}: p{percent} TTFT vs without storage", ratio, "x", 1.1))
    return figures


async def measure(turns: Sequence[Sequence[int]], pause: float) -> list[Figure]:
    """All figures; of the trace if there are `turns`. `pause`: as in `Bench`."""
    timeout = aiohttp.ClientTimeout(total=600)
    with tempfile.TemporaryDirectory() as directory:
        async with s3_server() as url, aiohttp.ClientSession(timeout=timeout) as http:
            chunk = 128 if turns else 256
            bench = Bench(Path(directory), url, chunk, http, pause)
            return await (trace(bench, turns) if turns else lengths(bench))


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option(
    "--trace", "trace_file", type=click.Path(exists=True, path_type=Path),
    help="a Mooncake trace (JSON lines) instead of prompts of four lengths",
)  # fmt: skip
@click.option("--requests", default=80, show_default=True, help="requests of the trace")
@click.option("--pause", default=0.0, show_default=True, help="seconds before each of them")
def main(file: Path | None, trace_file: Path | None, requests: int, pause: float) -> None:
    """Measure storage under real vLLM on the CPU."""
    if not VENV.is_dir():
        raise MissingVllm
    turns = conversations(trace_file.read_bytes(), requests) if trace_file else []
    report(asyncio.run(measure(turns, pause)), file)


if __name__ == "__main__":
    main()
