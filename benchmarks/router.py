"""CPU and memory of tandem-router, alone and as the front of sidecars, beside Envoy, EPP and
sidecar together, and Envoy alone.

A fake engine that computes nothing is behind all of them. In each round h2load sends the same body
to each in turn. CPU per request is that of all processes of a stack, from /proc. Router and EPP
have the same configuration, and both log, count and keep a history. With `--workers` the router has
several processes; the others stay as they are. A request counts as lost unless it was answered with
2xx and all its bytes, and handed off where it should be.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final

import click

from . import h2load, proxy_load
from .figures import Figure, at_most, progress, report, without_target
from .proxy_load import CHUNKS, missing_programs
from .router_stacks import HOST, PLAIN, SPLIT, Stack, Stacks, running

__all__ = ["missing_programs"]


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request and the load that is sent of it."""

    name: str
    kind: str
    """SPLIT or PLAIN."""
    requests: int
    size: int = 900
    """Bytes of the prompt."""
    stream: bool = False
    clients: int = 8

    def body(self) -> bytes:
        """The request body."""
        return proxy_load.chat(self.size, stream=self.stream)

    def answer_size(self) -> int:
        """Bytes of the engine's answer."""
        return proxy_load.answer_size(stream=self.stream)


CASES: Final = (
    Case("plain, 1 KB", PLAIN, 4000),
    Case("hand-off, 1 KB", SPLIT, 3000),
    Case("plain, 220 KB", PLAIN, 500, 220_000),
    Case("hand-off, 220 KB", SPLIT, 300, 220_000),
    Case(f"{CHUNKS}-chunk stream", PLAIN, 800, stream=True),
    Case(f"hand-off, {CHUNKS}-chunk stream", SPLIT, 800, stream=True),
)
CROWDED: Final = Case("hand-off, 220 KB, 32 clients", SPLIT, 600, 220_000, clients=32)


class Bench:
    """The samples: milliseconds of CPU per request, by stack and case."""

    def __init__(self, stacks: Stacks, scratch: Path) -> None:
        self.samples: dict[tuple[str, str], list[float]] = {}
        self.p50: dict[tuple[str, str], list[float]] = {}
        self.lost: dict[str, int] = {}
        self._stacks, self._scratch = stacks, scratch

    async def run(self, stack: Stack, case: Case) -> None:
        """Take one sample."""
        file = self._scratch / "body"
        file.write_bytes(case.body())
        load = h2load.Load(file, ("content-type: application/json",), case.requests, case.clients)
        prefills = await self._prefills()
        before = stack.cpu()
        url = f"http://{HOST}:{stack.servers[0].port}/v1/chat/completions"
        outcome = await h2load.drive(url, load, self._scratch)
        cpu = stack.cpu() - before
        expected = case.requests if case.kind == SPLIT and stack is not self._stacks.bare else 0
        handed_off = await self._prefills() - prefills
        # Rounded up: a single missing byte is a lost request.
        lost = ceil(
            case.requests
            - outcome.good
            + abs(outcome.good - outcome.data / case.answer_size())
            + abs(handed_off - expected)
        )
        self.lost[stack.name] = self.lost.get(stack.name, 0) + lost
        if lost:
            progress(f"  lost: {lost}")
            progress("  " + "\n  ".join(w for each in stack.servers for w in each.last_warnings()))
        key = stack.name, case.name
        self.samples.setdefault(key, []).append(1e3 * cpu / case.requests)
        self.p50.setdefault(key, []).append(outcome.quantile(0.5))

    def ratios(self, over: str, under: str, case: Case) -> list[float]:
        """The ratio of two stacks' CPU in each round."""
        pairs = zip(self.samples[over, case.name], self.samples[under, case.name], strict=True)
        return [a / b for a, b in pairs]

    async def _prefills(self) -> int:
        return (await proxy_load.engine_counts(self._stacks.engine.port))["prefills"]


def schedule(stacks: Stacks, number: int) -> Iterator[tuple[Stack, Case]]:
    """The loads of round `number`: stacks that are compared follow each other, in an order that
    alternates between rounds."""
    for case in CASES:
        kind = case.kind
        compared = [stacks.routers[kind], stacks.fronts[kind], stacks.three[kind], stacks.bare]
        for stack in reversed(compared) if number % 2 else compared:
            yield stack, case


async def measure(rounds: int, workers: int) -> list[Figure]:
    """All figures."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        async with running(scratch, CHUNKS, workers) as stacks:
            # Not measured: the first requests fill caches and fits.
            for kind in (PLAIN, SPLIT):
                for stack in (stacks.routers[kind], stacks.fronts[kind], stacks.three[kind]):
                    await Bench(stacks, scratch).run(stack, CASES[kind == SPLIT])
            bench = Bench(stacks, scratch)
            for number in range(rounds):
                for stack, case in schedule(stacks, number):
                    progress(f"round {number + 1} of {rounds}: {case.name}, {stack.name}")
                    await bench.run(stack, case)
            progress(CROWDED.name)
            # Last, because it raises the memory, which is read afterwards.
            for stack in (stacks.routers[SPLIT], stacks.fronts[SPLIT], stacks.three[SPLIT]):
                await bench.run(stack, CROWDED)
            return list(figures(bench, stacks))


def figures(bench: Bench, stacks: Stacks) -> Iterator[Figure]:
    """The figures of the samples."""
    router, front = stacks.routers[SPLIT], stacks.fronts[SPLIT]
    three, bare = stacks.three[SPLIT], stacks.bare
    for case in CASES:
        ratios = bench.ratios(router.name, three.name, case)
        yield at_most(f"CPU, {case.name}, over Envoy, EPP and sidecar", ratios, "ratio", 0.8)
        ratios = bench.ratios(front.name, three.name, case)
        yield without_target(f"  {front.name}, over Envoy, EPP and sidecar", ratios, "ratio")
        alone = bench.ratios(router.name, bare.name, case)
        yield without_target("  over Envoy alone, which hands nothing off", alone, "ratio")
        for stack in (router, front, three, bare):
            samples = bench.samples[stack.name, case.name]
            yield without_target(f"  {stack.name}", samples, "ms/request")
        for stack in (router, front, three, bare):
            yield without_target(f"  p50, {stack.name}", bench.p50[stack.name, case.name], "ms")
    yield at_most("RSS after 220 KB x 32 clients", router.resident(), "MB", 120)
    for stack in (front, three):
        yield without_target(f"  {stack.name}", stack.resident(), "MB")
    for name, lost in bench.lost.items():
        yield at_most(f"requests lost, all runs, {name}", lost, "requests", 0)


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--rounds", default=3, show_default=True, help="rounds; a figure is their median")
@click.option("--workers", default=1, show_default=True, help="processes of the router")
def main(file: Path | None, rounds: int, workers: int) -> None:
    """Compare the router with Envoy, EPP and sidecar; exit status 2 when a program is missing."""
    report(proxy_load.measured("router", measure(rounds, workers)), file)


if __name__ == "__main__":
    main()
