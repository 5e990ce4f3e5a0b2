"""How well the picker predicts and routes live: `tandem up` with engines, sidecars, EPP and Envoy.

    python -m benchmarks.routing_live --trace mooncake.jsonl [--requests 300] [--json FILE]

The trace's requests are sent with its own lengths and shared prefixes, and with its own times as if
they had not been rounded to 3 s, all scaled to what this machine carries: `tandem bench` first
measures in a closed loop how many of them the stack answers per second, and the rest is sent at a
share of that. Engines are the torch engine with a tiny model on the CPU. All pods, the EPP, Envoy
and the load generator share this machine's cores, which adds noise to every time.

With 1 prefill and 2 decode pods: the error of the predicted TTFT, by what the EPP recorded of each
request. With 2 and 4: the default cost beside random routing, in rounds that alternate.
"""

import asyncio
import os
import signal
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from time import monotonic
from typing import Final

import click
import msgspec

from tandem_contract.request_kinds import RequestKind
from tandem_contract.trace import DecisionTrace
from tandem_loadtest.figures.model import Repeat
from tandem_loadtest.run.bench import run_bench
from tandem_loadtest.run.options import BenchOptions, BenchProgress
from tandem_loadtest.run.spec import Target
from tandem_loadtest.workload.settings import Arrivals, Prompts, Workload
from tandem_loadtest.workload.traces import load_trace, pace
from tandem_local.errors import SetupError
from tandem_local.router import find_envoy

from .figures import Figure, at_most, progress, report, without_target
from .live_stack import BY_COST, MODEL, RANDOM, LiveStack, Pools, tandem_up
from .live_summary import (
    ALL,
    Latencies,
    biases,
    histogram_median,
    latencies,
    noise,
    predicted_itl,
    prediction_errors,
)

ROUNDED_MS: Final = 3000
"""Milliseconds to which Mooncake's traces round their times: 10 requests share one on average."""


def spread(lines: bytes, rounded: float, random: Random) -> bytes:
    """The trace `lines` (JSON lines) with each request up to `rounded` milliseconds later, drawn
    from `random` with equal probability."""
    requests = [msgspec.json.decode(line) for line in lines.splitlines() if line.strip()]
    for request in requests:
        request["timestamp"] += random.uniform(0, rounded)
    return b"\n".join(map(msgspec.json.encode, requests))


TARGET: Final = 0.2
"""Largest median error of the predicted TTFT, as a share of the measured one."""
_HALF: Final = 0.5
_ERROR_METRIC: Final = "tandem_epp_ttft_prediction_error"
_CLIENTS: Final = 8
"""Requests at a time while the capacity is measured: no pod is idle then."""
_EQUAL: Final = 40
"""Equal requests, sent one after the other, by which the machine's noise is measured."""
_PROGRESS_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    trace: Path
    requests: int
    learn: int
    prompt: int
    output: int
    engine: str
    layers: int
    hidden: int
    arrivals: str
    load: float
    rounds: int
    only: str | None
    records: Path | None


class Sender:
    """Sends the trace to one stack; each run has prompts of its own."""

    def __init__(self, stack: LiveStack, options: Options) -> None:
        self._stack, self._options = stack, options
        self._trace = options.trace
        if options.arrivals == "spread":
            self._trace = stack.directory / "spread.jsonl"
            self._trace.write_bytes(spread(options.trace.read_bytes(), ROUNDED_MS, Random(0)))
        self._seeds = count(1)

    async def capacity(self, requests: int) -> float:
        """Requests per second that the stack answers while `_CLIENTS` clients wait for it."""
        closed = Arrivals(process="closed", concurrency=_CLIENTS)
        return (await self._send("capacity", closed, requests)).rates.requests

    async def send(self, name: str, requests: int, rate: float) -> tuple[Repeat, "Decisions"]:
        """Send the first `requests` of the trace at `rate` per second on average."""
        if self._options.arrivals != "poisson":
            factor = pace(load_trace(self._trace, limit=requests), rate)
            arrivals = Arrivals(process="trace", time_factor=factor)
        else:
            arrivals = Arrivals(process=self._options.arrivals, rate=rate)
        repeat = await self._send(name, arrivals, requests)
        return repeat, await self._stack.decisions(requests)

    async def equal_requests(self) -> list[float]:
        """TTFT of requests that are equal but for their text, sent one after the other."""
        alone = Workload(preset="fixed", prompt_tokens=self._options.prompt // 10, output_tokens=1)
        closed = Arrivals(process="closed", concurrency=1)
        await self._bench("equal requests", closed, alone, _EQUAL)
        decisions = await self._stack.decisions(_EQUAL)
        return [decision.measured_ttft for decision in decisions if decision.measured_ttft]

    async def _send(self, name: str, arrivals: Arrivals, requests: int) -> Repeat:
        options = self._options
        workload = Workload(
            preset="trace",
            file=str(self._trace),
            prompt_tokens=options.prompt,
            output_tokens=options.output,
        )
        return await self._bench(name, arrivals, workload, requests)

    async def _bench(
        self, name: str, arrivals: Arrivals, workload: Workload, requests: int
    ) -> Repeat:
        bench = BenchOptions(
            target=Target(url=self._stack.endpoint, model=MODEL, endpoint=RequestKind.COMPLETIONS),
            arrivals=arrivals,
            workload=workload,
            prompts=Prompts(style="token-ids"),
            seed=next(self._seeds),
            limit=requests,
            warm_up=0,
        )
        (repeat,) = (await run_bench(bench, _Display(name, requests), asyncio.Event())).repeats
        if repeat.rates.lost:
            raise click.ClickException(f"{name}: {repeat.rates.lost} requests got no whole answer")
        return repeat


Decisions = Sequence[DecisionTrace]


class _Display:
    """Prints how far a run is, every few seconds."""

    def __init__(self, name: str, requests: int) -> None:
        self._name, self._requests = name, requests
        self._printed = monotonic()

    def __call__(self, at: BenchProgress) -> None:
        if monotonic() - self._printed >= _PROGRESS_SECONDS:
            self._printed = monotonic()
            progress(f"  {self._name}: {at.finished} of {self._requests} requests answered")


@asynccontextmanager
async def _learned(
    prefills: int, decodes: int, options: Options
) -> AsyncIterator[tuple[LiveStack, Sender, float]]:
    """A stack whose EPP has learned, its sender, and the requests per second that it answers."""
    progress(f"{prefills} prefill and {decodes} decode pods: starting")
    with tempfile.TemporaryDirectory(prefix="tandem-live-") as name:
        is_paced, sizes = options.engine == "paced", (options.layers, options.hidden)
        pools = Pools(Path(name), prefills, decodes, is_paced, *sizes)
        async with tandem_up(pools) as stack:
            sender = Sender(stack, options)
            capacity = await sender.capacity(options.learn)
            rate = options.load * capacity
            progress(f"  {capacity:.3g} requests/s at most; sending {rate:.3g} per second")
            await sender.send("learning", options.learn, rate)
            yield stack, sender, capacity


async def prediction(options: Options) -> list[Figure]:
    """The error of the predicted TTFT, with 1 prefill and 2 decode pods."""
    async with _learned(1, 2, options) as (stack, sender, capacity):
        before = await stack.epp_metrics()
        rate = options.load * capacity
        repeat, decisions = await sender.send("measuring", options.requests, rate)
        after = await stack.epp_metrics()
        equal = await sender.equal_requests()
    if options.records is not None:
        options.records.write_bytes(msgspec.json.encode(decisions))
    figures = [
        without_target("capacity of 1 + 2 pods", capacity, "req/s"),
        at_most("load of 1 + 2 pods", repeat.rates.scheduled / capacity, "share", _HALF),
        *_error_figures(decisions),
    ]
    figures.append(
        without_target("TTFT of equal requests from their median", noise(equal), "share")
    )
    figures.append(without_target("load average of this machine", os.getloadavg()[0], "processes"))
    if (median := histogram_median(before, after, _ERROR_METRIC)) is not None:
        figures.append(without_target("the same by the EPP's histogram", median, "share"))
    if repeat.all.ttft is not None:
        client = repeat.all.ttft.percentiles["50"]
        epp = statistics.median(d.measured_ttft for d in decisions if d.measured_ttft)
        figures.append(without_target("median TTFT at the EPP", 1e3 * epp, "ms"))
        figures.append(without_target("median TTFT at the client", 1e3 * client, "ms"))
    return figures + _itl_figures(repeat, decisions)


def _itl_figures(repeat: Repeat, decisions: Decisions) -> list[Figure]:
    predicted, measured = predicted_itl(decisions), repeat.all.tpot
    if predicted is None or measured is None:
        return []
    middle = measured.percentiles["50"]
    return [
        without_target("median of the predicted ITL", 1e3 * predicted, "ms"),
        without_target("median of the answers' mean ITL at the client", 1e3 * middle, "ms"),
        at_most(
            "  their difference, over the latter", abs(predicted / middle - 1), "share", TARGET
        ),
    ]


def _error_figures(decisions: Decisions) -> list[Figure]:
    errors = prediction_errors(decisions)
    if not errors[ALL]:
        raise click.ClickException("the EPP recorded no prediction: nothing was measured")
    figures = [
        at_most(
            "median error of the predicted TTFT, all paths",
            statistics.median(errors.pop(ALL)),
            "share",
            TARGET,
        )
    ]
    for path, values in sorted(errors.items()):
        name = f"  {path}, {len(values)} requests"
        figures.append(without_target(name, statistics.median(values), "share"))
    for path, seconds in biases(decisions).items():
        name = f"  {path}: median of measured - predicted"
        figures.append(without_target(name, 1e3 * seconds, "ms"))
    return figures


async def comparison(options: Options) -> list[Figure]:
    """The default cost beside random routing, with 2 prefill and 4 decode pods."""
    routers = {"by cost": BY_COST, "random": RANDOM}
    trials: dict[str, list[Latencies]] = {name: [] for name in routers}
    async with _learned(2, 4, options) as (stack, sender, capacity):
        rate = options.load * capacity
        for number in range(options.rounds):
            # The order alternates, so that neither always meets the warmer machine.
            for router in sorted(routers, reverse=bool(number % 2)):
                await stack.route(routers[router])
                run = f"round {number + 1} of {options.rounds}, {router}"
                _, decisions = await sender.send(run, options.requests, rate)
                trials[router].append(latencies(decisions))
    figures = [without_target("capacity of 2 + 4 pods", capacity, "req/s")]
    for router, measured in trials.items():
        figures += _latency_figures(router, measured)
    return figures


def _latency_figures(router: str, trials: Sequence[Latencies]) -> list[Figure]:
    return [
        without_target(f"{router}: TTFT p50", [1e3 * t.ttft_p50 for t in trials], "ms"),
        without_target(f"{router}: TTFT p99", [1e3 * t.ttft_p99 for t in trials], "ms"),
        without_target(f"{router}: waiting p50", [1e3 * t.waiting_p50 for t in trials], "ms"),
        without_target(f"{router}: waiting p99", [1e3 * t.waiting_p99 for t in trials], "ms"),
        without_target(f"{router}: hit ratio", [t.hit_ratio for t in trials], "share"),
    ]


def missing_programs() -> list[str]:
    """What `tandem up` needs and this machine lacks."""
    try:
        find_envoy()
    except SetupError as err:
        return [str(err)]
    return []


_PARTS: Final = {"prediction": prediction, "comparison": comparison}


@click.command()
@click.option(
    "--trace",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="a Mooncake trace (JSON lines); its first requests are sent",
)
@click.option("--requests", default=300, show_default=True, help="requests of each measured run")
@click.option(
    "--learn", default=100, show_default=True, help="requests of each of the two runs before"
)
@click.option(
    "--prompt-tokens", "prompt", default=3000, show_default=True,
    help="longest prompt; all others shrink in proportion",
)  # fmt: skip
@click.option(
    "--output-tokens", "output", default=64, show_default=True,
    help="longest answer; all others shrink in proportion",
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(["torch", "paced"]), default="torch", show_default=True,
    help="torch, or torch with steps that last as on an accelerator of its own for each pod",
)  # fmt: skip
@click.option("--layers", default=4, show_default=True, help="of torch's model; more: slower")
@click.option("--hidden", default=128, show_default=True, help="hidden size of that model")
@click.option(
    "--arrivals", type=click.Choice(["spread", "trace", "poisson"]), default="spread",
    show_default=True,
    help="spread: the trace's times, each up to 3 s later at random, since they are rounded to "
    "3 s; trace: as recorded, with up to 15 requests at once; or Poisson",
)  # fmt: skip
@click.option(
    "--load", type=click.FloatRange(0, 1, min_open=True), default=0.35, show_default=True,
    help="rate, as a share of the requests per second that the stack answers at most",
)  # fmt: skip
@click.option("--rounds", default=3, show_default=True, help="runs of each router")
@click.option("--only", type=click.Choice(list(_PARTS)), help="measure one of both parts")
@click.option(
    "--records", type=click.Path(path_type=Path),
    help="write what the EPP recorded of each request whose prediction was measured here, as JSON",
)  # fmt: skip
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
def main(file: Path | None, **flags: object) -> None:
    """Measure how well the picker predicts the TTFT, and how it routes, behind `tandem up`.

    Sends a trace to 1 prefill and 2 decode pods, and to 2 and 4, below half load: real engines
    (torch, a tiny model, on the CPU), sidecars, EPP and Envoy. Prints the median error of the
    predicted TTFT, and latencies of the default cost beside those of random routing.
    """
    # As by Ctrl-C: the stack ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    options = Options(**flags)  # type: ignore[arg-type] - click has checked the types
    if lines := missing_programs():
        raise click.ClickException("\n".join(lines))
    figures: list[Figure] = []
    for name, part in _PARTS.items():
        if options.only in (None, name):
            figures += asyncio.run(part(options))
    report(figures, file)


if __name__ == "__main__":
    main()
