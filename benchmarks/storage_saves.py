"""From the end of a prefill's step to its visible KV in storage: saved while it runs, and after it.

Two engines get new prompts of 8,192 tokens in turns, each computed in one step. The first saves
layer group by layer group while the step runs, as engines do; the second saves the chunks after it.
Computing is paced as in `benchmarks.storage_ttft`; writes to an S3 store (versitygw) are real.
"""

import asyncio
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from unittest import mock

import click
import torch
from tests.engine.engines import Tally

from tandem_engine.engine import Engine
from tandem_engine.step_runner import StepRunner
from tandem_engine.tiers import chunk_memory
from tandem_engine.types import Tier
from tandem_kvstore.errors import Reason
from tandem_kvstore.guard.load_guard import Decision, Hit, LoadGuard

from .figures import Figure, at_most, progress, report
from .storage import s3_server
from .storage_ttft import SPEEDS, Bench, missing_programs, paced, ttft

__all__ = ["missing_programs"]

_TOKENS: Final = 8192
_ROUNDS: Final = {10_000: 12, 40_000: 16}
"""Tokens that a paced step computes in a second → rounds."""
_GROUP_BYTES: Final = 1 << 20
"""Four layer groups of the benchmark's model, whose chunks are smaller than those of large ones."""


class _NeverLoads(LoadGuard):
    """No new prompt is looked up: it is computed in one step."""

    def decide(self, hit: Hit, now: float) -> Decision:
        return Decision(0, 0.0, Reason.UNPROFITABLE)


@dataclass
class _Visible(Tally):
    """Notes when the last chunk of a prompt became visible."""

    at: float = 0.0
    tokens: int = 0
    all_stored: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        super().__init__()

    def record_tier_store(self, tier: Tier, tokens: int) -> None:
        self.tokens += tokens
        self.at = time.perf_counter()
        if self.tokens >= _TOKENS:
            self.all_stored.set()

    def reset(self) -> None:
        self.tokens = 0
        self.all_stored.clear()


@dataclass
class Round:
    """One prompt on one engine, in seconds."""

    visible: float
    """From the end of its step to the last manifest."""
    ttft: float


async def one_round(engine: Engine, tally: _Visible) -> Round:
    """Send a new prompt, and wait until its chunks are stored."""
    tally.reset()
    ends: list[float] = []
    run = StepRunner.run

    async def noted(runner: StepRunner, step: object) -> object:
        results = await run(runner, step)  # type: ignore[arg-type]
        ends.append(time.perf_counter())
        return results

    with mock.patch.object(StepRunner, "run", noted):
        first = await ttft(engine, _TOKENS)
    await tally.all_stored.wait()
    (end,) = ends
    return Round(tally.at - end, first)


async def at_speed(url: str, directory: Path, speed: int) -> list[Figure]:
    """Both engines, in turns."""
    pairs: list[tuple[Round, Round]] = []
    tallies = _Visible(), _Visible()
    with mock.patch.object(chunk_memory, "_GROUP_BYTES", _GROUP_BYTES), paced(speed):
        bench = Bench(directory, url, f"saves-{speed}", step_tokens=_TOKENS)
        async with (
            bench.engine(stores=True, tally=tallies[0], guard=_NeverLoads) as by_layers,
            bench.engine(stores=True, tally=tallies[1], guard=_NeverLoads) as after,
        ):
            after._tiers.saving = lambda _: nullcontext()  # type: ignore[method-assign]
            engines = by_layers, after
            for engine in engines:
                # The prompts that an engine computes at its start.
                while engine._tiers._saves.unwritten:  # type: ignore[attr-defined]  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for number in range(-2, _ROUNDS[speed]):
                rounds = {}
                for place in (0, 1) if number % 2 else (1, 0):
                    rounds[place] = await one_round(engines[place], tallies[place])
                if number >= 0:
                    pairs.append((rounds[0], rounds[1]))
    times = zip(*((a.visible, b.visible) for a, b in pairs), strict=True)
    shown = " / ".join(f"{1000 * statistics.median(x):.0f}" for x in times)
    label = f"computing paced at {speed:,} tokens/s"
    name = f"from the step's end to visible KV, saved by layers over after it ({shown} ms; {label})"
    return [
        at_most(name, [a.visible / b.visible for a, b in pairs], "x", 1.0),
        at_most(
            f"TTFT, saved by layers over after the step ({label})",
            [a.ttft / b.ttft for a, b in pairs],
            "x",
            1.05,
        ),
    ]


async def measure() -> list[Figure]:
    """All figures."""
    torch.set_num_threads(1)
    figures = []
    for speed in SPEEDS:
        progress(f"storage_saves: {speed} tokens/s")
        with tempfile.TemporaryDirectory() as directory:
            async with s3_server() as url:
                figures += await at_speed(url, Path(directory), speed)
    return figures


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
def main(file: Path | None) -> None:
    """Measure how soon a prefill's KV is visible in storage."""
    report(asyncio.run(measure()), file)


if __name__ == "__main__":
    main()
