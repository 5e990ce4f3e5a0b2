"""The share of its time for which a pod computes prompts, by those placed on it lately."""

from math import exp
from typing import Final

WINDOW_SECONDS: Final = 60.0
"""Time constant of the average. Shorter: it follows single long prompts, which the queue already
counts. Longer: a pod that has become quiet is avoided for longer."""


class Utilization:
    """The utilization of one pod. Only what this EPP and its replicas place is counted."""

    def __init__(self) -> None:
        self.share = 0.0
        """Seconds of prefills placed per second, a moving average as of the latest call; above 1 if
        the pod cannot keep up with them."""
        self._at = 0.0
        """The time for which `share` holds."""

    def add(self, seconds: float, now: float) -> None:
        """A prefill that takes `seconds` was placed."""
        self.fade(now)
        self.share += seconds / WINDOW_SECONDS

    def fade(self, now: float) -> None:
        """Time passed. Placements that other replicas report may be older than the latest one."""
        if now > self._at:
            self.share *= exp((self._at - now) / WINDOW_SECONDS)
            self._at = now
