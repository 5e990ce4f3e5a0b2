"""`tandem bench` against `vllm bench serve`, guidellm and aiperf: what each reports and costs.

`python -m benchmarks` leaves this benchmark out, because the peers are heavy: `make load-peers`
installs them, 7 GB in all.

Trials: each tool sends the same schedule to a server that has a known fault and keeps what it did
(`load_server`). A report is right when the numbers of good and failed requests are those of the
server, and the latencies, counted from the scheduled time, are those of the good answers.

Rates: each tool, in a closed loop of 32 clients, loads a fake engine that answers at once. The CPU
time is that of all processes of the tool (`process_tree`). Every tool runs twice, with few requests
and with many; the difference is the cost of the requests without start-up and imports, which must
not count against a heavy tool. Each tool has one sending process, which costs the least CPU.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.table import Table

from tandem_engine.tiny import make_tiny_model

from . import process_tree, programs
from .figures import Figure, at_least, at_most, progress, report
from .load_reports import Reported
from .load_run import run, server
from .load_server import Fault, Served
from .load_tools import PEERS, TANDEM, TOOLS, Load, Tool
from .load_truth import Truth, mistakes, truth

REQUESTS: Final = 400
RATE: Final = 40.0
"""Requests per second of the trials; a good answer takes 0.4 s."""
PAUSED: Final = "paused"
"""A trial on a healthy server: the tool's processes are stopped for a second, as on a machine
without free CPU."""
LATENCIES: Final = ("ttft_p50", "ttft_p95", "ttft_p99", "itl_p50")
TRIALS: Final = ("healthy", *(str(f) for f in Fault if f is not Fault.NONE), PAUSED)
_ATTEMPTS: Final = 3
CHUNKS: Final = 256
"""Chunks of a stream in the measurement of rates."""
_FEW: Final = 10
"""The short run has one request where the long run has so many."""
_SIZES: Final = {
    TANDEM.name: (40_000, 15_000),
    "vllm bench serve": (12_000, 4_000),
    "guidellm": (2_000, 600),
    "aiperf": (3_000, 800),
}
"""Requests of a long run, whole and streamed: at least five seconds of CPU time."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a tool reported of a trial, and what it should have."""

    name: str
    tool: str
    reported: Reported
    true: Truth
    attempts: int = 1
    """How often the tool was run until its latencies were right, at most _ATTEMPTS times."""

    @property
    def mistakes(self) -> list[str]:
        """The names of the wrong values."""
        return mistakes(self.reported, self.true)


async def best_of(name: str, tool: Tool, tokenizer: Path) -> Trial:
    """The first right report of `tool` in the trial `name`, or its last.

    Latencies may be wrong because other programs kept the machine busy, so the trial is repeated.
    A wrong number of failed requests has no such excuse.
    """
    for number in range(_ATTEMPTS):
        progress(f"trial {name}: {tool.name}{f', attempt {number + 1}' if number else ''}")
        trial = await attempt(name, tool, tokenizer)
        if not trial.mistakes or "failed" in trial.mistakes:
            break
    return replace(trial, attempts=number + 1)


async def attempt(name: str, tool: Tool, tokenizer: Path) -> Trial:
    """Run `tool` in the trial `name`, on a server of its own."""
    fault = name if name in set(Fault) else Fault.NONE
    async with server("load_server", "--fault", fault) as url:
        load = Load(url, REQUESTS, tokenizer, rate=RATE)
        if name == PAUSED:
            pauses: list[tuple[float, float]] = []
            done = await run(tool, load, partial(pause, url, pauses))
            true = truth(await served(url), REQUESTS, RATE, pauses[0])
        else:
            done = await run(tool, load)
            true = truth(await served(url), REQUESTS, RATE)
        return Trial(name, tool.name, done.reported, true)


async def served(url: str) -> list[Served]:
    """What the server at `url` did so far."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/served") as response:
        return msgspec.json.decode(await response.read(), type=list[Served])


async def pause(url: str, pauses: list[tuple[float, float]], pid: int) -> None:
    """Stop the processes below `pid` for a second, once a third of the requests have arrived.

    Adds the time of the pause to `pauses`.
    """
    async with aiohttp.ClientSession() as session, session.get(f"{url}/arrived/{REQUESTS // 3}"):
        pass
    pauses.append(await asyncio.to_thread(process_tree.pause, pid, 1.0))


async def per_core(url: str, tool: Tool, tokenizer: Path, *, stream: bool) -> float:
    """Requests, or chunks of streams, per second of CPU time, without start-up."""
    many = _SIZES[tool.name][stream]
    few = many // _FEW
    cpu = {}
    for requests in (few, many):
        tokens = CHUNKS if stream else 16
        load = Load(url, requests, tokenizer, stream=stream, output_tokens=tokens)
        done = await run(tool, load)
        if done.reported.ok != requests:
            raise RuntimeError(f"{tool.name}: {done.reported} of {requests} requests")
        cpu[requests] = done.usage.cpu
    return (many - few) * (CHUNKS if stream else 1) / (cpu[many] - cpu[few])


async def rates(
    tools: Sequence[Tool], tokenizer: Path, rounds: int, *, stream: bool
) -> dict[str, list[float]]:
    """The rates per core of each tool, by round. The order of the tools alternates."""
    measured: dict[str, list[float]] = {tool.name: [] for tool in tools}
    async with server("fake_engine", "--chunks", str(CHUNKS)) as url:
        for number in range(rounds):
            for tool in reversed(tools) if number % 2 else tools:
                what = f"streams of {CHUNKS} chunks" if stream else "whole answers"
                progress(f"round {number + 1} of {rounds}: {what}, {tool.name}")
                rate = await per_core(url, tool, tokenizer, stream=stream)
                progress(f"  {rate:,.0f} per second and core")
                measured[tool.name].append(rate)
    return measured


def rate_figures(name: str, unit: str, measured: dict[str, list[float]]) -> list[Figure]:
    """The rate of each tool, and the ratio of ours to the best peer's, by round."""
    ours, peers = measured[TANDEM.name], [measured[tool.name] for tool in PEERS]
    figures = [at_least(f"{name}, {tool}", values, unit, 0) for tool, values in measured.items()]
    ratios = [mine / max(others) for mine, *others in zip(ours, *peers, strict=True)]
    return [*figures, at_least(f"{name}, ours over the best peer's", ratios, "ratio", 3)]


def trial_figures(trials: Sequence[Trial]) -> list[Figure]:
    """How many reports of each tool are right, and how far the tools agree on a healthy server."""
    figures = []
    for tool in TOOLS:
        own = [trial for trial in trials if trial.tool == tool.name]
        right = sum(not trial.mistakes for trial in own)
        floor = len(own) if tool is TANDEM else 0
        figures.append(at_least(f"right reports, {tool.name}", right, f"of {len(own)}", floor))
    healthy = [trial.reported.ttft_p50 or 0.0 for trial in trials if trial.name == "healthy"]
    spread = max(healthy) / min(healthy)
    return [*figures, at_most("healthy: largest TTFT p50 over the smallest", spread, "ratio", 1.05)]


def show(trials: Sequence[Trial]) -> None:
    """Print each report beside the truth; a wrong value is marked."""
    table = Table(title=f"{REQUESTS} requests at {RATE:g}/s: reported (true); latencies in ms")
    for heading in (
        "trial",
        "tool",
        "ok",
        "failed",
        "TTFT p50",
        "p95",
        "p99",
        "ITL p50",
        "right, runs",
    ):
        table.add_column(heading, no_wrap=True)
    table.add_column("reported besides")
    for trial in trials:
        wrong = trial.mistakes
        cells = [_cell(trial, key, wrong) for key in ("ok", "failed")]
        cells += [_cell(trial, key, wrong, 1e3) for key in LATENCIES]
        verdict = f"{'no' if wrong else 'yes'}, {trial.attempts}"
        table.add_row(trial.name, trial.tool, *cells, verdict, trial.reported.note)
    Console(width=max(160, Console().width)).print(table)


def _cell(trial: Trial, key: str, wrong: Sequence[str], factor: float = 1) -> str:
    value, right = getattr(trial.reported, key), getattr(trial.true, key)
    text = "-" if value is None else f"{value * factor:.0f}"
    return f"{text} ({right * factor:.0f}){' WRONG' if key in wrong else ''}"


async def measure(part: str, rounds: int) -> tuple[list[Trial], list[Figure]]:
    """The trials and all figures."""
    trials: list[Trial] = []
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        tokenizer = Path(name) / "model"
        make_tiny_model(tokenizer)
        if part in ("all", "trials"):
            for trial in TRIALS:
                trials += [await best_of(trial, tool, tokenizer) for tool in TOOLS]
            figures += trial_figures(trials)
        if part in ("all", "rates"):
            whole = await rates(TOOLS, tokenizer, rounds, stream=False)
            figures += rate_figures("whole answers", "requests/s per core", whole)
            streamed = await rates(TOOLS, tokenizer, rounds, stream=True)
            figures += rate_figures("streams", "chunks/s per core", streamed)
    return trials, figures


def missing_programs() -> list[str]:
    """Load generators that this machine lacks, with how to install them."""
    return programs.missing([tool.find for tool in TOOLS])


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--rounds", default=3, show_default=True, help="rounds of the rates")
@click.option("--part", type=click.Choice(["all", "trials", "rates"]), default="all")
def main(file: Path | None, rounds: int, part: str) -> None:
    """Compare tandem bench with its peers; exit status 2 when one of them is not installed."""
    if lines := missing_programs():
        click.echo("\n".join(f"benchmarks.loadtest: {line}" for line in lines), err=True)
        sys.exit(2)
    trials, figures = asyncio.run(measure(part, rounds))
    if trials:
        show(trials)
    report(figures, file)


if __name__ == "__main__":
    main()
