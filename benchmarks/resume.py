"""What `tandem-sidecar --resume` costs streams that nothing breaks: CPU and memory.

    python -m benchmarks.resume

Two sidecars, with and without `--resume`, are before one fake engine, whose streams have the token
ids that the first one asks for. They serve the same load by turns; the ratio is that of a round.
Memory is the peak of a new process while many streams of one long prompt run at once, over that of
the other sidecar, per token: those of the prompt and of the answer are noted until it ends.
"""

import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click

from tandem_contract.plan import Target
from tandem_local.ports import free_port
from tandem_local.router import write_plan_key

from .figures import Figure, at_most, progress, report, without_target
from .proxies import Server, Servers, server
from .proxy_load import CHUNKS, engine_counts
from .sidecar import PACED_STREAM, STREAM, Bench, Case

_HOST: Final = "127.0.0.1"
_WITH: Final = "with --resume"
_INTERVAL: Final = 0.002
"""Seconds between the events of a paced stream."""
_STREAMS: Final = 300
_PROMPT: Final = 8192
"""Tokens of the prompt of the streams whose memory is measured; their text has four bytes each."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The two sidecars."""

    without: Bench
    with_resume: Bench


@asynccontextmanager
async def pair(interval: float, prompt_ids: int) -> AsyncIterator[Pair]:
    """The sidecars before an engine that streams `CHUNKS` events, `interval` seconds apart, with
    the ids of a prompt of `prompt_ids` tokens."""
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys, port = scratch / "keys", free_port(_HOST)
        write_plan_key(keys)
        fake = (
            *(sys.executable, "-m", "benchmarks.fake_engine", str(port), "--chunks", str(CHUNKS)),
            *("--interval", f"{interval:g}", "--prompt-ids", str(prompt_ids)),
        )
        engine = await stack.enter_async_context(server("engine", port, fake, scratch / "engine"))

        async def bench(name: str, *flags: str) -> Bench:
            listen, admin = free_port(_HOST), free_port(_HOST)
            command = (
                *(sys.executable, "-c", "from tandem_sidecar.main import main; main()"),
                *("--listen", f"{_HOST}:{listen}", "--admin", f"{_HOST}:{admin}"),
                *("--engine", f"http://{_HOST}:{port}", "--pod-name", "decode-0"),
                *("--plan-key-dir", str(keys), "--log-format", "json", *flags),
            )
            ours = await stack.enter_async_context(server(name, listen, command, scratch / name))
            # Nothing fails, so that nothing listens there.
            other = Target("decode-1", f"{_HOST}:9")
            return Bench(Servers(engine, engine, engine, ours, keys), (other,))

        yield Pair(await bench("without"), await bench(_WITH, "--resume"))


async def cpu_ratios(case: Case, interval: float, rounds: int) -> list[float]:
    """CPU time of a stream with `--resume` over that without, a ratio per round."""
    ratios = []
    async with pair(interval, prompt_ids=100) as both:
        for number in range(rounds + 1):
            progress(f"{case.name}: round {number} of {rounds}")
            order = [both.without, both.with_resume]
            for bench in reversed(order) if number % 2 else order:
                await _run(bench, case)
            # The first round fills caches.
            if number:
                taken = (bench.samples[-1].cpu for bench in (both.with_resume, both.without))
                ratios.append(next(taken) / next(taken))
    return ratios


async def bytes_per_token(streams: int) -> float:
    """Peak memory that `--resume` adds, in bytes per token of prompt and answer."""
    case = replace(PACED_STREAM, requests=streams, clients=streams, size=4 * _PROMPT)
    # Slow enough that all streams run at once.
    async with pair(interval=0.05, prompt_ids=_PROMPT) as both:
        grown = {}
        for bench in (both.without, both.with_resume):
            progress(f"{streams} streams, {bench.servers.sidecar.name}")
            before = _peak(bench.servers.sidecar)
            await _run(bench, case)
            grown[bench] = _peak(bench.servers.sidecar) - before
    more = grown[both.with_resume] - grown[both.without]
    return more / streams / (_PROMPT + CHUNKS)


async def _run(bench: Bench, case: Case) -> None:
    port, ours = bench.servers.engine.port, bench.servers.sidecar
    before = (await engine_counts(port))["with_ids"]
    await bench.run(ours, case)
    with_ids = (await engine_counts(port))["with_ids"] - before
    if bench.samples[-1].lost or with_ids != case.requests * (ours.name == _WITH):
        raise RuntimeError(f"{ours.name} lost requests, or what it asks for: {case.name}")


def _peak(process: Server) -> int:
    """The most memory that a process had until now, in bytes."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    if found is None:
        raise RuntimeError("this benchmark needs Linux")
    return int(found[1]) * 1024


async def measure(rounds: int, streams: int) -> list[Figure]:
    """All figures."""
    fast = replace(STREAM, requests=200)
    # Processes of their own, whose peaks differ by up to a tenth.
    memory = [await bytes_per_token(streams) for _ in range(rounds)]
    return [
        at_most("CPU, paced stream", await cpu_ratios(PACED_STREAM, _INTERVAL, rounds), "×", 1.2),
        without_target("CPU, stream at once", await cpu_ratios(fast, 0.0, rounds), "×"),
        at_most("memory", memory, "bytes/token", 5),
    ]


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--rounds", default=6, show_default=True, help="rounds; a figure is their median")
@click.option("--streams", default=_STREAMS, show_default=True, help="that run at once")
def main(file: Path | None, rounds: int, streams: int) -> None:
    """Compare the sidecar with and without `--resume`."""
    report(asyncio.run(measure(rounds, streams)), file)


if __name__ == "__main__":
    main()
