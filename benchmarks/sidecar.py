"""CPU, latency and memory of the sidecar, compared with Envoy and aiohttp as bare proxies and with
no proxy.

A fake engine that computes nothing is behind all of them. In each round, the same body is sent to
each server in turn. CPU per request is that of the proxy's process, from /proc. A figure is the
median over the rounds; minimum and maximum are printed beside it, because other work on the machine
moves the rounds. The sidecar runs with all features: signed plans, metrics, history, circuit
breakers, JSON log at info. A request counts as lost unless it was answered with 2xx and all its
bytes, and handed off as planned.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from tandem_contract import headers, plan
from tandem_contract.paths import RoutingPath
from tandem_local.router import find_envoy

from . import h2load, programs, proxy_load
from .figures import Figure, at_most, progress, report, without_target
from .proxies import Server, Servers, running
from .proxy_load import CHUNKS


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request and the load that is sent of it."""

    name: str
    requests: int
    size: int = 900
    """Bytes of the prompt."""
    stream: bool = False
    split: bool = False
    """Whether the plan asks for a hand-off; only the sidecar gets such requests."""
    clients: int = 8
    rate: float | None = None
    """Requests per second; None: the next request follows each answer."""

    def body(self) -> bytes:
        """The request body."""
        return proxy_load.chat(self.size, stream=self.stream)

    def answer_size(self) -> int:
        """Bytes of the engine's answer."""
        return proxy_load.answer_size(stream=self.stream)


PLAIN: Final = Case("plain, 1 KB", 12000)
HAND_OFF: Final = Case("hand-off, 1 KB", 8000, split=True)
STREAM: Final = Case(f"stream of {CHUNKS} chunks", 1500, stream=True)
HAND_OFF_STREAM: Final = Case("hand-off, then stream", 1500, stream=True, split=True)
# Few, because such an answer takes more than half a second. Each event is read and written alone,
# so the CPU per stream hardly depends on which process runs when.
PACED_STREAM: Final = Case(f"stream of {CHUNKS} chunks, paced", 48, stream=True)
_INTERVAL: Final = 0.002
"""Seconds between the events of a paced stream. Longer ones only make the benchmark longer."""
# One client: several would send at the same moment, and delay each other.
PACED: Final = Case("200 req/s", 800, clients=1, rate=200)
PACED_HAND_OFF: Final = Case("200 req/s, hand-off", 800, split=True, clients=1, rate=200)
LARGE: Final = Case("hand-off, 220 KB, 32 clients", 1500, 220_000, split=True, clients=32)


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of one load on one server; times in milliseconds."""

    case: Case
    server: str
    cpu: float
    """CPU time of the server's process per request."""
    per_second: float
    p50: float
    p99: float
    lost: int


class Bench:
    """The servers that are measured, and the samples taken."""

    def __init__(self, servers: Servers, alternates: tuple[plan.Target, ...] = ()) -> None:
        """`alternates`: those of each plan."""
        self.servers, self._alternates = servers, alternates
        self.samples: list[Sample] = []
        self._keys = plan.load_keys(servers.keys)

    async def run(self, server: Server, case: Case) -> None:
        """Take one sample."""
        requests = [self._headers(server, case, number) for number in range(case.requests)]
        # CPU directly before and after the load: counting requests is not part of it.
        counts_before, cpu_before = await self._counts(), server.cpu()
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        body, clients, rate = case.body(), case.clients, case.rate
        outcome = await h2load.drive_distinct(url, body, requests, clients, rate)
        # CPU first: the request for the counts must not be part of it.
        cpu, counts = server.cpu() - cpu_before, await self._counts()
        handed_off = case.requests * (case.split and server is self.servers.sidecar)
        losses = {
            "no 2xx": case.requests - outcome.good,
            # The share of an answer that is missing counts as a part of a request.
            "cut short": abs(outcome.good - outcome.data / case.answer_size()),
            "not prefilled": abs(counts["prefills"] - counts_before["prefills"] - handed_off),
            "not pulled": abs(counts["pulls"] - counts_before["pulls"] - handed_off),
        }
        # Rounded up: a single missing byte is a lost request.
        lost = ceil(sum(losses.values()))
        if lost:
            progress(f"  lost: {losses}")
            progress("  " + "\n  ".join(server.last_warnings()))
        p50, p99 = outcome.quantile(0.5), outcome.quantile(0.99)
        each = cpu / case.requests * 1000
        self.samples.append(Sample(case, server.name, each, outcome.per_second, p50, p99, lost))

    def of(self, server: Server, case: Case) -> list[Sample]:
        """The samples of one case on one server, by round."""
        return [s for s in self.samples if s.server == server.name and s.case is case]

    def _headers(self, server: Server, case: Case, number: int) -> dict[str, str]:
        request_id = f"bench-{number}"
        common = {"content-type": "application/json", headers.REQUEST_ID: request_id}
        # Envoy and the engine know no plan, and a header more would cost them CPU.
        if server is not self.servers.sidecar:
            return common
        return {**common, headers.PLAN: self._plan(case, request_id)}

    def _plan(self, case: Case, request_id: str) -> str:
        """A signed plan as the EPP sends it, valid for an hour: it holds for one request."""
        now = time.time()
        decode = plan.Target("decode-0", f"127.0.0.1:{self.servers.sidecar.port}")
        target = plan.Target("engine-0", f"127.0.0.1:{self.servers.engine.port}")
        path = RoutingPath.PREFILL_THEN_DECODE if case.split else RoutingPath.UNIFIED
        prefill = (target,) if case.split else ()
        decision = plan.Plan(
            path,
            "benchmark",
            decode,
            prefill,
            request_id=request_id,
            expires=now + 3600,
            alternates=self._alternates,
        )
        return plan.sign(decision, self._keys, now=now)

    async def _counts(self) -> dict[str, int]:
        return await proxy_load.engine_counts(self.servers.engine.port)


def schedule(servers: Servers, number: int) -> Iterator[tuple[Server, Case]]:
    """The loads of round `number`. Cases that are compared follow each other directly, in an order
    that alternates between rounds."""
    engine, envoy, aiohttp, sidecar, _ = servers
    for case, split in ((PLAIN, HAND_OFF), (STREAM, HAND_OFF_STREAM), (PACED, PACED_HAND_OFF)):
        # Without a proxy: the base of the added latency.
        yield engine, case
        compared = [(aiohttp, case), (sidecar, case), (envoy, case), (sidecar, split)]
        yield from reversed(compared) if number % 2 else compared


async def measure(rounds: int) -> tuple[list[Figure], list[Sample]]:
    """All figures, and the samples that they are computed from."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        async with running(scratch, CHUNKS) as servers:
            bench = Bench(servers)
            for number in range(rounds):
                for server, case in schedule(servers, number):
                    progress(f"round {number + 1} of {rounds}: {case.name}, {server.name}")
                    await bench.run(server, case)
            progress(LARGE.name)
            # Last, because it raises the sidecar's memory, which is read afterwards.
            await bench.run(servers.sidecar, LARGE)
            resident = servers.sidecar.resident()
        async with running(scratch, CHUNKS, interval=_INTERVAL) as servers:
            paced = Bench(servers)
            for number in range(rounds):
                compared = [servers.aiohttp, servers.sidecar, servers.envoy]
                for server in reversed(compared) if number % 2 else compared:
                    progress(f"round {number + 1} of {rounds}: {PACED_STREAM.name}, {server.name}")
                    await paced.run(server, PACED_STREAM)
    bench.samples += paced.samples
    return figures(bench, resident), bench.samples


def figures(bench: Bench, resident: float) -> list[Figure]:
    """The figures that have targets; `resident` is the sidecar's memory in MB."""
    engine, envoy, aiohttp, sidecar, _ = bench.servers

    def ratios(sidecar_case: Case, other: Server, case: Case) -> list[float]:
        # Ratios within a round: other work on the machine moves both sides.
        pairs = zip(bench.of(sidecar, sidecar_case), bench.of(other, case), strict=True)
        return [a.cpu / b.cpu for a, b in pairs]

    def cpu(name: str, sidecar_case: Case, envoy_case: Case, ceiling: float) -> Figure:
        return at_most(f"CPU, {name}", ratios(sidecar_case, envoy, envoy_case), "ratio", ceiling)

    def over_aiohttp(case: Case) -> Figure:
        name = f"CPU, {case.name}, over aiohttp's"
        return without_target(name, ratios(case, aiohttp, case), "ratio")

    def latency(name: str, case: Case) -> Figure:
        pairs = zip(bench.of(sidecar, case), bench.of(engine, PACED), strict=True)
        added = [a.p99 - b.p99 for a, b in pairs]
        return at_most(f"added p99 at 200 req/s, {name}", added, "ms", 2)

    lost = sum(s.lost for s in bench.samples if s.server == sidecar.name)
    return [
        cpu("plain 1 KB over Envoy's", PLAIN, PLAIN, 1.8),
        cpu("hand-off 1 KB over Envoy's plain", HAND_OFF, PLAIN, 4),
        cpu(f"{CHUNKS}-chunk stream over Envoy's", STREAM, STREAM, 1.1),
        cpu("stream, paced by the engine, over Envoy's", PACED_STREAM, PACED_STREAM, 1.1),
        cpu("hand-off + stream over Envoy's stream", HAND_OFF_STREAM, STREAM, 2),
        over_aiohttp(PLAIN),
        over_aiohttp(STREAM),
        over_aiohttp(PACED_STREAM),
        latency("plain", PACED),
        latency("hand-off", PACED_HAND_OFF),
        at_most("RSS after 220 KB x 32 clients", resident, "MB", 80),
        at_most("requests lost by the sidecar, all runs", lost, "requests", 0),
    ]


def show(samples: Sequence[Sample]) -> None:
    """Print median and range of each case on each server."""
    table = Table("case", "server", "CPU ms/request", "req/s", "p50 ms", "p99 ms", "lost")
    rows: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        rows.setdefault((sample.case.name, sample.server), []).append(sample)
    for (case, server), taken in rows.items():
        table.add_row(
            case,
            server,
            _median_and_range([s.cpu for s in taken], ".3f"),
            _median_and_range([s.per_second for s in taken], ".0f"),
            _median_and_range([s.p50 for s in taken], ".2f"),
            _median_and_range([s.p99 for s in taken], ".2f"),
            str(sum(s.lost for s in taken)),
        )
    Console(width=max(130, Console().width)).print(table)


def _median_and_range(values: Sequence[float], form: str) -> str:
    """`MEDIAN (MIN-MAX)`; one value stands alone."""
    median = format(statistics.median(values), form)
    return median if len(values) == 1 else f"{median} ({min(values):{form}}-{max(values):{form}})"


def missing_programs() -> list[str]:
    """What this machine lacks, with how to install it."""
    return programs.missing([find_envoy])


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--rounds", default=3, show_default=True, help="rounds; a figure is their median")
def main(file: Path | None, rounds: int) -> None:
    """Compare the sidecar with Envoy; exit status 2 when Envoy is missing."""
    results, samples = proxy_load.measured("sidecar", measure(rounds))
    show(samples)
    report(results, file)


if __name__ == "__main__":
    main()
