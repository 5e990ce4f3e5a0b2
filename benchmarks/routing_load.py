"""The requests of benchmarks/routing.py: a trace, or conversations that it makes up."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tests.epp.simulation.regimes import PLAIN, REGIMES
from tests.epp.simulation.workload import conversations, from_trace, spread

from tandem_planner.simulation.work import Request

_CONVERSATIONS: Final = 3000
"""Requests without a trace."""
_CONVERSATION_RATE: Final = 10.0
"""Requests per second without a trace, at speed 1: about half of what the pods can compute."""
ROUNDED: Final = 3.0
"""Seconds to which the Mooncake traces round times: about 10 requests share one instant."""


@dataclass(frozen=True, slots=True)
class Load:
    """Which requests."""

    trace: Path | None
    """None: made-up conversations."""
    speed: float
    limit: int | None = None
    """How many of them, from the first on; None: all."""
    regime: str = PLAIN
    """What differs, by its name in tests/epp/simulation/regimes.py."""
    is_spread: bool = False
    """Whether requests that the trace has at one instant come within ROUNDED seconds."""

    def times(self, speed: float, *, is_spread: bool = False) -> "Load":
        """`speed` times as fast."""
        return replace(self, speed=self.speed * speed, is_spread=is_spread)

    def requests(self, seed: int) -> list[Request]:
        """The requests. Raises TraceError."""
        make = REGIMES[self.regime].requests
        # A regime of other requests leaves nothing of a trace.
        if self.trace is None or make is not conversations:
            number = self.limit or _CONVERSATIONS
            return make(number, rate=_CONVERSATION_RATE * self.speed, seed=seed)
        requests = from_trace(self.trace, speed=self.speed, limit=self.limit)
        return spread(requests, ROUNDED / self.speed, seed) if self.is_spread else requests
