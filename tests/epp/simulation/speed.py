"""How fast a simulated pod computes."""

from dataclasses import dataclass
from typing import Final

BUDGET: Final = 2048
"""Tokens per step."""
QUADRATIC: Final = 200_000
"""Position in a prompt at which a token costs twice as much as at its start."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a pod is. A router learns of it only through what it observes."""

    rate: float = 10_000.0
    """Prompt tokens per second at the start of a prompt."""
    empty: float = 0.008
    """Seconds of an empty step: launches and reading the weights."""
    per_decode: float = 0.0001
    """Seconds that each decode adds to a step."""
    per_context: float = 2e-8
    """Seconds that each KV token of a decode adds to a step: it is read from memory."""

    def times(self, factor: float) -> "Speed":
        """The speed of a pod that is `factor` times as fast at everything."""
        return Speed(
            self.rate * factor,
            self.empty / factor,
            self.per_decode / factor,
            self.per_context / factor,
        )

    def prefill_seconds(self, start: int, end: int) -> float:
        """Seconds to compute the prompt's tokens from `start` to `end` while nothing else runs."""
        steps = -(-(end - start) // BUDGET)
        return steps * self.empty + self.chunk_seconds(start, end)

    def chunk_seconds(self, start: int, end: int) -> float:
        """Seconds that a chunk of a prompt adds to a step."""
        return (end - start) * (1 + (start + end) / 2 / QUADRATIC) / self.rate
