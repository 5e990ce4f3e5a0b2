"""How often something happens: a moving average."""

from math import exp
from typing import Final

RATE_SECONDS: Final = 10.0
"""Time constant. Shorter: a pause of the engines looks like their end."""


class Rate:
    """The rate of events."""

    def __init__(self) -> None:
        self._events = 0.0
        """Events, those that are `RATE_SECONDS` old at the weight 1/e."""
        self._at = 0.0
        self._began: float | None = None

    def add(self, now: float) -> None:
        """It happened, `now` in seconds of any clock that only moves on."""
        self._fade(now)
        if self._began is None:
            self._began = now
        self._events += 1.0

    def per_second(self, now: float) -> float:
        """Events per second; 0: none yet."""
        if self._began is None:
            return 0.0
        self._fade(now)
        # While it is younger than the time constant, fewer events can have been counted.
        share = 1.0 - exp((self._began - now) / RATE_SECONDS) if now > self._began else 1.0
        return self._events / (RATE_SECONDS * max(share, 0.1))

    def _fade(self, now: float) -> None:
        if now > self._at:
            self._events *= exp((self._at - now) / RATE_SECONDS)
            self._at = now
