"""`tandem-engine` whose steps last as long as on an accelerator of its own.

    python -P benchmarks/paced_engine.py FLAGS OF tandem-engine

Tokens, KV cache and hand-offs are the torch engine's. A step that is computed sooner waits until

    STEP + PER_TOKEN × tokens + PER_PAIR × (end² - start² of each sequence)   seconds

have passed. With a model small enough, a machine with few cores then carries several engines that
do not slow each other down.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

from tandem_engine import engine, main
from tandem_engine.runner import Runner
from tandem_engine.step import Chunk, SampledToken

STEP: Final = 0.01
PER_TOKEN: Final = 0.3e-3
PER_PAIR: Final = 2e-8


def step_seconds(spans: Sequence[tuple[int, int]]) -> float:
    """How long a step lasts at least; `spans`: start and end of what each sequence computes."""
    tokens = sum(end - start for start, end in spans)
    pairs = sum(end**2 - start**2 for start, end in spans)
    return STEP + PER_TOKEN * tokens + PER_PAIR * pairs


class PacedRunner(Runner):
    """Runs each step, and waits for its time."""

    def run(
        self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None
    ) -> list[SampledToken | None]:
        """As `Runner.run`, for the engine's worker thread."""
        ends = time.monotonic() + step_seconds([(chunk.start, chunk.end) for chunk in chunks])
        results = super().run(chunks, on_layer)
        time.sleep(max(0.0, ends - time.monotonic()))
        return results


if __name__ == "__main__":
    engine.Runner = PacedRunner  # type: ignore[misc, attr-defined]
    main.main()
