"""CPU per request of sidecar and EPP of one checkout over that of another.

    python -m benchmarks.by_turns BASE NEW          two checkouts, each with `make compiled`

Other work on a machine changes what a request costs by more than a change of the code does. So
three processes, two of BASE and one of NEW, serve short loads by turns, each round forwards and
backwards, behind the same client and before the same engine. A ratio is that of a round; the ratio
of the two processes of BASE is the spread, without which that of NEW over BASE says nothing. Where
a process lies in memory also moves it, so each batch of rounds has new processes. In brackets: the
interval that 95 of 100 medians lie in when batches, and their rounds, are drawn again (bootstrap).
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from tandem_local.ports import free_port
from tandem_local.router import write_plan_key

from . import epp, sidecar
from .epp_stacks import HOST, Variant
from .epp_stacks import running as running_stacks
from .figures import machine, progress
from .proxies import Servers, server
from .proxy_load import CHUNKS

BASE, AGAIN, NEW = "base", "base again", "new"
Batch = list[dict[str, float]]
"""For each round, the CPU time per request of each process in milliseconds."""
Measure = Callable[[str], Awaitable[float]]
"""Sends one load to a process; returns its CPU time per request in milliseconds."""
_SIDECAR: Final = (
    replace(sidecar.PLAIN, requests=150),
    replace(sidecar.HAND_OFF, requests=100),
    replace(sidecar.STREAM, requests=20),
    replace(sidecar.HAND_OFF_STREAM, requests=20),
)
_EPP: Final = (replace(epp.SMALL, requests=150), replace(epp.MEDIUM, requests=100))
_DRAWS: Final = 2000


def command(checkout: Path) -> tuple[str, ...]:
    """What starts a Python that imports the packages of `checkout`, compiled where they are."""
    components = sorted(init.parent.parent for init in checkout.glob("*/tandem_*/__init__.py"))
    path = os.pathsep.join(map(str, (checkout / "build" / "compiled", *components)))
    return ("env", f"PYTHONPATH={path}", sys.executable)


@asynccontextmanager
async def sidecars(scratch: Path, code: Mapping[str, Path]) -> AsyncIterator[dict[str, Measure]]:
    """Sidecars of the checkouts `code` before one fake engine: what measures each case."""
    keys, engine = scratch / "keys", free_port(HOST)
    write_plan_key(keys)
    fake = (sys.executable, "-m", "benchmarks.fake_engine", str(engine), "--chunks", str(CHUNKS))
    run = "from tandem_sidecar.main import main; main()"
    async with AsyncExitStack() as stack:
        before = await stack.enter_async_context(server("engine", engine, fake, scratch / "engine"))
        benches = {}
        for name, checkout in code.items():
            port, admin = free_port(HOST), free_port(HOST)
            flags = (
                *("--listen", f"{HOST}:{port}", "--admin", f"{HOST}:{admin}"),
                *("--engine", f"http://{HOST}:{engine}", "--pod-name", "decode-0"),
                *("--plan-key-dir", str(keys), "--log-format", "json"),
            )
            start = (*command(checkout), "-c", run, *flags)
            ours = await stack.enter_async_context(server(name, port, start, scratch / name))
            benches[name] = sidecar.Bench(Servers(before, before, before, ours, keys))

        def measure(case: sidecar.Case) -> Measure:
            async def load(name: str) -> float:
                bench = benches[name]
                await bench.run(bench.servers.sidecar, case)
                if bench.samples[-1].lost:
                    raise RuntimeError(f"{name} lost requests: {case.name}")
                return bench.samples[-1].cpu

            return load

        yield {f"sidecar, {case.name}": measure(case) for case in _SIDECAR}


@asynccontextmanager
async def epps(scratch: Path, code: Mapping[str, Path]) -> AsyncIterator[dict[str, Measure]]:
    """EPPs of the checkouts `code`, each behind an Envoy: what measures each case."""
    variants = {name: Variant(start=command(checkout)) for name, checkout in code.items()}
    async with running_stacks(scratch, variants) as stacks:
        bench = epp.Bench(stacks, scratch)

        def measure(case: epp.Case) -> Measure:
            async def load(name: str) -> float:
                await bench.requests(name, case)
                if bench.lost:
                    raise RuntimeError(f"{name} lost requests: {case.name}")
                return bench.of(name, case)[-1]

            return load

        yield {f"EPP, {case.name}": measure(case) for case in _EPP}


async def one_batch(code: Mapping[str, Path], kind: str, rounds: int) -> dict[str, Batch]:
    """The rounds of each case, with new processes."""
    start = sidecars if kind == "sidecar" else epps
    with tempfile.TemporaryDirectory() as scratch:
        async with start(Path(scratch), code) as cases:
            batch: dict[str, Batch] = {case: [] for case in cases}
            # The first round is not counted: it fills caches and fits.
            for number in range(rounds + 1):
                for case, load in cases.items():
                    order = random.sample(list(code), len(code))
                    sums = dict.fromkeys(code, 0.0)
                    for name in (*order, *reversed(order)):
                        sums[name] += await load(name) / 2
                    if number:
                        batch[case].append(sums)
            return batch


def interval(batches: list[list[float]]) -> tuple[float, float]:
    """Where 95 of 100 medians of samples drawn from `batches` lie."""
    medians = []
    for _ in range(_DRAWS):
        drawn = random.choices(batches, k=len(batches))
        medians.append(statistics.median(r for b in drawn for r in random.choices(b, k=len(b))))
    medians.sort()
    return medians[_DRAWS // 40], medians[-_DRAWS // 40]


def row(case: str, batches: list[Batch]) -> str:
    """The line of a case."""

    def ratio(name: str) -> str:
        ratios = [[r[name] / r[BASE] for r in batch] for batch in batches]
        median = statistics.median(r for batch in ratios for r in batch)
        low, high = interval(ratios)
        return f"{median:.3f} [{low:.3f} {high:.3f}]"

    micros = 1e3 * statistics.median(r[BASE] for batch in batches for r in batch)
    return f"{case:32} {micros:8.0f}  {ratio(AGAIN):22} {ratio(NEW)}"


@click.command()
@click.argument("base", type=click.Path(path_type=Path, exists=True))
@click.argument("new", type=click.Path(path_type=Path, exists=True))
@click.option("--kind", type=click.Choice(["sidecar", "epp"]), default="sidecar")
@click.option("--batches", default=10, show_default=True)
@click.option("--rounds", default=8, show_default=True, help="rounds of a batch")
def main(base: Path, new: Path, kind: str, batches: int, rounds: int) -> None:
    """Print the ratios after each batch."""
    code = {BASE: base.resolve(), AGAIN: base.resolve(), NEW: new.resolve()}
    print(machine())
    samples: dict[str, list[Batch]] = {}
    for number in range(batches):
        progress(f"batch {number + 1} of {batches}")
        for case, batch in asyncio.run(one_batch(code, kind, rounds)).items():
            samples.setdefault(case, []).append(batch)
        print(f"{'':32} {'base, µs':>8}  {'base again / base':22} new / base")
        for case, of_case in samples.items():
            print(row(case, of_case), flush=True)


if __name__ == "__main__":
    main()
