"""How many tokens a prefill engine should take into one step.

One course says: about one prompt at a time, for a short time to first token. A guide to vLLM says:
large steps, for throughput. Both are right where they hold: steps beyond the size at which the
processor is busy raise no throughput and let the first prompts of a burst wait for the last.

A burst of prompts that arrive at once is sent to engines that differ in `--max-num-batched-tokens`
only: one prompt, a quarter of the burst, all of it. The engines take turns in each round, and only
one computes at a time. `--vllm` measures vLLM's CPU build (`make vllm-setup`) in the same way.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from random import Random
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import aiohttp
import click
from tests.sidecar.real.engine import SERVED, engines
from tests.vllm.engines import MODEL_NAME
from tests.vllm.single import single_vllm

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_engine.tiny import make_tiny_model

from .figures import Figure, progress, report, without_target

PROMPTS: Final = 8
"""Prompts of a burst."""
TOKENS: Final = 448
"""Tokens of a prompt; a multiple of the block sizes of both engines."""
BUDGETS: Final = {"one prompt": TOKENS, "two prompts": 2 * TOKENS, "the burst": PROMPTS * TOKENS}
"""Name → `--max-num-batched-tokens`."""
_numbers: Final = count()


class Burst(NamedTuple):
    """How long the prompts of one burst took, in seconds from its beginning."""

    mean: float
    last: float


async def burst(http: aiohttp.ClientSession, url: str, model: str) -> Burst:
    """Send a burst of prompts that no other has, and wait until each has its first token."""
    began = time.perf_counter()

    async def first_token() -> float:
        random = Random(next(_numbers))
        prompt = [random.randrange(4, 200) for _ in range(TOKENS)]
        body = {"model": model, "prompt": prompt, "max_tokens": 1}
        async with http.post(url + PATHS[RequestKind.COMPLETIONS], json=body) as response:
            await response.read()
            response.raise_for_status()
        return time.perf_counter() - began

    times = await asyncio.gather(*(first_token() for _ in range(PROMPTS)))
    return Burst(mean(times), max(times))


@asynccontextmanager
async def torch_engines(directory: Path) -> AsyncIterator[Mapping[str, str]]:
    """Budget → URL of a reference engine with it."""
    kinds = {
        name: {"flags": ("--dtype", "float32", "--max-num-batched-tokens", str(budget))}
        for name, budget in BUDGETS.items()
    }
    running = engines(directory, **kinds)
    try:
        for engine in running:
            await engine.up()
        yield dict(zip(BUDGETS, (engine.url for engine in running), strict=True))
    finally:
        for engine in running:
            engine.kill()


@contextmanager
def vllm_engine(directory: Path, model: Path, name: str, budget: int) -> Iterator[str]:
    """URL of a vLLM that starts."""
    place = directory / name.replace(" ", "-")
    place.mkdir()
    flags = ("--max-num-batched-tokens", str(budget), "--no-enable-prefix-caching")
    with single_vllm(model, place, *flags) as engine:
        asyncio.run(engine.ready())
        yield engine.url


@asynccontextmanager
async def vllm_engines(directory: Path) -> AsyncIterator[Mapping[str, str]]:
    """Budget → URL of a vLLM with it. They start one after the other: each needs memory for it."""
    model = directory / "model"
    model.mkdir()
    make_tiny_model(model, layers=4, hidden=256, heads=4, kv_heads=2)
    async with AsyncExitStack() as stack:
        urls = {}
        for name, budget in BUDGETS.items():
            starting = vllm_engine(directory, model, name, budget)
            urls[name] = await asyncio.to_thread(starting.__enter__)
            stack.push_async_callback(asyncio.to_thread, starting.__exit__, None, None, None)
        yield urls


async def measure(urls: Mapping[str, str], model: str, rounds: int) -> Mapping[str, list[Burst]]:
    """The bursts of each budget; the first of each, which warms up, is left out."""
    bursts: dict[str, list[Burst]] = {name: [] for name in urls}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        for url in urls.values():
            await burst(http, url, model)
        for _ in range(rounds):
            for name, url in urls.items():
                bursts[name].append(await burst(http, url, model))
    return bursts


def figures(engine: str, bursts: Mapping[str, list[Burst]]) -> list[Figure]:
    """Ratios to the budget of one prompt, round by round."""
    base = bursts["one prompt"]
    return [
        without_target(
            f"{engine}, steps of {name}: {what} over steps of one prompt",
            [
                getattr(b, field) / getattr(a, field)
                for a, b in zip(base, bursts[name], strict=True)
            ],
            "×",
        )
        for name in BUDGETS
        if name != "one prompt"
        for what, field in (("mean TTFT", "mean"), ("seconds of the burst", "last"))
    ]


async def run(rounds: int, *, with_vllm: bool) -> list[Figure]:
    """All figures."""
    kinds = {"torch": (torch_engines, SERVED)}
    if with_vllm:
        kinds["vLLM on CPU"] = (vllm_engines, MODEL_NAME)
    result = []
    for engine, (start, model) in kinds.items():
        progress(f"{engine}: starting {len(BUDGETS)} engines")
        with TemporaryDirectory() as directory:
            async with start(Path(directory)) as urls:
                progress(f"{engine}: {rounds} rounds of {PROMPTS} prompts of {TOKENS} tokens")
                result += figures(engine, await measure(urls, model, rounds))
    return result


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Bursts of each engine.")
@click.option("--vllm", "with_vllm", is_flag=True, help="Measure vLLM of .venv-vllm, too.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures here.")
def main(rounds: int, with_vllm: bool, file: Path | None) -> None:
    """Measure bursts of prompts on engines with different sizes of a step."""
    report(asyncio.run(run(rounds, with_vllm=with_vllm)), file)


if __name__ == "__main__":
    main()
