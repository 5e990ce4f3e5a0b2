"""What the endpoint picker costs behind a real Envoy: CPU, latency, memory.

Fake engines answer for pods of which half prefill and half decode. The EPP runs with all features
but spans: choice by cost, prefix index, signed plans, metrics, history. h2load sends the same
requests through Envoy as a bare proxy and through Envoy with an EPP. Figures of CPU are ratios in a
round: the CPU time of the EPP's process, from /proc, over that of the bare Envoy's. All requests of
a case have the same body, so after the first one their prompts are cached.

The rows `our transport alone` place every request on one pod (`epp_transport`): the difference is
the decision and what is learned from the answer. The rows `over the same EPP with
grpcio's server` compare with `--ext-proc-server grpcio`.

Response chunks (FULL_DUPLEX_STREAMED) come from a client of this benchmark (`epp_chunks`), because
Envoy combines chunks as it likes. What they cost Envoy is the difference of two Envoys that pass on
the same streams, of an event every 4 ms, with and without sending them to the EPP. A `relay`
between another Envoy and EPP shows how much of that is reads, writes and waking up.

`--python` has the EPPs run with another interpreter, which needs the project and its libraries:
images have one that is built with optimizations, unlike many of those that developers build.

Last come the EPP at rest with 100 pods (`scrape`), and the memory of a full index (`prefix_index`).
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from tandem_local.errors import SetupError
from tandem_local.router import find_envoy

from . import epp_chunks, fake_engine, h2load, prefix_index, programs, scrape
from .epp_stacks import HOST, Stacks, Variant, running
from .figures import Figure, at_most, progress, report, without_target

_WORDS: Final = "the quick brown fox jumps over a lazy dog "
_CHUNKS: Final = 256
"""Events in a streamed answer: the fake engine's default."""


@dataclass(frozen=True, slots=True)
class Case:
    """A size of request."""

    name: str
    size: int
    """Bytes of the prompt."""
    requests: int
    stream: bool = False

    def body(self) -> bytes:
        """The request body."""
        text = (_WORDS * (self.size // len(_WORDS) + 1))[: self.size]
        request: dict[str, object] = {"model": "bench", "max_tokens": 16}
        if self.stream:
            request["stream"] = True
        request["messages"] = [{"role": "user", "content": text}]
        return json.dumps(request, separators=(",", ":")).encode()

    @property
    def answer_bytes(self) -> int:
        """Of each answer."""
        return fake_engine.stream_size(_CHUNKS) if self.stream else len(fake_engine.PLAIN)


SMALL: Final = Case("1 KB", 900, 5000)
MEDIUM: Final = Case("16 KB", 16_000, 3000)
LARGE: Final = Case("220 KB", 220_000, 500)
LARGEST: Final = Case("400 KB", 400_000, 300)
STREAM: Final = Case("stream", 900, 24, stream=True)
TARGETS: Final = {SMALL: 2.5, MEDIUM: 3.3, LARGE: 8.0}

BARE, OURS, TRANSPORT = "bare Envoy", "10 pods", "our transport alone"
MANY, TLS, DUPLEX, GRPCIO = "100 pods", "TLS", "FULL_DUPLEX_STREAMED", "grpcio"
RELAYED: Final = "FULL_DUPLEX_STREAMED through a relay"
VARIANTS: Final = {
    OURS: Variant(),
    TRANSPORT: Variant(server="transport"),
    MANY: Variant(pods=100),
    TLS: Variant(tls=True),
    DUPLEX: Variant(duplex=True),
    RELAYED: Variant(duplex=True, relayed=True),
    GRPCIO: Variant(server="grpcio"),
}


class Bench:
    """The samples: milliseconds of CPU and of latency per request, microseconds per chunk."""

    def __init__(self, stacks: Stacks, scratch: Path) -> None:
        self.samples: dict[tuple[str, str], list[float]] = {}
        self.lost = 0
        self._stacks, self._scratch = stacks, scratch

    async def requests(self, name: str, case: Case, clients: int = 8) -> None:
        """Send the requests of `case` through a bare Envoy or the stack `name`."""
        stack = self._stacks.by_name.get(name)
        front = stack.envoy if stack else self._stacks.bare
        file = self._scratch / "body"
        file.write_bytes(case.body())
        load = h2load.Load(file, ("content-type: application/json",), case.requests, clients)
        relay = stack.relay if stack else None
        epp_before, envoy_before = stack.epp.cpu() if stack else 0.0, front.cpu()
        relay_before = relay.cpu() if relay else 0.0
        url = f"http://{HOST}:{front.port}/v1/chat/completions"
        outcome = await h2load.drive(url, load, self._scratch)
        self.lost += case.requests - outcome.good
        self.lost += outcome.data != case.requests * case.answer_bytes
        envoy = 1e3 * (front.cpu() - envoy_before) / case.requests
        self._add(f"Envoy, {name}", case, envoy)
        if stack is not None:
            self._add(name, case, 1e3 * (stack.epp.cpu() - epp_before) / case.requests)
        if relay is not None:
            self._add("relay", case, 1e3 * (relay.cpu() - relay_before) / case.requests)
        for share in (0.5, 0.95, 0.99):
            self._add(f"p{100 * share:g}, {name}", case, outcome.quantile(share))

    async def chunks(self, name: str, batch: int) -> None:
        """Send response chunks to an EPP, `batch` in a write."""
        epp = self._stacks.by_name[name].epp
        before = epp.cpu()
        count = await epp_chunks.send_chunks(epp.port, batch)
        self.samples.setdefault((name, f"chunk, {batch} per write"), []).append(
            1e6 * (epp.cpu() - before) / count
        )

    def of(self, name: str, case: Case) -> list[float]:
        """The samples of each round."""
        return self.samples[name, case.name]

    def ratios(self, case: Case, over: str, under: str) -> list[float]:
        """The ratio of two samples in each round."""
        return [a / b for a, b in zip(self.of(over, case), self.of(under, case), strict=True)]

    def _add(self, name: str, case: Case, value: float) -> None:
        self.samples.setdefault((name, case.name), []).append(value)


def schedule(number: int) -> Iterator[tuple[str, Case]]:
    """The loads of round `number`; those that are compared follow each other."""
    for case, names in (
        (SMALL, (TLS, GRPCIO, OURS, BARE, TRANSPORT, MANY)),
        (MEDIUM, (GRPCIO, OURS, BARE, TRANSPORT)),
        (LARGE, (GRPCIO, OURS, BARE, TRANSPORT)),
        (LARGEST, (MANY,)),
        (STREAM, (OURS, DUPLEX, RELAYED)),
    ):
        for name in reversed(names) if number % 2 else names:
            yield name, case


async def measure(rounds: int, python: str) -> list[Figure]:
    """The figures of everything that runs behind Envoy."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        async with running(scratch, VARIANTS, python) as stacks:
            bench = Bench(stacks, scratch)
            # Not measured: the first requests fill caches and fits.
            for name in VARIANTS:
                await Bench(stacks, scratch).requests(name, SMALL)
            for number in range(rounds):
                for name, case in schedule(number):
                    progress(f"round {number + 1} of {rounds}: {case.name}, {name}")
                    await bench.requests(name, case)
                progress(f"round {number + 1} of {rounds}: response chunks")
                for batch in (1, 8):
                    await bench.chunks(OURS, batch)
            results = list(figures(bench))
            progress("220 KB, 32 clients")
            # Last, because it raises the memory.
            await bench.requests(OURS, LARGE, clients=32)
            resident = stacks.by_name[OURS].epp.resident()
            results.append(at_most("RSS after 220 KB x 32 clients", resident, "MB", 150))
            return [*results, at_most("requests lost, all runs", bench.lost, "requests", 0)]


def figures(bench: Bench) -> Iterator[Figure]:
    """The figures of the samples."""
    bare = f"Envoy, {BARE}"
    for case, target in TARGETS.items():
        yield from _of_case(bench, case, target)
    ours = bench.ratios(SMALL, MANY, bare)
    yield at_most("CPU, 1 KB, 100 pods, BUFFERED, over bare Envoy", ours, "ratio", 3.5)
    yield at_most("CPU, 400 KB, 100 pods, BUFFERED", bench.of(MANY, LARGEST), "ms/request", 3)
    tls = bench.ratios(SMALL, TLS, OURS)
    yield at_most("CPU, 1 KB, BUFFERED, with TLS over without", tls, "ratio", 1.5)
    yield from _of_chunks(bench)


def _of_case(bench: Bench, case: Case, target: float) -> Iterator[Figure]:
    bare = f"Envoy, {BARE}"
    name = f"CPU, {case.name}, 10 pods, BUFFERED, over bare Envoy"
    yield at_most(name, bench.ratios(case, OURS, bare), "ratio", target)
    yield without_target(f"  {TRANSPORT}", bench.ratios(case, TRANSPORT, bare), "ratio")
    grpcio = bench.ratios(case, OURS, GRPCIO)
    yield without_target("  over the same EPP with grpcio's server", grpcio, "ratio")
    yield without_target("  the EPP", bench.of(OURS, case), "ms/request")
    yield without_target("  bare Envoy", bench.of(bare, case), "ms/request")
    pairs = zip(bench.of(f"Envoy, {OURS}", case), bench.of(bare, case), strict=True)
    added = [asking - alone for asking, alone in pairs]
    yield without_target("  added to Envoy by asking", added, "ms/request")
    rates = [1e3 / ms for ms in bench.of(OURS, case)]
    yield without_target("  throughput per core of the EPP", rates, "requests/s")
    for share in ("p50", "p95", "p99"):
        name = f"  latency {share}, 8 clients"
        yield without_target(name, bench.of(f"{share}, {OURS}", case), "ms")
    yield without_target("  bare Envoy's p50", bench.of(f"p50, {BARE}", case), "ms")


def _of_chunks(bench: Bench) -> Iterator[Figure]:
    for batch in (8, 1):
        ours = bench.samples[OURS, f"chunk, {batch} per write"]
        label = f"CPU, response chunk, {DUPLEX}, {batch} per write"
        # With a chunk in each write, most of the time is the kernel's.
        yield at_most(label, ours, "µs", 8) if batch > 1 else without_target(label, ours, "µs")
    for label, prefix in (("added to Envoy", "Envoy, "), ("added to the EPP", "")):
        pairs = zip(bench.of(prefix + DUPLEX, STREAM), bench.of(prefix + OURS, STREAM), strict=True)
        per_event = [1e3 * (duplex - buffered) / _CHUNKS for duplex, buffered in pairs]
        yield without_target(f"  {label} per event of a paced stream", per_event, "µs")
    # A relay is woken twice for an event: by Envoy, and by the EPP's answer.
    floor = [1e3 * ms / _CHUNKS / 2 for ms in bench.of("relay", STREAM)]
    yield without_target("  a relay on uvloop, for a read and a write", floor, "µs")


def at_rest() -> list[Figure]:
    """The figures that need no requests."""
    figures = asyncio.run(scrape.measure(rounds=2, seconds=15.0))
    progress("100 pods with 100,000 blocks each")
    resident, _ = prefix_index.memory(2048)
    name = "memory of the index, 100 pods x 100,000 blocks"
    return [*figures, at_most(name, resident / 1e6, "MB", prefix_index.LIMIT_BYTES / 1e6)]


def missing_programs() -> list[str]:
    """Programs that this benchmark starts and this machine lacks, with how to install them."""
    return programs.missing([h2load.find, find_envoy])


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--rounds", default=3, show_default=True, help="rounds; a figure is their median")
@click.option("--requests-only", is_flag=True, help="leave out the EPP at rest and the index")
@click.option(
    "--python", default=sys.executable, help="interpreter of the EPPs [default: this one]"
)
def main(file: Path | None, rounds: int, requests_only: bool, python: str) -> None:
    """Measure the EPP; exit status 2 when h2load or Envoy is missing."""
    try:
        h2load.find()
        results = asyncio.run(measure(rounds, python))
    except (h2load.NotInstalled, SetupError) as err:
        click.echo(f"benchmarks.epp: {err}", err=True)
        sys.exit(2)
    report(results if requests_only else [*results, *at_rest()], file)


if __name__ == "__main__":
    main()
