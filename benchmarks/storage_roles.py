"""What saving and looking up cost prompts that are not stored, each alone, under real vLLM.

    python -m benchmarks.storage_roles [--tokens N]

Four engines run on one model: without storage, one that only saves, one that only looks up, and one
that does both. Each new prompt goes to all of them, one at a time, in an order that rotates.

A worker process of vLLM spins for a second after its last step. On a machine with fewer cores than
engines it would take a core from the next engine and from the store, so a pause precedes each
request. What earlier prompts have to write is written by then.
"""

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Final

import aiohttp
import click
from tests.cluster import tools
from tests.vllm.engines import VENV

from . import programs
from .figures import Figure, at_most, progress, report
from .storage import s3_server
from .storage_engines import Bench, MissingVllm, prompt

_ENGINES: Final = {
    "plain": "without storage",
    "saving": "saves",
    "looking": "looks up",
    "stored": "does both",
}
_CHUNK: Final = 256
_PAUSE: Final = 1.3
"""Seconds."""


def missing_programs() -> list[str]:
    """What `benchmarks` prints before it measures anything."""
    return programs.missing([lambda: tools.path("versitygw")])


async def measure(prompts: int, length: int) -> list[Figure]:
    """TTFT of each kind of engine over that without storage: the median of the prompts' ratios.
    `length`: tokens of each prompt."""
    timeout = aiohttp.ClientTimeout(total=600)
    times: dict[str, list[float]] = {kind: [] for kind in _ENGINES}
    kinds = list(_ENGINES)
    with tempfile.TemporaryDirectory() as directory:
        async with s3_server() as url, aiohttp.ClientSession(timeout=timeout) as http:
            bench = Bench(Path(directory), url, _CHUNK, http)
            async with bench.engines(*kinds) as running:
                for number in range(prompts):
                    if number % 10 == 0:
                        progress(f"storage_roles: prompt {number} of {prompts}")
                    tokens, first = prompt(length), number % len(kinds)
                    for kind in kinds[first:] + kinds[:first]:
                        await asyncio.sleep(_PAUSE)
                        times[kind].append(await bench.ttft(running[kind], tokens))
    return [_figure(kind, times, length) for kind in kinds[1:]]


def _figure(kind: str, times: dict[str, list[float]], length: int) -> Figure:
    ratios = [a / b for a, b in zip(times[kind], times["plain"], strict=True)]
    shown = " vs ".join(f"{statistics.median(times[k]) * 1e3:.0f} ms" for k in (kind, "plain"))
    name = f"TTFT of new prompts of {length} tokens, an engine that {_ENGINES[kind]} ({shown})"
    return at_most(name, ratios, "x", 1.1)


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--prompts", default=30, show_default=True, help="new prompts")
@click.option("--tokens", default=512, show_default=True, help="tokens of each")
def main(file: Path | None, prompts: int, tokens: int) -> None:
    """Measure what storage costs prompts that are not stored."""
    if not VENV.is_dir():
        raise MissingVllm
    report(asyncio.run(measure(prompts, tokens)), file)


if __name__ == "__main__":
    main()
