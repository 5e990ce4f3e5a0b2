"""Runs steps in the worker thread. Between two steps this thread is idle."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from .prompt_holds import PromptHolds
from .runner import Runner
from .scheduler import Step
from .step import SampledToken
from .tiers.arriving import LayersCut
from .tiers.no_tiers import Tiers


class StepRunner:
    """One engine's steps. For its event loop."""

    def __init__(
        self, runner: Runner, worker: ThreadPoolExecutor, tiers: Tiers, holds: PromptHolds | None
    ) -> None:
        self._runner, self._worker, self._tiers, self._holds = runner, worker, tiers, holds

    async def run(self, step: Step) -> Sequence[SampledToken | None]:
        """Compute a planned step. Returns the sampled token of each chunk, or None.

        A step on arriving KV that was cut has no result: its sequence's `computed_tokens` are not
        the start of the chunk then.
        """
        loop = asyncio.get_running_loop()
        if step.arriving is not None:
            # Of a step of its own: other sequences do not wait for this one's store. Its time says
            # nothing about computing, and no reader has its layers.
            kv = self._tiers.arriving(step.arriving.id)
            run = partial(self._runner.run, step.chunks, kv.wait)
            try:
                results = await loop.run_in_executor(self._worker, run)
            except LayersCut:
                return [None]
            # All layers are here, so that the load is about to end.
            await kv.join()
            return results
        on_layer = self._holds.layer_publisher(step.chunks) if self._holds is not None else None
        run = partial(self._runner.run, step.chunks, on_layer)
        begin = time.perf_counter()
        results = await loop.run_in_executor(self._worker, run)
        self._tiers.observe_step(step.chunks, time.perf_counter() - begin)
        return results
