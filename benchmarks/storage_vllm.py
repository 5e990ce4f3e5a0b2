"""KV in external storage under real vLLM on the CPU: time to first token and tokens computed.

    python -m benchmarks.storage_vllm                   stored prompts of four lengths
    python -m benchmarks.storage_vllm --trace FILE      conversations: see storage_trace

Two engines run on one model, one with TandemStorageConnector and an S3 store (versitygw), one
without: see storage_engines. Without a trace, a chunk has 256 tokens and 2 MiB.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import click
from tests.cluster import tools
from tests.vllm.engines import VENV
from tests.vllm.single import SingleVllm

from . import programs
from .figures import Figure, at_least, at_most, progress, report, without_target
from .storage import s3_server
from .storage_engines import LOADED, Bench, MissingVllm, alternated, prompt, show_reasons, tails
from .storage_trace import CHUNK, PAUSE, conversations, trace

LENGTHS: Final = (512, 1024, 2048, 3500)
"""Tokens."""
ROUNDS: Final = 5
_SHORT: Final = (256, 512, 768, 1024, 1536)
"""Lengths at which the crossover is looked for."""
_COLD: Final = 60
"""New prompts, of 512 tokens."""
_CHUNK: Final = 256


def missing_programs() -> list[str]:
    """What `benchmarks` prints before it measures anything."""
    return programs.missing([lambda: tools.path("versitygw")])


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
        before = await bench.value(engine, LOADED)
        await bench.ttft(engine, tokens)
        if await bench.value(engine, LOADED) > before:
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
    offered, before = 0, await bench.value(engine, LOADED)
    for length in LENGTHS[1:]:
        for number in range(ROUNDS):
            await bench.ttft(engine, prompt(length, number))
            offered += length // bench.chunk_tokens * bench.chunk_tokens
    share = (await bench.value(engine, LOADED) - before) / offered
    return at_least("stored tokens that are loaded after a restart", share, "", 0.95)


async def measure(prompts: Sequence[Sequence[int]], pause: float, busy: int) -> list[Figure]:
    """All figures; of the trace if it has `prompts`. `pause`, `busy`: as in `storage_trace`."""
    # Of a connection that was kept, a stopped engine would see the end too late.
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=600)
    with tempfile.TemporaryDirectory() as directory:
        session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        async with s3_server() as url, session as http:
            bench = Bench(Path(directory), url, CHUNK if prompts else _CHUNK, http)
            return await (trace(bench, prompts, pause, busy) if prompts else lengths(bench))


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option(
    "--trace", "trace_file", type=click.Path(exists=True, path_type=Path),
    help="a Mooncake trace (JSON lines) instead of prompts of four lengths",
)  # fmt: skip
@click.option("--requests", default=80, show_default=True, help="requests of the trace")
@click.option("--pause", default=PAUSE, show_default=True, help="seconds after each answer")
@click.option("--busy", default=0, help="processes that never rest beside the trace")
def main(
    file: Path | None, trace_file: Path | None, requests: int, pause: float, busy: int
) -> None:
    """Measure storage under real vLLM on the CPU."""
    if not VENV.is_dir():
        raise MissingVllm
    prompts = conversations(trace_file.read_bytes(), requests) if trace_file else []
    report(asyncio.run(measure(prompts, pause, busy)), file)


if __name__ == "__main__":
    main()
