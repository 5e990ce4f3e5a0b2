"""Learns how long an engine lets its streams wait for a token, and when one has waited too long.

    gaps.add(seconds, now)          a stream got a token, so many seconds after the one before
    token_deadline(gaps.value(now), gaps.count, floor=3)        when the next one is late

An API server can answer `/health` while the engine core behind it hangs. Only the tokens that do
not come tell it. The deadline follows what the engine was seen to take, as time-outs by arrival
times do (Chen, Toueg and Aguilera, "On the quality of service of failure detectors", 2002;
RFC 6298 for TCP). They add a margin to a mean. The times between tokens have a long tail instead: a
step that computes a prompt, a preempted request. So the margin is a multiple of the longest one of
the last minutes.
"""

from typing import Final

FACTOR: Final = 4.0
"""The deadline over the longest time between two tokens. Too low: streams leave an engine that
computes one long prompt."""
HALF_LIFE: Final = 60.0
"""Seconds after which a long time counts for half. Too long: one preemption makes the deadline
useless for an hour."""
FEWEST: Final = 8
"""Times that have to be known. Fewer: what an engine does in its first second decides."""


class Longest:
    """The longest of some durations, in seconds; it halves every `HALF_LIFE`."""

    __slots__ = ("_at", "_seconds", "count")

    def __init__(self) -> None:
        self.count = 0
        self._seconds = self._at = 0.0

    def add(self, seconds: float, now: float, count: int = 1) -> None:
        """The longest of `count` more lasted `seconds`; they ended `now`."""
        self._seconds, self._at = max(seconds, self.value(now)), now
        self.count += count

    def value(self, now: float) -> float:
        """What is left of the longest by `now`."""
        if not self._seconds:
            return 0.0
        decay: float = 0.5 ** ((now - self._at) / HALF_LIFE)
        return self._seconds * decay


def token_deadline(
    longest: float, count: int, *, floor: float, prefill: float = 0.0
) -> float | None:
    """Seconds without a token after which a stream is late; None: too little is known.

    `longest`: the longest of `count` times between two tokens of a stream, or until the first of
    one. `floor`: the shortest deadline: as long as legs wait for an engine that answers no probe.
    `prefill`: how long the engine may take for a prompt it has to compute, for which all its
    streams may wait; 0: it has none.
    """
    if count < FEWEST:
        return None
    return max(floor, FACTOR * longest) + prefill
