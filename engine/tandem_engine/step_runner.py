"""Runs steps in the worker thread. Between two steps this thread is idle."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from .prompt_holds import PromptHolds
from .runner import Runner
from .scheduler import Step
from .step import SampledToken
from .step import Sequence as EngineSequence
from .tiers.arriving import ArrivingKv, LayersCut
from .tiers.build import Tiers


class StepRunner:
    """One engine's steps. For its event loop."""

    def __init__(
        self,
        runner: Runner,
        worker: ThreadPoolExecutor,
        wake: asyncio.Event,
        tiers: Tiers,
        holds: PromptHolds | None,
    ) -> None:
        """`wake` is set when another sequence may run."""
        self._wake = wake
        self._runner, self._worker, self._tiers, self._holds = runner, worker, tiers, holds

    async def run(self, step: Step) -> Sequence[SampledToken | None] | None:
        """Compute a planned step. Returns the sampled token of each chunk, or None for a chunk that
        ends within its prompt.

        None for the whole: a step on arriving KV was cut, and nothing of it was computed. The load
        may have ended by then, with all the KV that the step waited for.
        """
        if step.arriving is not None:
            return await self._run_arriving(step, step.arriving)
        publish = self._holds.layer_publisher(step.chunks) if self._holds is not None else None
        with self._tiers.saving(step.chunks) as save:
            run = partial(self._runner.run, step.chunks, _combined(publish, save))
            begin = time.perf_counter()
            results = await asyncio.get_running_loop().run_in_executor(self._worker, run)
        self._tiers.observe_step(step.chunks, time.perf_counter() - begin)
        return results

    async def _run_arriving(
        self, step: Step, seq: EngineSequence
    ) -> Sequence[SampledToken | None] | None:
        """A step whose time says nothing about computing, and whose layers no reader has."""
        kv = self._tiers.arriving(seq.id)
        kv.start_step()
        waits: list[float] = []
        begin = time.perf_counter()
        run = partial(self._runner.run, step.chunks, partial(_timed_wait, kv, waits))
        computing = asyncio.get_running_loop().run_in_executor(self._worker, run)
        waking = asyncio.create_task(self._wake.wait())
        await asyncio.wait((computing, waking), return_when=asyncio.FIRST_COMPLETED)
        waking.cancel()
        # Another sequence may run: it must not wait for this one's store.
        kv.interrupt()
        try:
            results = await computing
        except LayersCut:
            return None
        # All layers are here, so that the load is about to end.
        await kv.join()
        seq.start_time, seq.waited = begin, sum(waits)
        seq.overlapped = kv.ended_at - begin
        return results


def _combined(*callbacks: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """A callback that calls all of `callbacks` that are not None; None if all are."""
    present = [callback for callback in callbacks if callback is not None]

    def call(layers: int) -> None:
        for callback in present:
            callback(layers)

    return call if present else None


def _timed_wait(kv: ArrivingKv, waits: list[float], layers: int) -> None:
    """In the worker thread."""
    begin = time.perf_counter()
    kv.wait(layers)
    waits.append(time.perf_counter() - begin)
