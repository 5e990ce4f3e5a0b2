"""The torch engine with declared durations.

Its tokens, KV cache, HTTP and metrics are real. Only its clock is not: it stands still but for the
seconds that COST declares for each step, with a deviation of up to DEVIATION. So what the engine
says of its times does not depend on how busy the machine is.

The declared durations are far shorter than the real ones, so that prefills never overlap by this
clock while their requests do not.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from tandem_engine import engine
from tandem_engine.runner import Runner
from tandem_engine.step import Chunk, SampledToken
from tandem_planner.prefill_fit import PrefillCost

COST: Final = PrefillCost(5e-4, 2e-6, 6e-10)
"""At 3,500 tokens, attention's quadratic term is half of the duration: far from the shape that the
EPP assumes at first."""
DEVIATION: Final = 0.15


class DeclaredClock:
    """In place of the module `time` in `tandem_engine.engine`."""

    def __init__(self) -> None:
        self._now = 1.0

    def perf_counter(self) -> float:
        """Seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """A step took `seconds`. Called by the one thread that runs steps."""
        self._now += seconds


CLOCK: Final = DeclaredClock()


class DeclaredRunner(Runner):
    """Runs each step, and advances the clock."""

    def run(
        self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None
    ) -> list[SampledToken | None]:
        """As `Runner.run`."""
        results = super().run(chunks, on_layer)
        CLOCK.advance(sum(step_seconds(chunk.start, chunk.end) for chunk in chunks))
        return results


def step_seconds(start: int, end: int) -> float:
    """The declared seconds of the tokens from `start` to `end` of a prompt, exclusive."""
    exact = COST.seconds(end) - COST.seconds(start)
    return exact * (1 + Random(f"{start} {end}").uniform(-DEVIATION, DEVIATION))


def declare_times() -> None:
    """Have the engine of this process use declared durations."""
    engine.time = CLOCK  # type: ignore[misc, assignment, attr-defined]
    engine.Runner = DeclaredRunner  # type: ignore[misc, attr-defined]
