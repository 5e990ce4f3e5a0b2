"""A trace of conversations under real vLLM, with KV in external storage and without.

Conversations of a Mooncake trace with three turns or more, in the trace's order but without its
times, at an eighth of its lengths, on engines whose cache holds 8,192 tokens: about five prompts.

Each engine is measured while the other one is stopped: a worker of vLLM spins on its core for a
second after each step, so two engines would leave two cores nothing for the store. After its answer
an engine goes on for a pause, in which it writes what it has computed.
"""

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from tests.vllm.single import SingleVllm

from tandem_contract import vllm_storage as names
from tandem_kvstore.errors import Reason

from .figures import Figure, progress, without_target
from .storage_engines import LOADED, Bench, alternated, prompt, show_reasons, tails

PAUSE: Final = 0.5
"""Seconds after each answer. Less: an engine is stopped before it has written what it computed."""
CHUNK: Final = 128
"""Tokens of a chunk."""
_SCALE: Final = 8
_BLOCK: Final = 512 // _SCALE
_TURNS: Final = 3
_LONGEST: Final = 4000
_SHOWN: Final = 5
_BY_SOURCE: Final = "vllm:prompt_tokens_by_source_total"
_NOT_LOADED: Final = f"{names.NOT_LOADED_CHUNKS}_total"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the trace on both engines."""

    tokens: int
    seconds: Mapping[str, float]
    """Time to the first token, by the kind of the engine."""
    computed: Mapping[str, float]
    """Tokens of the prompt that the engine computed, by its kind."""
    loaded: float
    """Tokens that came from the store."""
    load_seconds: float
    given_up: float
    """Chunks whose load its deadline ended."""

    def __str__(self) -> str:
        stored, plain = self.seconds["stored"], self.seconds["plain"]
        return (
            f"{self.tokens} tokens, {self.computed['stored']:.0f} computed, {self.loaded:.0f} "
            f"loaded in {self.load_seconds:.3f} s, {self.given_up:.0f} chunks given up: "
            f"{stored:.3f} s; without storage {self.computed['plain']:.0f} computed, {plain:.3f} s"
        )


@dataclass(frozen=True, slots=True)
class _Totals:
    """Counters of the engines; the fields are those of `Turn`."""

    computed: Mapping[str, float]
    loaded: float
    load_seconds: float
    given_up: float

    @classmethod
    async def of(cls, bench: Bench, running: Mapping[str, SingleVllm]) -> "_Totals":
        stored = running["stored"]
        return cls(
            {
                kind: await bench.value(engine, _BY_SOURCE, source="local_compute")
                for kind, engine in running.items()
            },
            await bench.value(stored, LOADED),
            await bench.value(stored, f"{names.LOAD_SECONDS}_sum"),
            await bench.value(stored, _NOT_LOADED, reason=Reason.TIMEOUT),
        )


async def trace(
    bench: Bench, prompts: Sequence[Sequence[int]], pause: float, busy: int
) -> list[Figure]:
    """Figures of the conversations. `pause`: as PAUSE. `busy`: processes that never rest."""
    async with bench.engines("stored", "plain") as running:
        with bench.busy(busy):
            turns = await _turns(bench, running, prompts, pause)
        await show_reasons(bench, running["stored"])
    times = {kind: [turn.seconds[kind] for turn in turns] for kind in running}
    for turn in sorted(turns, key=lambda turn: -turn.seconds["stored"])[:_SHOWN]:
        progress(f"storage_trace: among the slowest: {turn}")
    worst = max(turns, key=lambda turn: turn.seconds["stored"] / turn.seconds["plain"])
    progress(f"storage_trace: the largest ratio: {worst}")
    total = sum(map(len, prompts))
    figures = []
    for kind, label in (("stored", "with storage"), ("plain", "without")):
        share = sum(turn.computed[kind] for turn in turns) / total
        figures.append(without_target(f"trace: tokens computed {label}, of all", share, ""))
    means = statistics.mean(times["stored"]) / statistics.mean(times["plain"])
    figures.append(without_target("trace: mean TTFT with storage vs without", means, "x"))
    beside = f", beside {busy} busy processes" if busy else ""
    return figures + tails(f"trace, {len(prompts)} requests{beside}", times)


async def _turns(
    bench: Bench,
    running: Mapping[str, SingleVllm],
    prompts: Sequence[Sequence[int]],
    pause: float,
) -> list[Turn]:
    turns = []
    before = await _Totals.of(bench, running)
    for number, tokens in enumerate(prompts):
        if number % 20 == 0:
            progress(f"storage_trace: request {number} of {len(prompts)}")
        seconds = {}
        for kind in alternated(running, number):
            with bench.alone(running, kind):
                seconds[kind] = await bench.ttft(running[kind], tokens)
                await asyncio.sleep(pause)
        after = await _Totals.of(bench, running)
        turns.append(
            Turn(
                len(tokens),
                seconds,
                {kind: after.computed[kind] - before.computed[kind] for kind in running},
                after.loaded - before.loaded,
                after.load_seconds - before.load_seconds,
                after.given_up - before.given_up,
            )
        )
        before = after
    return turns


def conversations(lines: bytes, requests: int) -> list[list[int]]:
    """The first requests of conversations of at least three turns. Prompts of one conversation
    begin alike: those of the trace whose second block of 512 tokens is the same."""
    rows = [msgspec.json.decode(line) for line in lines.splitlines() if line.strip()]
    turns: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        blocks = row["hash_ids"]
        if len(blocks) > 2 and len(blocks) * _BLOCK <= _LONGEST:
            turns.setdefault(blocks[1], []).append(index)
    chosen: list[int] = []
    for indices in turns.values():
        if len(indices) >= _TURNS and len(chosen) < requests:
            chosen += indices[: _TURNS * 2]
    return [
        [token for block in rows[i]["hash_ids"] for token in prompt(_BLOCK, block)]
        for i in sorted(chosen)[:requests]
    ]
