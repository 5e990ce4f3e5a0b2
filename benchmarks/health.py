"""How late a busy engine answers its probes: /health, asked as the kubelet asks, under a load that
the engine cannot keep up with.

    python -m benchmarks.health [--vllm] [--seconds 60]

Each probe has a connection of its own and waits for 60 seconds, so that no answer is cut off by the
time-out under examination. The engine always has as many requests as it takes at once, and as many
again that wait: half of them long prompts with one token of answer, half short ones with long
answers, and every fiftieth a body of 2 MB that the engine refuses. `--vllm` measures vLLM's CPU
build (`make vllm-setup`) instead of the reference engine.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Final

import aiohttp
import click
from tests.sidecar.real.engine import SERVED, engines
from tests.vllm.engines import MODEL_NAME
from tests.vllm.single import single_vllm

from tandem_contract import endpoints
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_engine.tiny import make_tiny_model

from .figures import Figure, progress, report, without_target

REQUESTS: Final = 128
"""At once: twice the sequences in one step of the reference engine."""
LONG: Final = 2000
"""Tokens of a long prompt."""
ANSWER: Final = 200
"""Tokens of a long answer."""
LARGE: Final = 500_000
"""Tokens of a prompt that is refused: a body of 2 MB, which the engine's front end parses."""
PERIOD: Final = 0.5
"""Seconds between probes; pools have 2 by default."""
PATIENCE: Final = 60.0


@asynccontextmanager
async def torch_engine(folder: Path) -> AsyncIterator[str]:
    (engine,) = engines(folder, busy={"flags": ("--dtype", "float32")})
    try:
        await engine.up()
        yield engine.url
    finally:
        engine.kill()


@asynccontextmanager
async def vllm_engine(folder: Path) -> AsyncIterator[str]:
    model = folder / "model"
    model.mkdir()
    make_tiny_model(model, layers=4, hidden=256, heads=4, kv_heads=2)
    starting = single_vllm(model, folder, "--no-enable-prefix-caching")
    engine = await asyncio.to_thread(starting.__enter__)
    try:
        await engine.ready()
        yield engine.url
    finally:
        await asyncio.to_thread(starting.__exit__, None, None, None)


async def keep_busy(
    http: aiohttp.ClientSession, url: str, model: str, numbers: Iterator[int]
) -> None:
    """Send one request after the other."""
    for number in numbers:
        random = Random(number)
        kind = "large" if number % 50 == 0 else ("long", "short")[number % 2]
        tokens = {"large": LARGE, "long": LONG, "short": 16}[kind]
        body = {
            "model": model,
            "prompt": [random.randrange(4, 200) for _ in range(tokens)],
            "max_tokens": ANSWER if kind == "short" else 1,
            "stream": kind == "short",
            "ignore_eos": True,
        }
        async with http.post(url + PATHS[RequestKind.COMPLETIONS], json=body) as response:
            await response.read()
            if kind != "large":
                response.raise_for_status()


async def probe(url: str, until: float) -> list[float]:
    """Seconds until each answer. Probes overlap: an answer may be later than the period."""

    async def one() -> float:
        began = time.perf_counter()
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(url + endpoints.HEALTH) as answer,
        ):
            answer.raise_for_status()
        return time.perf_counter() - began

    probes = []
    while time.perf_counter() < until:
        probes.append(asyncio.create_task(one()))
        await asyncio.sleep(PERIOD)
    return await asyncio.gather(*probes)


async def measure(url: str, model: str, seconds: float) -> list[float]:
    numbers = count(1)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as http:
        load = [asyncio.create_task(keep_busy(http, url, model, numbers)) for _ in range(REQUESTS)]
        try:
            answers = await probe(url, time.perf_counter() + seconds)
        finally:
            for task in load:
                task.cancel()
            ended = await asyncio.gather(*load, return_exceptions=True)
    for result in ended:
        if not isinstance(result, asyncio.CancelledError):
            raise click.ClickException(f"the load ended early: {result}")
    progress(f"{next(numbers) - 1} requests were sent, {len(answers)} probes")
    return answers


def figures(engine: str, answers: Sequence[float]) -> list[Figure]:
    cuts = quantiles(answers, n=100)
    late = {limit: sum(each > limit for each in answers) for limit in (1, 2, 5, 15)}
    return [
        without_target(f"{engine}, /health while busy, p50", cuts[49], "s"),
        without_target(f"{engine}, /health while busy, p99", cuts[98], "s"),
        without_target(f"{engine}, /health while busy, longest", max(answers), "s"),
        *(
            without_target(f"{engine}, answers later than {limit} s", n / len(answers) * 100, "%")
            for limit, n in late.items()
        ),
    ]


async def run(seconds: float, *, with_vllm: bool) -> list[Figure]:
    name, start, model = (
        ("vLLM on CPU", vllm_engine, MODEL_NAME) if with_vllm else ("torch", torch_engine, SERVED)
    )
    with TemporaryDirectory() as folder:
        progress(f"{name}: starting")
        async with start(Path(folder)) as url:
            progress(f"{name}: {REQUESTS} requests at once for {seconds:g} s")
            return figures(name, await measure(url, model, seconds))


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="How long to probe.")
@click.option("--vllm", "with_vllm", is_flag=True, help="Measure vLLM of .venv-vllm instead.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures here.")
def main(seconds: float, with_vllm: bool, file: Path | None) -> None:
    """Measure how late /health is answered under load."""
    report(asyncio.run(run(seconds, with_vllm=with_vllm)), file)


if __name__ == "__main__":
    main()
